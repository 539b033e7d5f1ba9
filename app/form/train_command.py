"""The command that trains what the form shows, without a browser: a preset, and each setting that
differs from it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from app.form.presets import OWN, OWN_FOLDER, PRESETS, Preset
from app.form.settings_form import in_yaml_line, what_is_given
from engine.config.settings import TrainConfig
from engine.config.tree import by_dotted_name, read_yaml
from engine.errors import ConfigError
from engine.paths import PROGRAM_ROOT, program_command

USUAL_RUNS = Path("runs")
"""Folder of the runs of a command that names none."""


def train_command(
    config: TrainConfig, chosen: Preset | None, presets: Collection[Preset], runs_dir: Path
) -> str:
    """Returns a line for a shell that trains `config` with its run in `runs_dir`. It begins with
    the preset that was `chosen` or, if there is none, with the one of `presets` that differs least.
    """
    usable = [each for each in (chosen, *presets) if each is not None and each.config is not None]
    base = usable[0] if chosen in usable else min(usable, key=lambda one: len(_own(config, one)))
    words = ["train", _path_of(base, runs_dir)]
    for dotted, value in _own(config, base).items():
        words += ["--set", f"{dotted}={_as_yaml(value)}"]
    if runs_dir.absolute() != USUAL_RUNS.absolute():
        words += ["--runs-dir", str(runs_dir.absolute())]
    return f"{program_command()} {shlex.join(words)}"


def _own(config: TrainConfig, preset: Preset) -> dict[str, Any]:
    """Returns the settings that differ from those of a preset, by dotted name."""
    assert preset.config is not None, "only presets that can be used are asked about"
    base, own = (by_dotted_name(_plain(each.to_dict())) for each in (preset.config, config))
    return {dotted: value for dotted, value in own.items() if value != base.get(dotted, ...)}


def _plain(value: Any) -> Any:
    """Returns a value with lists in place of tuples, as YAML has them; what is listed has only what
    is given.
    """
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(map(_item, value)) if isinstance(value, (list, tuple)) else value


def _item(item: Any) -> Any:
    return what_is_given(item) if isinstance(item, dict) else item


def _path_of(preset: Preset, runs_dir: Path) -> str:
    if preset.is_own:
        return str((runs_dir / OWN_FOLDER).absolute() / preset.file.removeprefix(OWN))
    return os.fspath((PRESETS / preset.file).relative_to(PROGRAM_ROOT))


def _as_yaml(value: Any) -> str:
    """Returns a value as YAML in one line; a text stands without quotes if YAML reads it so."""
    if isinstance(value, str) and _is_read_as(value, value):
        return value
    if isinstance(value, (str, list)):
        return in_yaml_line(value)
    text: str = yaml.safe_dump(value)
    return text.partition("\n")[0]


def _is_read_as(text: str, value: str) -> bool:
    try:
        return bool(read_yaml(text) == value)
    except (yaml.YAMLError, ConfigError):
        return False
