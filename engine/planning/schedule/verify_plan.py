"""`verify_plan` proves that a plan has no race and reads nothing wrong. No torch.

It walks through the plan twice in a row, without running it, and proves four things. The first
three are about every op:

- Order: each wait names an op that comes before it.
- Reads: the latest write of each buffer that the op reads happened before the op, and left what the
  op expects to find there. A buffer that no op has written yet may be read only if it is filled
  before the first step.
- Writes: all earlier reads and writes of each buffer that the op writes happened before the op.
- End: all ops of a step with updates happened before the end of its last op on HOST, after which
  the step is applied and the times of its ops are read.

"Happened before" follows lane order and waits only, by vector clocks over the lanes. So the proof
holds whatever the speeds of the lanes. Two passes are enough, because plans of consecutive steps
are equal and an op waits for ops of its own step or of the step before.

The check sees only the finished ops. It does not depend on how `derive_waits` found their waits.
"""

from __future__ import annotations

from collections import defaultdict

from engine.planning.schedule.buffers import Buffer, BufferKind, Content
from engine.planning.schedule.derive_waits import VectorClock, merge
from engine.planning.schedule.grid import grid_rows
from engine.planning.schedule.ops import Lane, Op, OpKind
from engine.planning.schedule.schedule import StepPlan


class PlanError(AssertionError):
    """A plan breaks a rule. The message names the op and the rule, and marks the op in its
    neighborhood of the grid.
    """


def verify_plan(plan: StepPlan) -> None:
    """Proves the plan free of races and wrong reads. Raises PlanError where it breaks a rule."""
    _refuse_wholes_of_parts(plan)
    proof = _Proof(plan)
    for step in (0, 1):
        for index, op in enumerate(plan.ops):
            if op.index != index:
                raise PlanError(f"op {index} carries index {op.index}")
            proof.add(op, step)
        proof.check_end()


def _refuse_wholes_of_parts(plan: StepPlan) -> None:
    """Raises PlanError if one op names a buffer and another one a part of it. Buffers are compared
    by name, so no wait would be found to be missing between these two.
    """
    wholes: dict[Buffer, Op] = {}
    parts: dict[Buffer, Op] = {}
    for op in plan.ops:
        for buffer, _ in (*op.reads, *op.writes):
            (wholes if buffer.chunk is None else parts).setdefault(buffer.whole, op)
    for buffer, op in parts.items():
        if buffer in wholes:
            other = wholes[buffer].label
            raise PlanError(f"{op.label} uses a part of {buffer}, which {other} uses as a whole")


class _Proof:
    """A proof records what the ops of two steps have done so far. Positions run over both steps."""

    def __init__(self, plan: StepPlan):
        self._plan = plan
        self._count = len(plan.ops)
        self._placed = {slot: unit for unit, slot in (*plan.placed, *plan.gpu_resident, *plan.held)}
        self._clocks: list[VectorClock] = []
        self._lane_clock: dict[Lane, VectorClock] = {}
        self._writer: dict[Buffer, tuple[int, Content]] = {}
        self._readers: dict[Buffer, list[int]] = defaultdict(list)

    def add(self, op: Op, step: int) -> None:
        """Checks the next op against all ops before it, and adds it to them."""
        clock = self._clock_of(op, step)
        self._check_reads(op, clock)
        self._check_writes(op, clock)
        position = step * self._count + op.index
        clock[op.lane] = position
        self._clocks.append(clock)
        self._lane_clock[op.lane] = clock
        for buffer, _ in op.reads:
            self._readers[buffer].append(position)
        for buffer, content in op.writes:
            self._writer[buffer] = (position, content)
            self._readers[buffer] = []

    def check_end(self) -> None:
        """Checks the end of the step that was added last."""
        if not any(op.kind == OpKind.CLIP for op in self._plan.ops):
            return
        last = self._lane_clock[Lane.HOST]
        for op in self._plan.ops:
            position = len(self._clocks) - self._count + op.index
            if not self._happened_before(position, last):
                raise self._error(op, "may still run when the step is applied")

    def _clock_of(self, op: Op, step: int) -> VectorClock:
        """Returns what has finished before the op starts, by its lane's order and its waits."""
        clock = dict(self._lane_clock.get(op.lane, {}))
        for wait in op.waits:
            if not 0 <= wait < op.index:
                raise self._error(op, f"waits for op {wait}, which is not before it")
            merge(clock, self._clocks[step * self._count + wait])
        if step == 0:  # there is no step before
            return clock
        for wait in op.waits_previous:
            if not 0 <= wait < self._count:
                raise self._error(
                    op, f"waits for op {wait} of the step before, which has no such op"
                )
            merge(clock, self._clocks[wait])
        return clock

    def _check_reads(self, op: Op, clock: VectorClock) -> None:
        for buffer, content in op.reads:
            if buffer not in self._writer:
                if not self._is_there_before(buffer, content):
                    raise self._error(op, f"reads {buffer}, which nothing has filled")
                continue
            last, found = self._writer[buffer]
            if found != content:
                raise self._error(op, f"expects {content} in {buffer} and finds {found}")
            if not self._happened_before(last, clock):
                raise self._error(
                    op, f"reads {buffer} without waiting for {self._name(last)}, which fills it"
                )

    def _check_writes(self, op: Op, clock: VectorClock) -> None:
        for buffer, _ in op.writes:
            earlier = self._readers[buffer].copy()
            if buffer in self._writer:
                earlier.append(self._writer[buffer][0])
            for position in earlier:
                if not self._happened_before(position, clock):
                    raise self._error(
                        op,
                        f"overwrites {buffer} without waiting for {self._name(position)}, "
                        "which uses it",
                    )

    def _is_there_before(self, buffer: Buffer, content: Content) -> bool:
        """Returns whether a buffer holds its content before the first step. This is true of planes,
        of slots in which a unit lives or is updated, and of slots that hold the unit from an
        earlier pass.
        """
        on_host = buffer.kind in (BufferKind.WEIGHTS, BufferKind.STATES, BufferKind.GRADIENT)
        return on_host or self._placed.get(buffer.whole) == content.unit

    def _happened_before(self, position: int, clock: VectorClock) -> bool:
        lane = self._plan.ops[position % self._count].lane
        return clock.get(lane, -1) >= position

    def _name(self, position: int) -> str:
        index = position % self._count
        return f"{self._plan.ops[index].label} (op {index})"

    def _error(self, op: Op, problem: str) -> PlanError:
        """Returns the error for an op; its message includes the rows of the grid around the op."""
        near = range(max(0, op.index - 6), min(self._count, op.index + 3))
        rows = grid_rows(self._plan, near, marked=op.index)
        return PlanError("\n".join([f"op {op.index} ({op.label} on {op.lane}) {problem}", *rows]))
