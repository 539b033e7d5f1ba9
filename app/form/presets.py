"""Presets: files of settings that can fill the form, those of the program, and a person's own,
which are kept beside the runs.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from engine import safe_files
from engine.config.settings import TrainConfig
from engine.errors import RamstreamError, RunError
from engine.paths import PROGRAM_ROOT

PRESETS = PROGRAM_ROOT / "presets"
OWN_FOLDER = ".presets"
"""Folder of a person's own presets, in the folder of the runs."""
OWN = "own/"
"""Prefix of the key of a person's own preset; the name of its file follows."""
FIRST_PRESET = "starter.yaml"
LONGEST_NAME = 60


@dataclass(frozen=True)
class Preset:
    """One file of settings."""

    file: str
    """Key of the preset: the name of its file, after `OWN` for a person's own."""
    name: str
    about: str
    """Comment at the top of the file, or the reason why the file cannot be used."""
    config: TrainConfig | None
    """None if the file cannot be used."""

    @property
    def is_own(self) -> bool:
        return self.file.startswith(OWN)

    @property
    def label(self) -> str:
        """The name in the list of presets."""
        return f"{self.name} (yours)" if self.is_own else self.name


def read_presets() -> dict[str, Preset]:
    """Returns the presets of the program by key, the starters first."""
    files = sorted(PRESETS.glob("*.yaml"), key=lambda path: _place(path.name))
    return {path.name: _read_preset(path.name, path, PRESETS) for path in files}


def _own_presets(folder: Path) -> dict[str, Preset]:
    """Returns a person's own presets by key."""
    try:
        names = sorted(safe_files.entries(folder, folder))
    except OSError:  # nothing was saved yet
        return {}
    files = [folder / name for name in names if name.endswith(".yaml")]
    return {OWN + path.name: _read_preset(OWN + path.name, path, folder) for path in files}


def _place(name: str) -> tuple[bool, bool, str]:
    """Returns what the presets of a folder are sorted by."""
    return not name.startswith("starter"), name != FIRST_PRESET, name


def _read_preset(key: str, path: Path, folder: Path) -> Preset:
    try:
        config = TrainConfig.load(path, within=folder)
        text = safe_files.read_text(path, folder)
    except RamstreamError as error:
        return Preset(key, f"{path.name} (cannot be used)", str(error), None)
    comment: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# ").rstrip())
    return Preset(key, config.name, " ".join(comment), config)


class PresetShelf:
    """All presets; a person's own are kept in `runs_dir`."""

    def __init__(self, runs_dir: Path):
        self.own_folder = runs_dir / OWN_FOLDER
        self._bundled = read_presets()
        self._lock = threading.Lock()

    def listed(self) -> dict[str, Preset]:
        """Returns the presets by key: a person's own follow those of the program. Own ones are read
        anew, since a person may edit their files.
        """
        return self._bundled | _own_presets(self.own_folder)

    def get(self, file: str | None) -> Preset | None:
        return self.listed().get(file or "")

    def save(self, name: str, config: TrainConfig, today: date) -> Preset:
        """Writes an own preset. Raises RunError if there is one of this name, or none was given."""
        name = " ".join(name.split())
        if not name:
            raise RunError("The preset has no name; type one.")
        if len(name) > LONGEST_NAME:
            raise RunError(f"The name is longer than {LONGEST_NAME} characters; shorten it.")
        slug = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "preset"
        with self._lock:
            taken = {each.name.casefold() for each in self.listed().values()}
            path = self.own_folder / f"{slug}.yaml"
            if name.casefold() in taken or os.path.lexists(path):
                raise RunError(f"There is a preset named {name}; choose another name.")
            self._write(path, config.with_values({"name": name}), today)
        return _read_preset(OWN + path.name, path, self.own_folder)

    def _write(self, path: Path, config: TrainConfig, today: date) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            config.save(path)
            text = safe_files.read_text(path, path.parent)
            sentence = f"# Saved from the form on {today.isoformat()}.\n{text}"
            safe_files.write_whole(path, sentence, path.parent)
        except OSError as error:
            raise RunError(f"The preset cannot be written to {path}: {error.strerror}.") from None

    def remove(self, file: str) -> None:
        """Deletes an own preset. Raises RunError for any other one."""
        preset = self.get(file)
        if preset is None or not preset.is_own:
            raise RunError("There is no such preset of yours, so none was deleted.")
        with self._lock:
            safe_files.remove(self.own_folder / file.removeprefix(OWN), self.own_folder)
