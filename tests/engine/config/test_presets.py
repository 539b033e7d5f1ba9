"""Every preset of a real model is loaded, checked, and run for two steps with a shrunken model of
its family, all through the command line.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import launch
from engine.config.settings import TrainConfig
from engine.model.build.library import no_progress_bars
from engine.planning.shape.catalog import entry_of
from engine.runs.record.following import EVENTS_FILE
from engine.runs.summaries.listing import list_runs
from tests.support.families import tiny_family_config
from tests.support.folders import make_data, make_tokenizer

pytestmark = pytest.mark.computing

PRESETS = [
    path
    for path in sorted((Path(launch.__file__).parent / "presets").glob("*.yaml"))
    if not path.stem.startswith("starter")  # they train models of their own
]


@pytest.fixture(scope="module")
def shrunken(tmp_path_factory):
    """The folder of a tiny random model of the same family, embeddings tied or not as in the real
    one; made once each.
    """
    made: dict[tuple[str, bool], Path] = {}

    def folder(config: dict) -> Path:
        key = config["model_type"], bool(config.get("tie_word_embeddings"))
        if key not in made:
            made[key] = path = tmp_path_factory.mktemp("model")
            torch.manual_seed(3)
            with no_progress_bars():
                AutoModelForCausalLM.from_config(
                    tiny_family_config(key[0], tied=key[1])
                ).save_pretrained(path)
            # The classes of some families read tokens of bytes alone.
            make_tokenizer(of_letters=True).save_pretrained(path)
        return made[key]

    return folder


def test_there_is_one_for_each_family_and_size_class():
    entries = [entry_of(TrainConfig.load(path).model.source) for path in PRESETS]
    assert len(PRESETS) >= 12 and None not in entries
    assert len({entry.family for entry in entries}) >= 10
    sizes = sorted(entry.shape().parameter_count / 1e9 for entry in entries)
    for low, high in ((0, 1), (1, 3), (3, 8), (8, 16), (16, 40), (40, 80), (80, 130)):
        assert any(low <= size < high for size in sizes), (low, high)


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_checked_and_runs(preset, shrunken, tmp_path, capsys):
    asked = TrainConfig.load(preset)
    assert (
        launch.main(["check", str(preset), "--machine", "H200", "--ram-gib", "2048", "--json"]) == 0
    )
    report = json.loads(capsys.readouterr().out)
    entry = entry_of(asked.model.source)
    assert report["model"]["parameters"] == entry.shape(adapters=asked.train.parts).parameter_count
    assert report["time"]["step_seconds"] > 0

    changes = {
        "model.source": shrunken(entry.config_of(asked.model.source)),
        "model.dtype": "float32",
        "data.source": make_data(tmp_path / "data.jsonl"),
        "data.split": "train",
        "data.max_seq_len": 128,
        "data.eval_fraction": 0.1,
        "train.steps": 2,
        "train.epochs": "null",
        "train.batch_size": 4,
        "engine.device": "cpu",
        "output.export": "false",
    }
    assert (
        launch.main(
            [
                "train",
                str(preset),
                "--runs-dir",
                str(tmp_path / "runs"),
                *(word for name, value in changes.items() for word in ("--set", f"{name}={value}")),
            ]
        )
        == 0
    )
    (run,) = list_runs(tmp_path / "runs")
    assert run.state == "finished"
    events = [
        json.loads(line)
        for line in (tmp_path / "runs" / run.id / EVENTS_FILE).read_text().splitlines()
    ]
    assert [event["step"] for event in events if event["kind"] == "step_finished"] == [1, 2]
    run_as = TrainConfig.load(tmp_path / "runs" / run.id / "config.yaml")
    assert run_as.train.parts == asked.train.parts
    for name in ("learning_rate", "schedule", "warmup_steps", "weight_decay", "beta2"):
        assert getattr(run_as.train, name) == getattr(asked.train, name)
