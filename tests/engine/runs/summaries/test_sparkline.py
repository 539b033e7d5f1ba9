"""A glance tells what the whole record tells, however long it is."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from engine.runs.record.events import EvalFinished, ExactMatchMeasured, RunStarted
from engine.runs.record.recorder import RunRecorder
from engine.runs.summaries.curves_csv import curves_csv
from engine.runs.summaries.sparkline import NO_SPARKLINE, POINTS, read_sparkline
from tests.support.synthetic_run import step_finished


def write(folder, events):
    recorder = RunRecorder(folder, folder.name)
    for event in events:
        recorder.emit(event)
    recorder.close()
    return folder / "events.jsonl"


def steps(first, last, total=1000):
    return [step_finished(step, total) for step in range(first, last + 1)]


@pytest.mark.parametrize("count", [1, 39, 41, 399, 400, 2500])
def test_the_small_curve_follows_the_loss(tmp_path, count):
    events = steps(1, count, count)
    sparkline = read_sparkline(write(tmp_path, [RunStarted(total_steps=count), *events]))
    assert len(sparkline.losses) == min(count, POINTS)
    borders = np.linspace(0, count, len(sparkline.losses) + 1).astype(int)
    losses = np.array([event.loss for event in events])
    means = [losses[a:b].mean() for a, b in pairwise(borders)]
    assert np.abs(np.array(sparkline.losses) - means).max() < 0.15 * (
        losses.max() - losses.min() + 1
    )


def test_what_a_resume_discarded_is_not_told(tmp_path):
    events = [
        RunStarted(total_steps=60),
        *steps(1, 20),
        EvalFinished(step=20, loss=0.5),
        ExactMatchMeasured(step=20, correct=9, total=10),
        RunStarted(total_steps=60, resumed_step=10),
        *steps(11, 15),
        EvalFinished(step=0, loss=0.1),
        EvalFinished(step=15, loss=2.0),
        ExactMatchMeasured(step=15, correct=1, total=4),
    ]
    path = write(tmp_path, events)
    with path.open("ab") as file:
        file.write(b'{"kind": "step_finished", damaged\n{"kind": "eval_fin')
    sparkline = read_sparkline(path)
    assert len(sparkline.losses) == 15
    assert (sparkline.validation_loss, sparkline.accuracy) == (2.0, 0.25)
    rows = [line.split(",") for line in "".join(curves_csv(path)).splitlines()]
    assert [row[0] for row in rows[1:]] == [str(step) for step in range(16)]
    assert rows[1][-3:] == ["0.1", "", ""] and rows[-1][-3:] == ["2.0", "1", "4"]


def test_a_run_without_a_record_has_an_empty_glance(tmp_path):
    assert read_sparkline(tmp_path / "events.jsonl") == NO_SPARKLINE
    assert NO_SPARKLINE.accuracy is None and NO_SPARKLINE.losses == ()
