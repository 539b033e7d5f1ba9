"""Presets are files of settings that can fill the form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config.settings import TrainConfig
from engine.errors import RamstreamError
from engine.paths import PROGRAM_ROOT

PRESETS = PROGRAM_ROOT / "presets"
FIRST_PRESET = "starter.yaml"


@dataclass(frozen=True)
class Preset:
    """A `Preset` is one file of `presets/`."""

    file: str
    name: str
    about: str
    """This is the comment at the top of the file, or the reason why the file cannot be used."""
    config: TrainConfig | None
    """This is None if the file cannot be used."""


def read_presets(folder: Path = PRESETS) -> dict[str, Preset]:
    """Returns the presets by file name, the starter first."""
    files = sorted(folder.glob("*.yaml"), key=lambda path: (path.name != FIRST_PRESET, path.name))
    return {path.name: _read_preset(path) for path in files}


def _read_preset(path: Path) -> Preset:
    try:
        config = TrainConfig.load(path)
    except RamstreamError as error:
        return Preset(path.name, f"{path.name} (cannot be used)", str(error), None)
    comment: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# ").rstrip())
    return Preset(path.name, config.name, " ".join(comment), config)
