"""The executor submits the ops of a plan and makes no choices.

- It takes the ops in plan order. Each op goes to its lane, together with the tickets of the ops
  that it waits for: ops of this step (`waits`) and of the step before (`waits_previous`).
- `run` does not wait for the ops of a step. It returns once every op is submitted; updates may
  still be running then, and the prefetches of the next step wait for them unit by unit.
- When the last HOST op of a step has finished, the step is applied and its spans can be read.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import CacheError, first_line
from engine.planning.schedule.ops import Lane, Op, OpKind, Prefetch
from engine.planning.schedule.schedule import Span
from engine.runtime.device.backend import Ticket
from engine.runtime.step.context import OpContext
from engine.runtime.step.copy_ops import WORK, Work
from engine.runtime.step.step import StepUnderWay


class Executor:
    """Runs the steps of one plan on one backend."""

    def __init__(self, context: OpContext):
        self.context = context
        self.plan = context.plan
        self.backend = context.backend
        self._previous: list[Ticket] | None = None

    def run(
        self,
        step: StepUnderWay,
        on_applied: Callable[[StepUnderWay, Callable[[], list[Span]]], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Submits every op of `step`.

        `on_applied` is called on the HOST lane once the step's last op there has finished: every
        update is applied, and all spans can be read without waiting.

        `check` is called before each op while no op of the step changes weights, that is, up to the
        summary. An exception from `check` aborts the step, and `drain` must follow.
        """
        if self._previous is None:
            self._begin()
            self._fill_placed(step)
        tickets: list[Ticket] = []
        for op in self.plan.ops:
            if op.kind == OpKind.SUMMARY:
                check = None
            if check is not None:
                check()
            # Lanes run side by side, so a prefetch may be submitted while blocks still compute from
            # the slot that it will write. It is safe because the plan has a wait for each op that
            # reads a buffer before another op overwrites it: see
            # `engine.planning.schedule.derive_waits`.
            # Across steps these waits are `waits_previous`: without them, the first prefetches of
            # a step would bring weights that the updates of the step before have not written yet.
            waits = [tickets[index] for index in op.waits]
            if self._previous is not None:
                waits += [self._previous[index] for index in op.waits_previous]
            tickets.append(self.backend.submit(op.lane, waits, self.work(op, step)))
        self._previous = tickets
        if on_applied is not None:
            self.backend.finish_step(lambda: on_applied(step, lambda: self._spans(tickets)))

    def work(self, op: Op, step: StepUnderWay) -> Callable[[], None]:
        """Returns the work of `op`, which the backend runs on the op's lane."""
        do, context = WORK[op.kind], self.context
        if step.inputs.caches is not None and op.lane == Lane.COMPUTE:
            return lambda: _attempt(do, context, op, step)
        return lambda: do(context, op, step)

    def wait_for(self, kind: OpKind) -> None:
        """Waits until the ops of this kind in the step that was submitted last are over. Raises the
        error of one that failed.
        """
        for op, ticket in zip(self.plan.ops, self._previous or ()):
            if op.kind == kind:
                ticket.require()

    def _begin(self) -> None:
        """Makes the next step one that no step went before. It may be applied, whatever happened to
        those of earlier plans. What was written into planes meanwhile is in use from now on.
        """
        state = self.context.state
        state.clip.fill_(1.0)
        state.join_fp32_of_resident(self.context.host_states)

    def _fill_placed(self, step: StepUnderWay) -> None:
        """Fetches the weights that a step expects in a slot because the step before updates them
        there. It is needed for the first step and after a drain, when no step came before.
        """
        for unit, slot in self.plan.placed:
            op = Prefetch(0, unit, slot=slot)
            self.backend.submit(op.lane, (), self.work(op, step))
        if self.plan.placed:
            # The plan has no waits for these prefetches.
            self.backend.drain()

    def _spans(self, tickets: list[Ticket]) -> list[Span]:
        return [Span(op, *ticket.span()) for op, ticket in zip(self.plan.ops, tickets)]

    def drain(self) -> None:
        """Waits until everything is applied. Raises the first error of any lane."""
        self._previous = None
        self.backend.drain()


def _attempt(do: Work, context: OpContext, op: Op, step: StepUnderWay) -> None:
    """Runs an op of a pass with caches.

    An op that raises makes its lane unusable, and a run must not end because its model cannot use a
    cache. So the error is recorded in the step, and the rest of the pass is skipped.
    """
    if step.failure is not None:
        return
    try:
        do(context, op, step)
    except Exception as error:  # noqa: BLE001  the model's own code may raise anything
        # Only the text is kept: the frames of the error would form a cycle with this step and keep
        # the caches alive.
        text = first_line(error)
        is_known = isinstance(error, CacheError)
        step.failure = text if is_known else f"its code fails with one: {text}"
