"""Plans that must give the same bits, a backend that delays each lane, and the comparison."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import Lane
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.verify_plan import PlanError, verify_plan
from engine.runtime.device.cpu_backend import CpuBackend
from tests.support.tiny import VOCAB, plain_model, random_batches, streamed, tiny_config

BASE = PlanChoices().changed(micro_batches=2)
SAME_BITS = {
    "one slot": dict(slots=1, prefetch_depth=1),
    "three slots": dict(slots=3, prefetch_depth=1),
    "deep prefetch": dict(slots=3, prefetch_depth=2),
    "one resident": dict(blocks_kept_in_slots=1),
    "all resident": dict(blocks_kept_in_slots=3),
    "one kept": dict(blocks_kept_in_slots=1, blocks_without_recompute=1),
    "all kept": dict(blocks_kept_in_slots=3, blocks_without_recompute=3),
    "all kept, one slot": dict(blocks_without_recompute=3, slots=1),
    "two kept, two slots": dict(blocks_without_recompute=2, slots=2),
    "all kept, three slots": dict(blocks_without_recompute=3, slots=3, prefetch_depth=2),
    "one resident, two kept": dict(blocks_kept_in_slots=1, blocks_without_recompute=2),
    "block inputs on the host": dict(offloaded_block_inputs=True),
    "block inputs on the host, one ring": dict(offloaded_block_inputs=True, block_input_rings=1),
    "pairs": dict(blocks_per_saved_input=2),
    "pairs, three slots": dict(blocks_per_saved_input=2, slots=3, prefetch_depth=2),
    "pairs, one kept": dict(blocks_per_saved_input=2, blocks_without_recompute=1),
    "pairs, one resident": dict(blocks_per_saved_input=2, blocks_kept_in_slots=1),
    "pairs on the host": dict(blocks_per_saved_input=2, offloaded_block_inputs=True),
    "pairs on the host, all resident": dict(
        blocks_per_saved_input=2,
        offloaded_block_inputs=True,
        blocks_kept_in_slots=3,
        block_input_rings=1,
    ),
    "block inputs on the host, two kept": dict(
        offloaded_block_inputs=True, blocks_kept_in_slots=2, blocks_without_recompute=2, slots=1
    ),
}
LATE_MOMENTS = {"late moments": dict(moments_after_weights=True)}
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

    finish = require


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
        batches = random_batches(choices.batching.micro_batches, seed=step, vocabulary=vocabulary)
        run.engine.train_step(step, batches, 1e-2)
    run.engine.drain()
    planes = [
        run.host_states.tensor(unit.name, plane).clone()
        for unit in run.model.units
        for plane in run.host_states.planes
        if plane != "grad" or not choices.gradients.gradients_on_gpu
    ]
    run.close()
    return planes


def assert_same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


GRID = [
    PlanChoices().changed(
        micro_batches=m,
        rounds=r,
        slots=s,
        prefetch_depth=d,
        blocks_kept_in_slots=k,
        blocks_without_recompute=a,
        offloaded_block_inputs=h,
        block_input_rings=b,
        main_grad=g,
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


def find_dropped_waits(plan: StepPlan) -> list[tuple[str, str]]:
    """Returns (kind of op, name of its list of waits) for every wait in a plan. Removes each wait
    in turn and asserts that `verify_plan` reports the missing wait.
    """
    dropped = []
    for index, op in enumerate(plan.ops):
        for which in ("waits", "waits_previous"):
            for wait in getattr(op, which):
                kept = tuple(w for w in getattr(op, which) if w != wait)
                ops = list(plan.ops)
                ops[index] = dataclasses.replace(op, **{which: kept})
                with pytest.raises(PlanError, match=f"op {index} .*without waiting for"):
                    verify_plan(dataclasses.replace(plan, ops=tuple(ops)))
                dropped.append((op.kind, which))
    return dropped
