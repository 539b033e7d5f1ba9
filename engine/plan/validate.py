"""`validate` proves that a plan has no race and reads nothing wrong. No torch."""

from __future__ import annotations

from collections import defaultdict

from engine.plan.buffers import Buffer, BufferKind, Content
from engine.plan.ops import Lane, Op, StepPlan
from engine.plan.text import grid_rows


class PlanError(AssertionError):
    """A plan breaks a rule; the message names the op and the rule, and marks the op in its
    neighbourhood of the grid.
    """


def validate(plan: StepPlan) -> None:
    """Prove the plan free of races and wrong reads by running it twice in a row on paper.

    For every read: the latest write of that buffer happened before it and left what the reader
    expects. For every write: all earlier reads and writes of that buffer happened before it.
    `Happened before` follows lane order and waits only (vector clocks over the lanes). Raises
    PlanError.
    """
    count = len(plan.ops)
    clocks: list[dict[Lane, int]] = []
    lane_clock: dict[Lane, dict[Lane, int]] = {}
    writer: dict[Buffer, tuple[int, Content]] = {}
    readers: dict[Buffer, list[int]] = defaultdict(list)
    placed = {slot: unit for unit, slot in plan.placed}

    def given(buffer: Buffer, content: Content) -> bool:
        """Whether it is there before the first step: planes are, and so are weights in the slot
        where they are updated.
        """
        on_host = buffer.kind in (BufferKind.WEIGHTS, BufferKind.STATES, BufferKind.GRADIENT)
        return on_host or placed.get(buffer.whole) == content.unit

    def before(early: int, clock: dict[Lane, int]) -> bool:
        return clock.get(plan.ops[early % count].lane, -1) >= early

    for position in range(2 * count):
        step, op = divmod(position, count)[0], plan.ops[position % count]
        if op.index != position % count:
            raise PlanError(f"op {position % count} carries index {op.index}")
        clock = dict(lane_clock.get(op.lane, {}))
        for wait in op.waits:
            if not 0 <= wait < op.index:
                raise PlanError(_explain(plan, op, f"waits for op {wait}, which is not before it"))
            _merge(clock, clocks[step * count + wait])
        if step:
            for wait in op.waits_previous:
                if not 0 <= wait < count:
                    raise PlanError(
                        _explain(
                            plan,
                            op,
                            f"waits for op {wait} of the step before, which has no such op",
                        )
                    )
                _merge(clock, clocks[wait])
        for buffer, content in op.reads:
            if buffer in writer:
                last, found = writer[buffer]
                if found != content:
                    raise PlanError(
                        _explain(plan, op, f"expects {content} in {buffer} and finds {found}")
                    )
                if not before(last, clock):
                    raise PlanError(
                        _explain(
                            plan,
                            op,
                            f"reads {buffer} without waiting for "
                            f"{plan.ops[last % count].label} (op {last % count}), which fills it",
                        )
                    )
            elif not given(buffer, content):
                raise PlanError(_explain(plan, op, f"reads {buffer}, which nothing has filled"))
        for buffer, _ in op.writes:
            earlier = readers[buffer] + ([writer[buffer][0]] if buffer in writer else [])
            for other in earlier:
                if not before(other, clock):
                    raise PlanError(
                        _explain(
                            plan,
                            op,
                            f"overwrites {buffer} without waiting for "
                            f"{plan.ops[other % count].label} (op {other % count}), which uses it",
                        )
                    )
        clock[op.lane] = position
        clocks.append(clock)
        lane_clock[op.lane] = clock
        for buffer, _ in op.reads:
            readers[buffer].append(position)
        for buffer, content in op.writes:
            writer[buffer] = (position, content)
            readers[buffer] = []


def _explain(plan: StepPlan, op: Op, problem: str) -> str:
    near = range(max(0, op.index - 6), min(len(plan.ops), op.index + 3))
    return f"op {op.index} ({op.label} on {op.lane}) {problem}\n" + "\n".join(
        grid_rows(plan, near, marked=op.index)
    )


def _merge(clock: dict[Lane, int], other: dict[Lane, int]) -> None:
    for lane, value in other.items():
        if value > clock.get(lane, -1):
            clock[lane] = value
