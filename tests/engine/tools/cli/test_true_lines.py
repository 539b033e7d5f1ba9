"""Lines of the terminal do not round something to nothing, nor tell what was not measured."""

from __future__ import annotations

from types import SimpleNamespace

import launch
from engine.runs.record.events import BestKept, CheckpointWritten, ExactMatchMeasured
from engine.tools.cli import train
from engine.tools.cli.runs import runs_as_text
from engine.training.loop.run import start_run
from tests.support.folders import make_config


def line_of(event) -> str:
    return train._Screen._line_of(SimpleNamespace(), event)


def test_small_files_and_short_times_are_not_zero():
    best = line_of(BestKept(step=3, bytes=3_400_000, seconds=0.012))
    assert "3.4 MB" in best and "0.012 s" in best
    saved = line_of(
        CheckpointWritten(step=3, path="x", bytes=7_063_000, seconds=0.034, waited_seconds=0.001)
    )
    assert "7.1 MB" in saved and "0.034 s" in saved


def test_nearly_all_answers_are_not_all():
    event = ExactMatchMeasured(step=3, moment="after", correct=299, total=300, samples=[])
    assert "299 of 300 (over 99 %)" in line_of(event)


def test_little_of_a_disk_is_not_nothing(capsys):
    assert launch.main(["check", "presets/starter.yaml"]) == 0
    out = capsys.readouterr().out
    assert ", 0 %" not in out and "under 1 %" in out


def test_a_run_whose_steps_are_not_known_has_no_number_of_them(tmp_path):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    text = runs_as_text(tmp_path / "runs", as_json=False)
    assert run.id in text and "0/0" not in text
    run.recorder.close()
