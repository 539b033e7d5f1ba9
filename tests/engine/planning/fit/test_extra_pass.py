"""KTO makes a pass without gradients before each step, when the step before is applied: a report
counts it in the seconds of a step, and so does the plan that is simulated for a run.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.machine.several_gpus import named_with_several
from engine.planning.fit.cost_model import MicroBatch
from engine.planning.fit.job import Job, Target
from engine.planning.fit.requirements import requirements_of
from engine.planning.fit.simulate_step import (
    op_seconds,
    predicted_pass,
    predicted_seconds,
    predicted_step,
)
from engine.planning.schedule.build import build_forward_plan
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import Lane, OpKind
from engine.text import GIB
from engine.training.loop.planning import simulated_step
from tests.support.chosen import FAST_RATES, big_shape, config
from tests.support.sets import PLAN_SWEEP, slow_but

pytestmark = [pytest.mark.computing, pytest.mark.usefixtures("compiler")]

KTO = {"train__objective": "kto"}
PLANS = {
    "usual": dict(offloaded_block_inputs=True),
    "rounds": dict(rounds=2, main_grad="device"),
    "on the CPU": dict(),
    "two GPUs": dict(ranks=2, unsharded_reads=True),
    "two nodes": dict(ranks=2, nodes_per_replica=2),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_step_takes_its_pass_and_itself_from_the_first_op_to_the_last(name):
    """No op of the step is beside those of the step before, as in training without a pass."""
    choices, device = PlanChoices().changed(micro_batches=4, **PLANS[name]), "cuda"
    if name == "on the CPU":
        device = "cpu"
    one = MicroBatch(8, 1024)
    other = replace(one, has_pass=True)
    plan, plain = predicted_step(big_shape(), choices, FAST_RATES, one, device)
    same, timing = predicted_step(big_shape(), choices, FAST_RATES, other, device)
    before = predicted_pass(big_shape(), choices, FAST_RATES, other, device)
    assert same == plan and before.seconds > 0
    last = max(timing.ends)
    assert timing.seconds == pytest.approx(before.seconds + last)
    assert last >= plain.seconds * (1 - 1e-9)
    assert timing.seconds == predicted_seconds(big_shape(), choices, FAST_RATES, other, device)
    for lane in Lane:
        assert timing.busy[lane] == pytest.approx(plain.busy[lane] + before.busy[lane])
    # A step that recomputes passes all matrices four times, and the pass once.
    assert 0.15 < before.busy[Lane.COMPUTE] / plain.busy[Lane.COMPUTE] < 0.3


def test_a_pass_computes_what_a_forward_does():
    shape, one = big_shape(), MicroBatch(8, 1024)
    blocks = [unit.name for unit in shape.blocks]
    plan = build_forward_plan(blocks, shape.tied, PlanChoices().changed(micro_batches=2))
    seconds = op_seconds(plan, shape, FAST_RATES, one)
    step, _ = predicted_step(shape, PlanChoices().changed(micro_batches=2), FAST_RATES, one, "cuda")
    of_step = op_seconds(step, shape, FAST_RATES, one)
    found, trained = (
        {(op.kind, op.unit): of(op) for op in each.ops}
        for each, of in ((plan, seconds), (step, of_step))
    )
    loss = found.pop((OpKind.LOSS, "head"))
    assert {kind for kind, _ in found} == {OpKind.PREFETCH, OpKind.EMBED, OpKind.FORWARD}
    assert all(taken == trained[op] > 0 for op, taken in found.items())
    assert 0.25 < loss / trained[OpKind.LOSS, "head"] < 0.5


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
@pytest.mark.parametrize("gpus", slow_but([1, 2], [1], PLAN_SWEEP))
def test_a_report_and_the_step_of_a_run_count_it(gpus):
    machine = named_with_several(f"{gpus} x H100 SXM" if gpus > 1 else "H100 SXM", 512)
    values = {"engine__gpus": gpus, "engine__states": "host", "train__batch_size": 32}
    asked = config(**KTO | values)
    kto = requirements_of(asked, machine, big_shape())
    chosen, rates = kto.chosen, kto._facts.rates
    without = replace(kto.micro_batch, has_pass=False)
    before = predicted_pass(big_shape(), chosen.choices, rates, without, "cuda")
    plain = predicted_seconds(big_shape(), chosen.choices, rates, without, "cuda")
    assert kto.micro_batch.has_pass and kto.step_seconds >= plain + before.seconds > plain
    job = Job(big_shape(), asked, 1024, ranks=gpus)
    event = simulated_step(job, chosen, Target("cuda", 75 * GIB, 400 * GIB, rates), 1024)
    assert event is not None and event.seconds == pytest.approx(kto.step_seconds)
    assert event.seconds - before.seconds == pytest.approx(max(e["end"] for e in event.spans))
