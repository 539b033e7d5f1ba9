"""A person's name for a run and notes on it are kept in ``about.json`` in the run folder.

They change no id and no setting.
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
    """A person gave a run this name and this note.

    A text is empty where nothing was written: the run is then called as its configuration says.
    """

    name: str = ""
    note: str = ""


def read_about(path: Path) -> About:
    """Reads what a person wrote about the run in folder `path`.

    A file that is missing or damaged counts as empty: it is no reason not to show a run.
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
    """Writes both texts, without the white space around them, and returns what is kept.

    With an empty name, the run has the configuration's name again. Raises RunError for a name of
    several lines, for texts that are too long, and when the file cannot be written.
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
