"""`validate` proves that a plan has no race and reads nothing wrong; `grid` shows a plan as text. No torch."""

from __future__ import annotations

from collections import defaultdict

from engine.plan.ops import D2H, H2D, LANES, Op, StepPlan


class PlanError(AssertionError):
    """A plan breaks a rule; the message names the op, the rule and shows the neighbourhood in the grid."""


def validate(plan: StepPlan) -> None:
    """Prove the plan free of races and wrong reads by running it twice in a row on paper.

    For every read: the latest write of that resource happened before it and left what the reader expects. For every
    write: all earlier reads and writes of that resource happened before it. `Happened before` follows lane order and
    waits only (vector clocks over the lanes). Raises PlanError.
    """
    count = len(plan.ops)
    clocks: list[dict[str, int]] = []
    lane_clock: dict[str, dict[str, int]] = {}
    writer: dict[str, tuple[int, str]] = {}
    readers: dict[str, list[int]] = defaultdict(list)
    given = {resource for unit, slot in plan.placed for op in plan.ops for resource, tag in op.reads
             if (resource == f"slot:{slot}" or resource.startswith(f"slot:{slot} ")) and tag == unit}

    def before(early: int, clock: dict[str, int]) -> bool:
        return clock.get(plan.ops[early % count].lane, -1) >= early

    for position in range(2 * count):
        step, op = divmod(position, count)[0], plan.ops[position % count]
        if op.index != position % count:
            raise PlanError(f"op {position % count} carries index {op.index}")
        if op.lane not in LANES:
            raise PlanError(f"{op.label}: unknown lane {op.lane}")
        clock = dict(lane_clock.get(op.lane, {}))
        for wait in op.waits:
            if not 0 <= wait < op.index:
                raise PlanError(_explain(plan, op, f"waits for op {wait}, which is not before it"))
            _merge(clock, clocks[step * count + wait])
        if step:
            for wait in op.waits_previous:
                if not 0 <= wait < count:
                    raise PlanError(_explain(plan, op, f"waits for op {wait} of the step before, which has no such op"))
                _merge(clock, clocks[wait])
        for resource, tag in op.reads:
            if resource in writer:
                last, found = writer[resource]
                if found != tag:
                    raise PlanError(_explain(plan, op, f"expects {tag} in {resource} and finds {found}"))
                if not before(last, clock):
                    raise PlanError(_explain(plan, op, f"reads {resource} without waiting for "
                                             f"{plan.ops[last % count].label} (op {last % count}), which fills it"))
            elif not resource.startswith("plane:") and resource not in given:
                raise PlanError(_explain(plan, op, f"reads {resource}, which nothing has filled"))
        for resource, _ in op.writes:
            earlier = readers[resource] + ([writer[resource][0]] if resource in writer else [])
            for other in earlier:
                if not before(other, clock):
                    raise PlanError(_explain(plan, op, f"overwrites {resource} without waiting for "
                                             f"{plan.ops[other % count].label} (op {other % count}), which uses it"))
        clock[op.lane] = position
        clocks.append(clock)
        lane_clock[op.lane] = clock
        for resource, _ in op.reads:
            readers[resource].append(position)
        for resource, tag in op.writes:
            writer[resource] = (position, tag)
            readers[resource] = []


def grid(plan: StepPlan, limit: int = 400) -> str:
    """The plan as text: one row an op, one column a lane, waits at the right."""
    return "\n".join(_rows(plan, range(min(len(plan.ops), limit)))) + (
        f"\n... {len(plan.ops) - limit} more ops" if len(plan.ops) > limit else "")


def _rows(plan: StepPlan, indices) -> list[str]:
    width = 26
    lanes = LANES if plan.device_homes else LANES[:4]
    rows = ["   op  " + "".join(lane.ljust(width) for lane in lanes) + "waits for"]
    for index in indices:
        op = plan.ops[index]
        text = op.label + (f" >{op.slot or op.staging or op.ring}" if op.lane in (H2D, D2H) else "")
        cells = [(text if lane == op.lane else "·").ljust(width) for lane in lanes]
        waits = [str(w) for w in op.waits] + [f"previous {w}" for w in op.waits_previous]
        rows.append(f"{index:5d}  " + "".join(cells) + ", ".join(waits))
    return rows


def _explain(plan: StepPlan, op: Op, problem: str) -> str:
    near = range(max(0, op.index - 6), min(len(plan.ops), op.index + 3))
    return f"op {op.index} ({op.label} on {op.lane}) {problem}\n" + "\n".join(_rows(plan, near))


def _merge(clock: dict[str, int], other: dict[str, int]) -> None:
    for lane, value in other.items():
        if value > clock.get(lane, -1):
            clock[lane] = value
