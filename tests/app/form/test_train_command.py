"""The command that the form offers to copy trains exactly its settings."""

from __future__ import annotations

import shlex
from datetime import date

import pytest

import launch
from app.form.presets import PresetShelf, read_presets
from app.form.settings_form import read_config, shown_values
from app.form.train_command import train_command
from engine.config.settings import TrainConfig

PRESETS = read_presets()
STARTER = PRESETS["starter.yaml"]
MIX = [
    {"source": "/d/it's here.csv", "weight": 2.5},
    {"source": "org/name", "split": "test", "columns": {"prompt": " Q: ", "completion": "A\x7f"}},
]


def arguments_of(command):
    """Returns the arguments as the shell and the program's own parser understand the command."""
    _, program, *words = shlex.split(command)
    assert program.endswith("launch.py")
    return launch._parser().parse_args(words)


def trained_by(command):
    found = arguments_of(command)
    return TrainConfig.load(found.preset, found.set)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"name": "Qué \"on\" $HOME `x` 'y'", "train.learning_rate": 1e-5, "train.eps": 1e-12},
        {"name": "on", "train.steps": None, "train.epochs": 3.0, "train.max_grad_norm": None},
        {"name": "2026-11-29", "output.sample_prompts": ["a\nb", "- c: [d] # e", "😀 f\u2028"]},
        {"data.source": MIX, "output.export": False, "engine.rounds": 2},
        {"data.columns.prompt": "null", "data.columns.completion": "1e3"},
        {"train.method": "lora", "train.lora_rank": 4, "model.source": "org/~model"},
    ],
)
@pytest.mark.parametrize("chosen", [STARTER, None])
def test_the_program_reads_the_settings_of_the_form(tmp_path, values, chosen):
    config = STARTER.config.with_values(values)
    assert read_config(shown_values(config)) == config
    command = train_command(config, chosen, list(PRESETS.values()), tmp_path)
    assert "\n" not in command
    assert trained_by(command) == config
    assert arguments_of(command).runs_dir == tmp_path


def test_only_what_differs_from_the_preset_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = STARTER.config.with_values({"train.steps": 9})
    command = train_command(config, STARTER, [], tmp_path / "runs")
    assert command.endswith("launch.py train presets/starter.yaml --set train.steps=9")
    other = PRESETS["starter-preferences.yaml"].config
    assert "--set" not in train_command(other, None, list(PRESETS.values()), tmp_path / "runs")


def test_a_preset_of_ones_own_is_found(tmp_path):
    shelf = PresetShelf(tmp_path / "runs")
    own = shelf.save("My own", STARTER.config.with_values({"train.steps": 9}), date(2026, 1, 1))
    config = own.config.with_values({"train.seed": 5})
    command = train_command(config, own, [], tmp_path / "runs")
    assert trained_by(command) == config
    assert arguments_of(command).set == ["train.seed=5"]
