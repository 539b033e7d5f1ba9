"""Fixtures that several tests of this folder use."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest
from safetensors.torch import load_file, save_file

from engine.runs.record.events import PlanBuilt
from tests.support.disk_offloading import train
from tests.support.folders import WORDS, make_config
from tests.support.gpu_resident_runs import Written, keep_on_gpu  # noqa: F401  a fixture
from tests.support.trained_runs import events_of


@pytest.fixture
def bad_row(tmp_path):
    """Returns a function that makes the settings of a run whose rows 5 and 13 have an infinite
    loss: the embedding of a word that occurs only there is infinite.
    """

    def config(**values):
        made = make_config(
            tmp_path,
            **{
                "data.shuffle": False,
                "data.packing": False,
                "data.eval_fraction": 0,
                "train.steps": 8,
                "output.checkpoint_every": 0,
                "output.eval_every": 0,
            }
            | values,
        )
        model = tmp_path / "model" / "model.safetensors"
        weights = load_file(model)
        weights["model.embed_tokens.weight"][WORDS.index("six") + 7] = float("inf")
        save_file(weights, model, metadata={"format": "pt"})
        (tmp_path / "data.jsonl").write_text("".join(map(_line, range(40))), encoding="utf-8")
        return made

    return config


def _line(row: int) -> str:
    said, answer = ("six", "seven") if row in (5, 13) else (WORDS[row % 4], WORDS[row % 4 + 1])
    turns = [("user", f"say after {said}"), ("assistant", answer)]
    return json.dumps({"messages": [{"role": who, "content": text} for who, text in turns]}) + "\n"


@pytest.fixture(scope="module")
def in_ram(tmp_path_factory) -> Callable[..., Written]:
    """Returns what a run with these settings writes whose planes are all in RAM. It is asked before
    a test changes anything, and trains once for all tests of a file.
    """
    folder = tmp_path_factory.mktemp("in-ram")

    @functools.cache
    def written(**values) -> Written:
        run = train(folder, "runs", **values)
        choices = events_of(run, PlanBuilt)[0].choices
        assert choices["gpu_resident_units"] == choices["disk_offloaded_units"] == 0
        return Written.by(run)

    return written
