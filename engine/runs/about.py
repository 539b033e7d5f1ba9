"""The name and the note that a person gives to a run are kept in ``about.json`` in its folder.

They do not change the run's id or any setting.
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
    """An `About` holds the name and the note that a person gave to a run.

    Either text may be empty. Without a name, the run is shown under its configuration's name.
    """

    name: str = ""
    note: str = ""


def read_about(path: Path) -> About:
    """Reads what a person wrote about the run in folder `path`.

    A missing or damaged file counts as empty, since it must not prevent a run from being shown.
    """
    try:
        values = json.loads((path / ABOUT_FILE).read_text(encoding="utf-8"))
        name, note = values["name"], values["note"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return About()
    if not isinstance(name, str) or not isinstance(note, str):
        return About()
    return About(name, note)


def write_about(folder: RunFolder, name: str, note: str) -> About:
    """Strips both texts, writes them, and returns what was written.

    With an empty name, the run is shown under its configuration's name again. Raises RunError for a
    name of several lines, for texts that are too long, and when the file cannot be written.
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
