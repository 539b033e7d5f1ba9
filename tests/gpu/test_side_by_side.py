"""The trainings that a machine with GPUs compares are jobs that a run would take."""

from __future__ import annotations

import itertools
import json

import pytest

from engine.config.settings import TrainConfig
from engine.planning.shape.catalog import entry_of
from tests.gpu import side_by_side
from tests.gpu.side_by_side import TOPICS

pytestmark = pytest.mark.computing


def test_settings_are_those_of_a_run(tmp_path):
    for training in itertools.chain.from_iterable(TOPICS.values()):
        words = side_by_side.command(training, tmp_path, small=False)
        preset = words[words.index("bench") + 1]
        changes = [after for word, after in itertools.pairwise(words) if word == "--set"]
        config = TrainConfig.load(preset, changes)
        assert config.train.batch_size == training.rows and config.engine.gpus == training.gpus
        assert entry_of(training.model) is not None


def test_what_was_measured_stands_whatever_becomes_of_the_next(monkeypatch, capsys):
    streamed = {
        "seconds": 2.0,
        "predicted_seconds": 2.1,
        "tokens_per_second": 1000.0,
        "tflops": {"hardware": 500.0},
        "exposed_share": 0.01,
    } | dict.fromkeys(
        (
            "peak_device_bytes",
            "planned_device_bytes",
            "host_peak_bytes",
            "predicted_host_bytes",
            "host_file_bytes",
        ),
        1 << 30,
    )
    twice = streamed | {"tokens_per_second": 1950.0}
    answers = iter(
        f"print({json.dumps(json.dumps({'trainings': [{'streamed': each}]}))})"
        for each in (streamed, twice)
    )
    fails = "import sys; sys.exit('no memory')"
    monkeypatch.setattr(
        side_by_side,
        "command",
        lambda *_: [side_by_side.sys.executable, "-c", next(answers, fails)],
    )
    side_by_side.main(["two-gpus"])
    one, two, three = capsys.readouterr().out.splitlines()
    assert "2.00 s (predicted 2.10), 1,000 tokens/s, 500 TFLOPS of work" in one
    assert two.endswith("1.950 times the first one's tokens/s")
    assert three.endswith("ended with 1: no memory")
    side_by_side.main(["two-gpus", "--seconds", "30"])
    assert capsys.readouterr().out.count("not begun") == 3


def test_a_rehearsal_has_as_many_rows_for_each_gpu(tmp_path):
    for training in itertools.chain.from_iterable(TOPICS.values()):
        words = side_by_side.command(training, tmp_path, small=True)
        (rows,) = (word for word in words if word.startswith("train.batch_size="))
        assert int(rows.partition("=")[2]) % training.gpus == 0
