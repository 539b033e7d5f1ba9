"""Walks a plan: gives every op to its lane with the tickets it waits for. It knows no policy."""

from __future__ import annotations

from collections.abc import Callable

from engine.plan.ops import OpKind, Prefetch, Span, StepPlan
from engine.runtime.backend import Backend, Ticket
from engine.runtime.block_ops import BlockOps
from engine.runtime.step import StepUnderWay


class Executor:
    """Runs steps of one plan on one backend.

    `run` returns once every op is submitted; updates may still be under way, and the next step's
    prefetches wait for them unit by unit. `on_applied` is called, on the HOST lane, when the step's
    last op there has finished: every update is applied and all its spans can be read without
    waiting. `check` is called before each op while no op of the step changes weights, that is up to
    its summary: what it raises gives the step up, and `drain` must follow.
    """

    def __init__(self, plan: StepPlan, ops: BlockOps, backend: Backend):
        self.plan, self.ops, self.backend = plan, ops, backend
        self._previous: list[Ticket] | None = None

    def run(
        self,
        step: StepUnderWay,
        on_applied: Callable[[StepUnderWay, list[Span]], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        if self._previous is None:
            self._fill_placed(step)
        tickets: list[Ticket] = []
        for op in self.plan.ops:
            if op.kind == OpKind.SUMMARY:
                check = None
            if check is not None:
                check()
            waits = [tickets[k] for k in op.waits]
            if self._previous is not None:
                waits += [self._previous[k] for k in op.waits_previous]
            tickets.append(self.backend.submit(op.lane, waits, self.ops.work(op, step)))
        self._previous = tickets
        if on_applied is not None:
            self.backend.finish_step(lambda: on_applied(step, self._spans(tickets)))

    def _fill_placed(self, step: StepUnderWay) -> None:
        """Weights that a step expects where the step before updated them."""
        for unit, slot in self.plan.placed:
            op = Prefetch(0, unit, slot=slot)
            self.backend.submit(op.lane, (), self.ops.work(op, step))
        if self.plan.placed:
            self.backend.drain()

    def _spans(self, tickets: list[Ticket]) -> list[Span]:
        return [Span(op, *ticket.span()) for op, ticket in zip(self.plan.ops, tickets)]

    def drain(self) -> None:
        """Return when everything is applied; raises the first error of any lane."""
        self._previous = None
        self.backend.drain()
