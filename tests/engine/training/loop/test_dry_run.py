"""The dry run takes a normal step on the longest rows, changes nothing, and fails a run that does
not fit.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.data.batches.packing import one_each
from engine.data.batches.rows import DocumentTokens, Order, RowSet, batches
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlaneSizes
from engine.planning.schedule.ops import UPDATE_LANES, Lane, Op
from engine.planning.schedule.verify_plan import PlanError, verify_plan
from engine.runs.record.events import (
    ExactMatchMeasured,
    ForecastChecked,
    JobProgressed,
    LogLine,
    StepFinished,
)
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.loop.run import resume_run, start_run
from engine.training.loop.step_loop import longest_batches
from tests.support.device_updates import DEVICE_UPDATES, updated_on_device
from tests.support.failing import failed
from tests.support.folders import make_config
from tests.support.same_bits import BASE, SAME_BITS, DelayedBackend, assert_same_bits
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config
from tests.support.trained_runs import events_of, execute, planes_on_disk

CHOICES = {
    name: BASE.changed(**SAME_BITS[name])
    for name in ("two kept, two slots", "block inputs on the host, two kept")
} | {
    "rounds": BASE.changed(rounds=2, main_grad="host"),
    "on the device": updated_on_device(DEVICE_UPDATES["all"], 3, "device", blocks_kept_in_slots=1),
}
WRITES_STATES = {
    "clip",
    "update",
    "device_update",
    "offload_weights",
    "offload_states",
    "optimizer_step",
}


def plan_of(choices, updates: bool):
    blocks = ["block 0", "block 1", "block 2"]
    sizes = PlaneSizes(numel=dict.fromkeys(["embed", *blocks, "head"], 640))
    return build_step_plan(blocks, False, choices, sizes, updates)


@pytest.mark.parametrize("name", CHOICES)
def test_its_plan_is_the_step_up_to_the_summary(name):
    dry, step = plan_of(CHOICES[name], False), plan_of(CHOICES[name], True)
    verify_plan(dry)
    assert not {op.kind for op in dry.ops} & WRITES_STATES and dry.ops[-1].kind == "summary"
    assert [_alone(op) for op in dry.ops] == [_alone(op) for op in step.ops[: len(dry.ops)]]
    assert (dry.slots, dry.grads, dry.stagings, dry.rings) == (
        step.slots,
        step.grads,
        step.stagings,
        step.rings,
    )
    last = max(op.index for op in dry.ops if op.kind == "offload")
    broken = tuple(dataclasses.replace(op, waits=()) if op.index == last else op for op in dry.ops)
    with pytest.raises(PlanError):
        verify_plan(dataclasses.replace(dry, ops=broken))


def _alone(op: Op) -> Op:
    """Returns `op` without its waits, which depend on what the previous step wrote."""
    return dataclasses.replace(op, waits=(), waits_previous=())


@pytest.mark.parametrize(
    "late",
    [(), Lane, (*UPDATE_LANES, Lane.HOST), (Lane.COMPUTE,)],
    ids=lambda late: "+".join(late) or "none",
)
@pytest.mark.parametrize("name", CHOICES)
def test_it_changes_no_bit(name, late):
    """An engine without a dry run gives the same bits, also in later steps, with delayed lanes and
    with dropout.
    """
    plain = plain_model(tiny_config("gpt2", attn_pdrop=0.1, resid_pdrop=0.1))
    found = []
    for dry in (True, False):
        run = streamed(plain, CHOICES[name], backend=DelayedBackend(late), dtype="bfloat16")
        kept = [
            (unit.name, plane)
            for unit in run.model.units
            for plane in run.host_states.planes
            if plane != "grad"
        ]
        if dry:
            before = [run.host_states.tensor(*key).clone() for key in kept]
            torch.manual_seed(5)
            generator = torch.random.get_rng_state()
            run.engine.dry_run(random_batches(2, seed=77))
            assert torch.equal(torch.random.get_rng_state(), generator)
            assert_same_bits([run.host_states.tensor(*key) for key in kept], before)
        applied = []
        for step in (1, 2):
            run.engine.train_step(step, random_batches(2, seed=step), 1e-2, applied.append)
        run.engine.drain()
        found.append(
            (
                [run.host_states.tensor(*key).clone() for key in kept],
                [(a.loss, a.grad_norm) for a in applied],
            )
        )
        run.close()
    assert_same_bits(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def rows_of(*lengths: int) -> RowSet:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(starts[-1], dtype=np.int32)
    documents = DocumentTokens(ids, np.ones(len(ids), dtype=bool), starts)
    return RowSet(documents, one_each(len(lengths)), pad_id=0, order=Order(seed=1, shuffle=True))


def test_it_reads_the_longest_rows_in_the_shape_of_a_step():
    rows = rows_of(3, 9, 4, 9, 5, 7, 2)
    shapes = [batch.input_ids.shape for batch in longest_batches(rows, 5, 2)]
    assert shapes == [(2, 9), (2, 7), (1, 4)]
    for step in range(1, 5):
        real = [batch.input_ids.shape for batch in batches(rows, 5, 2, step)]
        assert all(a <= b for one, most in zip(real, shapes) for a, b in zip(one, most))
    assert [batch.input_ids.shape for batch in longest_batches(rows_of(3, 6), 5, 5)] == [(5, 6)], (
        "taken again"
    )
    assert longest_batches(rows, 2, 2, pad_up_to=128)[0].input_ids.shape == (2, 32)


def test_a_run_with_it_equals_one_without_to_the_bit(tmp_path, monkeypatch):
    config = make_config(
        tmp_path, **{"train.steps": 12, "output.exact_match_samples": 2, "data.eval_fraction": 0.2}
    )
    dry = start_run(config, tmp_path / "runs")
    order = []
    dry.recorder.subscribe(lambda record: order.append(record.event))
    assert execute(dry, {10: "stop"}).state == "stopped"
    again = resume_run(tmp_path / "runs", dry.id)
    assert execute(again).state == "finished"
    checked = events_of(dry, ForecastChecked)
    assert [event.moment for event in checked] == ["dry_run", "running", "end", "end"], (
        "not again when it is resumed"
    )
    first = checked[0].quantities
    assert first["step_seconds"]["measured"] > 0
    assert first["host_bytes"]["measured"] > 0
    assert checked[0].step == 0
    kinds = [type(event) for event in order]
    trying = next(
        k
        for k, event in enumerate(order)
        if isinstance(event, JobProgressed) and event.job == "dry_run"
    )
    assert (
        trying
        < kinds.index(ForecastChecked)
        < kinds.index(ExactMatchMeasured)
        < kinds.index(StepFinished)
    )
    assert any(
        "dry run of one step on the longest rows took" in line.text
        for line in events_of(dry, LogLine)
    )
    monkeypatch.setattr("engine.training.loop.step_loop.LEAST_STEPS", 13)
    without = start_run(config, tmp_path / "runs")
    assert execute(without).state == "finished"
    assert [event.moment for event in events_of(without, ForecastChecked)] == ["running", "end"]
    assert planes_on_disk(again) == planes_on_disk(without)
    ours, theirs = again.recorder.snapshot.steps, without.recorder.snapshot.steps
    assert ours.loss == theirs.loss
    assert ours.grad_norm == theirs.grad_norm
    assert list(ours.step) == list(range(1, 13))


def test_what_does_not_fit_fails_before_the_first_step_and_by_item(
    capsys, preset, runs, monkeypatch
):
    def full(self, *arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(StreamingEngine, "dry_run", full)
    sentence = failed(capsys, runs, preset, "--set", "train.steps=12", code=1)
    assert sentence.startswith("The GPU ran out of memory") and "where the plan takes" in sentence
