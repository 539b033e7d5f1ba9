"""What a person calls a run and has noted about it: ``about.json`` in the run folder. It changes no
id and no setting.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.errors import RunError
from engine.files import write_whole
from engine.runs.folder import RunFolder

ABOUT_FILE = "about.json"
NAME_LIMIT = 120
NOTE_LIMIT = 4000


@dataclass(frozen=True)
class About:
    """Empty texts where nothing was written: the run is then called as its configuration says."""

    name: str = ""
    note: str = ""


def read_about(path: Path) -> About:
    """Of the run folder `path`. A file that is missing or damaged says nothing: it is no reason not
    to show a run.
    """
    try:
        values = json.loads((path / ABOUT_FILE).read_text(encoding="utf-8"))
        name, note = values["name"], values["note"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return About()
    return About(name, note) if isinstance(name, str) and isinstance(note, str) else About()


def write_about(folder: RunFolder, name: str, note: str) -> About:
    """Keep both, without the white space around them, and return what is kept. An empty name takes
    the configuration's back.

    Raises RunError for a name of several lines, for texts that are too long, and when the file
    cannot be written.
    """
    about = About(name.strip(), note.strip())
    if not about.name.isprintable():
        raise RunError(
            "The name has a line break or another character that cannot be shown; write it in one "
            "line."
        )
    for what, text, limit in (("name", about.name, NAME_LIMIT), ("note", about.note, NOTE_LIMIT)):
        if len(text) > limit:
            raise RunError(f"The {what} has {len(text):,} characters; {limit:,} are possible.")
    try:
        write_whole(
            folder.path / ABOUT_FILE, json.dumps(asdict(about), ensure_ascii=False, indent=1)
        )
    except OSError as error:
        raise RunError(
            f"The name and note of run {folder.id} cannot be written ({error.strerror}); check "
            f"{folder.path}."
        ) from None
    return about
