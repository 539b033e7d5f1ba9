"""Whole runs of adapters and of parts on several ranks, each a process: what they save is what a
run of one rank does, and they go on with another number of ranks.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.runs.record.events import RunStarted, StepFinished
from engine.training.loop.run import Run
from tests.support.pair_ranks import train as train_pairs
from tests.support.rank_runs import again, assert_close, on, planes
from tests.support.rank_runs import train as train_rows
from tests.support.trained_runs import events_of, files_of
from tests.support.worker_groups import forked_workers  # noqa: F401  a fixture

pytestmark = [
    pytest.mark.computing,
    pytest.mark.slow("it starts processes and waits for them, for five seconds or more"),
]

LORA = {"train.method": "lora", "train.lora_rank": 4, "train.lora_dropout": 0.2}
PARTS = {"train.method": "parts", "train.last_blocks": 1}
EVERY = {"output.checkpoint_every": 2, "output.keep_checkpoints": 9, "output.eval_every": 0}


def figures(run: Run) -> list[float]:
    return [event.loss for event in events_of(run, StepFinished)]


@pytest.mark.parametrize("values", [LORA, PARTS])
def test_a_run_goes_on_with_other_ranks(tmp_path, values):
    """Ten steps of two ranks, one and two are those of one rank, but for rounding."""
    values = values | EVERY | {"train.steps": 10}
    one = train_rows(tmp_path, "one", on(1, **values))
    run = train_rows(tmp_path, "two", on(2, **values), {4: "stop"})
    for ranks, stop in ((1, 6), (2, 0)):
        run = again(tmp_path / "two", run, ranks, {stop: "stop"} if stop else None)
    assert [event.resumed_step for event in events_of(run, RunStarted)] == [None, 4, 6]
    assert figures(run) == pytest.approx(figures(one), rel=1e-4)
    assert files_of(run).keys() >= {4, 6, 10}
    assert_close(planes(run, 10), planes(one, 10))


@pytest.mark.parametrize("values", [LORA, PARTS])
def test_bits_repeat(tmp_path, values):
    first, second = (train_rows(tmp_path, n, on(2, **values | EVERY)) for n in ("a", "b"))
    assert files_of(first) == files_of(second) and figures(first) == figures(second)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_two_ranks_learn_from_pairs_with_adapters(tmp_path, objective):
    values = LORA | {"train.lora_dropout": 0.0}
    one, two = (train_pairs(tmp_path, f"on{ranks}", ranks, objective, **values) for ranks in (1, 2))
    assert figures(two) == pytest.approx(figures(one), rel=1e-4)
    for name, held in planes(two, 8).items():
        np.testing.assert_allclose(held, planes(one, 8)[name], rtol=3e-4, atol=3e-6, err_msg=name)
