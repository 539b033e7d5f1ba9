"""A plan as a grid for human readers. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.planning.schedule.ops import RARE_LANES, Lane, Op
from engine.planning.schedule.schedule import StepPlan


def grid(plan: StepPlan, limit: int = 400) -> str:
    """Returns the plan as a grid for human readers: one row for each op, one column for each lane,
    and at the right what the op waits for. limit: at most this many ops are shown; the others are
    only counted.
    """
    rows = grid_rows(plan, range(min(len(plan.ops), limit)))
    more = len(plan.ops) - limit
    if more > 0:
        rows.append(f"... {more} more ops")
    return "\n".join(rows)


def grid_rows(plan: StepPlan, indices: Iterable[int], marked: int | None = None) -> list[str]:
    """Returns the rows of some ops under a heading. marked: an arrow points to this op."""
    ops = [plan.ops[index] for index in indices]
    texts = [op.label + _target(op) for op in ops]
    width = max([24, *map(len, texts)]) + 2
    used = {op.lane for op in plan.ops}
    lanes: Sequence[Lane] = [lane for lane in Lane if lane in used or lane not in RARE_LANES]
    rows = ["   op  " + "".join(lane.ljust(width) for lane in lanes) + "waits for"]
    for op, text in zip(ops, texts):
        cells = dict.fromkeys(lanes, "·") | {op.lane: text}
        row = "".join(cell.ljust(width) for cell in cells.values())
        waits = [str(wait) for wait in op.waits]
        waits += [f"previous {wait}" for wait in op.waits_previous]
        arrow = "->" if op.index == marked else "  "
        rows.append(f"{arrow}{op.index:3d}  {row}{', '.join(waits)}")
    return rows


_SHOWN = (Lane.H2D, Lane.D2H, Lane.GRADIENTS_OUT, Lane.COLLECTIVE)


def _target(op: Op) -> str:
    """Returns the device buffer of a copy, as the grid shows it."""
    for name in ("slot", "staging", "ring"):
        buffer = getattr(op, name, None)
        if buffer is not None and op.lane in _SHOWN:
            return f" >{buffer}"
    return ""
