"""The name, the note and the tags that a person gives to a run, in ``about.json`` in its folder.

They do not change the run's id or any setting.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from engine import safe_files
from engine.errors import RunError
from engine.runs.record.run_folder import RunFolder

ABOUT_FILE = "about.json"
NAME_LIMIT = 80
NOTE_LIMIT = 4000
TAG_LIMIT, MOST_TAGS = 40, 12
"""Number of characters of a tag, and of tags of a run, at most."""


@dataclass(frozen=True)
class About:
    """The name, the note and the tags that a person gave to a run.

    Each is empty where nobody gave one. Without a name, the run is shown under its configuration's.
    """

    name: str = ""
    note: str = ""
    tags: tuple[str, ...] = ()


class _Written(msgspec.Struct):
    """Content of the file."""

    name: str
    note: str
    tags: list[str] = []


def read_about(path: Path) -> About:
    """Reads what a person wrote about the run in folder `path`.

    A missing or damaged file counts as empty, since it must not prevent a run from being shown.
    """
    try:
        written = safe_files.read_json(path / ABOUT_FILE, path.parent, _Written)
    except OSError:
        return About()
    return About(written.name, written.note, tuple(written.tags))


def write_about(folder: RunFolder, name: str, note: str, tags: Iterable[str] = ()) -> About:
    """Strips all texts, writes them, and returns what was written. Empty and repeated tags are left
    out.

    Raises RunError for a name that is empty or has several lines, for texts or tags that are too
    long or too many, and when the file cannot be written.
    """
    stripped = dict.fromkeys(tag.strip() for tag in tags)
    about = About(name.strip(), note.strip(), tuple(tag for tag in stripped if tag))
    if not about.name:
        raise RunError("The name is empty; give the run one.")
    if not about.name.isprintable():
        raise RunError(
            "The name has a line break or another character that cannot be shown; write it in one "
            "line."
        )
    for what, text, limit in (("name", about.name, NAME_LIMIT), ("note", about.note, NOTE_LIMIT)):
        if len(text) > limit:
            raise RunError(f"The {what} has {len(text):,} characters; {limit:,} are possible.")
    for tag in about.tags:
        if len(tag) > TAG_LIMIT or not tag.isprintable():
            raise RunError(
                f"A tag is one line of at most {TAG_LIMIT} characters; change “{tag[:TAG_LIMIT]}”."
            )
    if len(about.tags) > MOST_TAGS:
        raise RunError(f"There are {len(about.tags)} tags; {MOST_TAGS} are possible.")
    try:
        text = json.dumps(asdict(about), ensure_ascii=False, indent=1)
        safe_files.write_whole(folder.path / ABOUT_FILE, text, folder.root)
    except OSError as error:
        raise RunError(
            f"The name, note and tags of run {folder.id} cannot be written ({error.strerror}); "
            f"check {folder.path}."
        ) from None
    return about
