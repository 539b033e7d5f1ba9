"""Laws 2 and 3 on the CPU: any plan gives the same bits, and a missing wait is found."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from engine.planning.schedule.buffers import Buffer, BufferKind, Content, ContentKind
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.ops import GradientSum, Lane
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.text import grid
from engine.planning.schedule.validate import PlanError, validate
from engine.runtime.device.cpu_backend import CpuBackend
from tests.support.tiny import VOCAB, plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing

BASE = PlanChoices(micro_batches=2)
SAME_BITS = {
    "one slot": dict(slots=1, prefetch_depth=1),
    "three slots": dict(slots=3, prefetch_depth=1),
    "deep prefetch": dict(slots=3, prefetch_depth=2),
    "one resident": dict(resident_blocks=1),
    "all resident": dict(resident_blocks=3),
    "one kept": dict(resident_blocks=1, kept_blocks=1),
    "all kept": dict(resident_blocks=3, kept_blocks=3),
    "all kept, one slot": dict(kept_blocks=3, slots=1),
    "two kept, two slots": dict(kept_blocks=2, slots=2),
    "all kept, three slots": dict(kept_blocks=3, slots=3, prefetch_depth=2),
    "one resident, two kept": dict(resident_blocks=1, kept_blocks=2),
    "host boundaries": dict(host_boundaries=True),
    "host boundaries, one ring": dict(host_boundaries=True, boundary_rings=1),
    "pairs": dict(boundary_blocks=2),
    "pairs, three slots": dict(boundary_blocks=2, slots=3, prefetch_depth=2),
    "pairs, one kept": dict(boundary_blocks=2, kept_blocks=1),
    "pairs, one resident": dict(boundary_blocks=2, resident_blocks=1),
    "pairs on the host": dict(boundary_blocks=2, host_boundaries=True),
    "pairs on the host, all resident": dict(
        boundary_blocks=2, host_boundaries=True, resident_blocks=3, boundary_rings=1
    ),
    "host boundaries, two kept": dict(
        host_boundaries=True, resident_blocks=2, kept_blocks=2, slots=1
    ),
}
LATE_MOMENTS = {"late moments": dict(late_moments=True)}
"""Moments in fp32 on the host may be updated after all weights."""


class DelayedBackend(CpuBackend):
    """Holds every op of some lanes back until an op that waits for it runs: the longest delay that
    waits allow.
    """

    def __init__(self, delayed: tuple[str, ...]):
        super().__init__()
        self._delayed = delayed
        self._held: dict[str, list] = {lane: [] for lane in Lane}

    def submit(self, lane, waits, work):
        ticket = HeldTicket(self, lane, list(waits), work)
        self._held[lane].append(ticket)
        if lane not in self._delayed:
            self.run_until(ticket)
        return ticket

    def run_until(self, ticket) -> None:
        """Run the lane of `ticket` up to it, and whatever those ops wait for."""
        while not ticket.done:
            first = self._held[ticket.lane].pop(0)
            for wait in first.waits:
                if not wait.done:
                    self.run_until(wait)
            first.work()
            first.done = True

    def drain(self) -> None:
        for lane in Lane:
            while self._held[lane]:
                self.run_until(self._held[lane][-1])

    def finish_step(self, callback) -> None:
        """Nothing here looks at spans."""


class HeldTicket:
    def __init__(self, backend, lane, waits, work):
        self.backend, self.lane, self.waits, self.work, self.done = (
            backend,
            lane,
            waits,
            work,
            False,
        )

    def require(self) -> None:
        self.backend.run_until(self)


@functools.lru_cache(maxsize=16)
def _plain(family: str, **changes: Any) -> torch.nn.Module:
    """Returns a plain model that is read and never trained. Most plans begin with the same one."""
    return plain_model(tiny_config(family, **changes))


def planes_after(
    choices: PlanChoices,
    backend=None,
    family: str = "qwen3",
    tied: bool = False,
    dtype: str = "float32",
    steps: int = 2,
    dropout: float = 0.0,
    layers: int = 3,
    optimizer: str = "adamw",
    vocabulary: int = VOCAB,
    **extra: Any,
) -> list[torch.Tensor]:
    """Every plane after some steps that are submitted without draining between them."""
    if family == "gpt2":
        extra |= dict(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    if layers != 3:
        extra["num_hidden_layers"] = layers
    extra["vocab_size"] = vocabulary
    plain = _plain(family, tie_word_embeddings=tied, **extra)
    run = streamed(
        plain, choices, backend=backend, dtype=dtype, max_grad_norm=0.5, optimizer=optimizer
    )
    for step in range(1, steps + 1):
        batches = random_batches(choices.micro_batches, seed=step, vocabulary=vocabulary)
        run.engine.train_step(step, batches, 1e-2)
    run.engine.drain()
    planes = [
        run.store.tensor(unit.name, plane).clone()
        for unit in run.model.units
        for plane in run.store.planes
        if plane != "grad" or not choices.parked_gradients
    ]
    run.close()
    return planes


def assert_same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture(scope="module")
def reference():
    return {
        (dtype, tied): planes_after(BASE, dtype=dtype, tied=tied)
        for dtype in ("float32", "bfloat16")
        for tied in (False, True)
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SAME_BITS | LATE_MOMENTS)
def test_any_plan_gives_the_same_bits(reference, name, dtype, tied):
    choices = dataclasses.replace(BASE, **(SAME_BITS | LATE_MOMENTS)[name])
    assert_same_bits(planes_after(choices, dtype=dtype, tied=tied), reference[dtype, tied])


def test_dropout_draws_the_same_numbers_in_the_recompute():
    recomputed = planes_after(BASE, family="gpt2", dropout=0.2)
    assert_same_bits(
        planes_after(
            dataclasses.replace(BASE, resident_blocks=3, kept_blocks=3), family="gpt2", dropout=0.2
        ),
        recomputed,
    )
    without = planes_after(BASE, family="gpt2")
    assert any(not torch.equal(a, b) for a, b in zip(recomputed, without))


def test_sum_over_rounds_in_bf16_differs_by_rounding_only(reference):
    """On the device the sum is fp32 over all rounds: the same sum in the same order, so the same
    bits.
    """
    vertical = planes_after(BASE, dtype="bfloat16")
    device = planes_after(
        dataclasses.replace(BASE, rounds=2, gradient_sum="device"), dtype="bfloat16"
    )
    assert_same_bits(device, vertical)
    host = planes_after(
        dataclasses.replace(BASE, rounds=2, gradient_sum="host"), dtype="bfloat16", steps=1
    )
    once = planes_after(BASE, dtype="bfloat16", steps=1)
    gradients = [(a.float(), b.float()) for k, (a, b) in enumerate(zip(host, once)) if k % 5 == 4]
    norm = torch.cat([b for _, b in gradients]).norm()
    error = torch.cat([a - b for a, b in gradients]).norm() / norm
    assert 0 < error < 3e-3


@pytest.mark.parametrize(
    "lanes",
    [
        (Lane.H2D,),
        (Lane.D2H,),
        (Lane.HOST,),
        (Lane.H2D, Lane.D2H),
        (Lane.D2H, Lane.HOST),
        (Lane.H2D, Lane.HOST),
        (Lane.H2D, Lane.D2H, Lane.HOST),
        (Lane.COMPUTE,),
    ],
    ids="+".join,
)
@pytest.mark.parametrize(
    "name",
    [
        "base",
        "host boundaries",
        "deep prefetch",
        "one kept",
        "rounds",
        "pairs",
        "pairs on the host",
        "pairs on the host, all resident",
    ],
)
def test_delays_in_any_lane_change_nothing(reference, lanes, name):
    changes = {
        "base": {},
        "rounds": dict(rounds=2, gradient_sum="host", micro_batches=2),
    } | SAME_BITS
    choices = dataclasses.replace(BASE, **changes[name])
    expected = planes_after(choices) if name == "rounds" else reference["float32", False]
    assert_same_bits(planes_after(choices, backend=DelayedBackend(lanes)), expected)


# ---------------------------------------------------------------------- the validator

GRID = [
    PlanChoices(
        micro_batches=m,
        rounds=r,
        slots=s,
        prefetch_depth=d,
        resident_blocks=k,
        kept_blocks=a,
        host_boundaries=h,
        boundary_rings=b,
        gradient_sum=g,
    )
    for m in (1, 4)
    for r in (1, 2)
    if m % r == 0
    for s in (1, 2, 3)
    for d in (1, 2)
    for k in (0, 2)
    for a in (0, 1, 2)
    for h in (False, True)
    for b in (1, 3)
    if h or b == 3
    for g in (("vertical",) if r == 1 else ("device", "host"))
]


@pytest.mark.parametrize("depth", [2, 5])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_plan_of_a_size_grid_validates(depth, tied):
    for choices in GRID:
        validate(build_step_plan([f"block {k}" for k in range(depth)], tied, choices))


def find_dropped_waits(plan: StepPlan) -> list[tuple[str, str]]:
    """Returns (kind of op, name of its list of waits) for every wait in a plan. Removes each wait
    in turn and asserts that `validate` reports the missing wait.
    """
    dropped = []
    for index, op in enumerate(plan.ops):
        for which in ("waits", "waits_previous"):
            for wait in getattr(op, which):
                kept = tuple(w for w in getattr(op, which) if w != wait)
                ops = list(plan.ops)
                ops[index] = dataclasses.replace(op, **{which: kept})
                with pytest.raises(PlanError, match=f"op {index} .*without waiting for"):
                    validate(dataclasses.replace(plan, ops=tuple(ops)))
                dropped.append((op.kind, which))
    return dropped


def test_dropping_any_single_wait_is_found():
    """The builder keeps only waits that nothing else implies, so every one of them is needed."""
    plan = build_step_plan(
        [f"block {k}" for k in range(4)],
        False,
        PlanChoices(micro_batches=2, host_boundaries=True, boundary_rings=2),
    )
    assert len(find_dropped_waits(plan)) > 20
    outer = build_step_plan(
        [f"block {k}" for k in range(4)],
        False,
        PlanChoices(
            micro_batches=2, parked_gradients=True, shared_outer_slot=True, outer_in_parked=True
        ),
        PlaneSizes({"embed": 16, "head": 17} | {f"block {k}": 10 for k in range(4)}, embed_piece=8),
    )
    assert len(find_dropped_waits(outer)) > 20


def test_a_wrong_slot_is_found_and_shown():
    plan = build_step_plan(["block 0", "block 1"], False, PlanChoices())
    ops = list(plan.ops)
    k = next(i for i, op in enumerate(ops) if op.kind == "prefetch" and op.unit == "block 1")
    slot = Buffer(BufferKind.SLOT, number=0)
    ops[k] = dataclasses.replace(
        ops[k], slot=slot, writes=((slot, Content(ContentKind.WEIGHTS, "block 1")),)
    )
    with pytest.raises(PlanError, match="(expects|overwrites)") as raised:
        validate(dataclasses.replace(plan, ops=tuple(ops)))
    (marked,) = [line for line in str(raised.value).splitlines() if line.startswith("->")]
    broken = int(str(raised.value).split()[1])
    assert marked.split()[1] == str(broken) and ops[broken].label in marked


def test_a_plan_reads_as_a_grid():
    text = grid(build_step_plan(["block 0", "block 1"], True, PlanChoices(micro_batches=2)))
    assert text.splitlines()[0].split() == ["op", "H2D", "COMPUTE", "D2H", "HOST", "waits", "for"]
    assert "forward block 1[0]" in text and "update head" in text and "previous" in text


def test_contradicting_choices_are_refused():
    for choices in (
        PlanChoices(micro_batches=3, rounds=2, gradient_sum="host"),
        PlanChoices(kept_blocks=2),
        PlanChoices(gradient_sum=GradientSum.HOST),
        PlanChoices(late_moments=True, parked_gradients=True),
        PlanChoices(late_moments=True, spilled_units=1),
    ):
        with pytest.raises(ValueError):
            build_step_plan(["block 0"], False, choices)


def test_a_buffer_is_used_as_a_whole_or_in_parts():
    """A wait between the whole and a part would not be seen to be missing."""
    plan = build_step_plan(["block 0", "block 1"], False, BASE)
    slot = Buffer(BufferKind.SLOT, number=0)
    changed = [
        dataclasses.replace(
            op, reads=tuple((b.part(1) if b == slot else b, content) for b, content in op.reads)
        )
        for op in plan.ops
    ]
    with pytest.raises(PlanError, match="uses a part of slot 0, which .* uses as a whole"):
        validate(dataclasses.replace(plan, ops=tuple(changed)))
