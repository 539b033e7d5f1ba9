"""A plan as text: a form that is read back, so that a change of the planner shows as a difference
of lines, and a grid for the eye. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from engine.plan.buffers import Buffer, read_buffer, read_content
from engine.plan.ops import OP_TYPES, UPDATE_LANES, Lane, Op, OpKind, StepPlan, Uses

_OF_EVERY_OP = ("index", "unit", "reads", "writes", "waits", "waits_previous")
_READERS: dict[str, Callable[[str], Any]] = {
    "micro_batch": int,
    "piece": lambda text: tuple(map(int, text.split("-"))),
    **dict.fromkeys(("first", "adds", "last"), lambda text: text == "yes"),
    **dict.fromkeys(("slot", "grad", "staging", "ring", "buffer"), read_buffer),
}
"""How each field of an op is read back, by its name."""


def to_text(plan: StepPlan) -> str:
    """One line for each fact of the plan, then one for each op."""
    lines = [
        f"kept units: {', '.join(sorted(plan.kept_units))}",
        f"compiled: {'yes' if plan.compiled else 'no'}",
        f"homes on the device: {', '.join(plan.device_homes)}",
        f"placed: {'; '.join(f'{unit} in {slot}' for unit, slot in plan.placed)}",
        f"slots: {_units_text(plan.slots)}",
        f"sums: {_units_text(plan.grads)}",
        f"stagings: {_units_text(plan.stagings)}",
        f"rings: {', '.join(map(str, plan.rings))}",
        f"update buffers: {', '.join(map(str, plan.update_buffers))}",
        f"spare buffers: {', '.join(map(str, plan.spare_buffers))}",
        f"elements of a piece: {plan.piece_numel}",
        f"arena: {', '.join(plan.arena)}",
    ]
    return "\n".join([line.rstrip() for line in lines] + ["", *map(_op_text, plan.ops)]) + "\n"


def from_text(text: str) -> StepPlan:
    """The plan whose `to_text` this is. Raises ValueError for any other text."""
    try:
        plan = _read_plan(text)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the text of a plan: {error}") from None
    if to_text(plan) != text:  # a label, a lane or a word that reading passes over
        raise ValueError("not the text of a plan: written again, it reads otherwise")
    return plan


def _read_plan(text: str) -> StepPlan:
    head, _, ops = text.partition("\n\n")
    facts = [line.partition(":")[2].strip() for line in head.splitlines()]
    kept, compiled, homes, placed, slots, sums, stagings, rings, updates, spare, piece, arena = (
        facts
    )
    return StepPlan(
        ops=tuple(map(_read_op, ops.splitlines())),
        slots=_read_units(slots),
        grads=_read_units(sums),
        stagings=_read_units(stagings),
        rings=_read_buffers(rings),
        kept_units=frozenset(_words(kept)),
        compiled=compiled == "yes",
        device_homes=_words(homes),
        placed=tuple(
            (unit, read_buffer(slot))
            for unit, _, slot in (each.partition(" in ") for each in _words(placed, "; "))
        ),
        update_buffers=_read_buffers(updates),
        spare_buffers=_read_buffers(spare),
        piece_numel=int(piece),
        arena=_words(arena),
    )


def _words(text: str, between: str = ", ") -> tuple[str, ...]:
    return tuple(text.split(between)) if text else ()


def _read_buffers(text: str) -> tuple[Buffer, ...]:
    return tuple(map(read_buffer, _words(text)))


def _units_text(units: dict[Buffer, tuple[str, ...]]) -> str:
    return "; ".join(f"{buffer} = {', '.join(names)}" for buffer, names in units.items())


def _read_units(text: str) -> dict[Buffer, tuple[str, ...]]:
    pairs = (each.partition(" =") for each in _words(text, "; "))
    return {read_buffer(buffer): _words(names.strip()) for buffer, _, names in pairs}


# ---------------------------------------------------------------------- one op


def _op_text(op: Op) -> str:
    own = [
        (field.name, getattr(op, field.name))
        for field in fields(op)
        if field.name not in _OF_EVERY_OP
    ]
    parts = [
        f"{op.index:4d} {op.lane:10s} {op.kind} of {op.unit}",
        ", ".join(f"{name}={_value_text(value)}" for name, value in own if value is not None),
        f"reads {_uses_text(op.reads)}",
        f"writes {_uses_text(op.writes)}",
        f"after {', '.join(map(str, op.waits))}",
        f"after previous {', '.join(map(str, op.waits_previous))}",
    ]
    return " | ".join(part.rstrip() for part in parts)


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        "-".join(map(str, value))
        if isinstance(value, tuple) and not isinstance(value, Buffer)
        else str(value)
    )


def _uses_text(uses: Uses) -> str:
    return "; ".join(f"{buffer}: {content}" for buffer, content in uses)


def _read_op(line: str) -> Op:
    what, own, reads, writes, waits, previous = (part.strip() for part in line.split("|"))
    index, rest = what.split(maxsplit=1)
    kind, _, unit = rest.rpartition(" of ")
    values = {
        name: _READERS[name](value)
        for name, _, value in (each.partition("=") for each in _words(own))
    }
    return OP_TYPES[OpKind(kind.split()[-1])](
        int(index),
        unit,
        _read_uses(reads.removeprefix("reads")),
        _read_uses(writes.removeprefix("writes")),
        _numbers(waits.removeprefix("after")),
        _numbers(previous.removeprefix("after previous")),
        **values,
    )


def _read_uses(text: str) -> Uses:
    pairs = (each.partition(": ") for each in _words(text.strip(), "; "))
    return tuple((read_buffer(buffer), read_content(content)) for buffer, _, content in pairs)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, _words(text.strip())))


# ---------------------------------------------------------------------- the grid


def grid(plan: StepPlan, limit: int = 400) -> str:
    """The plan for the eye: one row an op, one column a lane, waits at the right."""
    more = len(plan.ops) - limit
    return "\n".join(grid_rows(plan, range(min(len(plan.ops), limit)))) + (
        f"\n... {more} more ops" if more > 0 else ""
    )


def grid_rows(plan: StepPlan, indices: Iterable[int], marked: int | None = None) -> list[str]:
    """Rows of some ops under a heading. marked: the op that an arrow points to."""
    ops = [plan.ops[index] for index in indices]
    texts = [op.label + _target(op) for op in ops]
    width = max([24, *map(len, texts)]) + 2
    lanes: Sequence[Lane] = [lane for lane in Lane if plan.device_homes or lane not in UPDATE_LANES]
    rows = ["   op  " + "".join(lane.ljust(width) for lane in lanes) + "waits for"]
    for op, text in zip(ops, texts):
        cells = [(text if lane == op.lane else "·").ljust(width) for lane in lanes]
        waits = [str(wait) for wait in op.waits] + [
            f"previous {wait}" for wait in op.waits_previous
        ]
        rows.append(
            f"{'->' if op.index == marked else '  '}{op.index:3d}  "
            + "".join(cells)
            + ", ".join(waits)
        )
    return rows


def _target(op: Op) -> str:
    """The device buffer that a copy is about."""
    for name in ("slot", "staging", "ring"):
        buffer = getattr(op, name, None)
        if buffer is not None and op.lane in (Lane.H2D, Lane.D2H):
            return f" >{buffer}"
    return ""
