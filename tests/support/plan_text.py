"""A plan as text that can be parsed back: a change of the planner shows as a diff of lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from engine.planning.schedule.buffers import Buffer, BufferKind, Content, ContentKind
from engine.planning.schedule.offloaded_activations import ReadBlockInput, WriteBlockInput
from engine.planning.schedule.ops import (
    AllGather,
    AllReduce,
    Backward,
    Barrier,
    Clip,
    DeviceUpdate,
    Embed,
    EmbedBackward,
    FetchBlockInput,
    FetchGrad,
    FetchGradient,
    FetchStates,
    Forward,
    Keeps,
    Loss,
    Offload,
    OffloadBlockInput,
    OffloadKeptGradient,
    OffloadStates,
    OffloadWeights,
    Op,
    OpKind,
    OptimizerStep,
    Prefetch,
    ReadStates,
    Recompute,
    Reduce,
    ReduceScatter,
    Summary,
    Update,
    UpdateInPlace,
    UpdateMoments,
    Uses,
    WriteStates,
)
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.shards import Shards

_FORM = re.compile(r"([a-z_ ]+?)(?:\(([^()]*)\))?(?: (\d+))?(?:/(\d+))?")


def _parts(text: str) -> tuple[str, str, int | None, int | None]:
    """Returns the kind, unit, number and chunk in a text that `_text` wrote."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} names no buffer and no content")
    kind, unit, number, chunk = found.groups()
    return kind, unit or "", _number(number), _number(chunk)


def _number(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def _read_buffer(text: str) -> Buffer:
    """Returns the buffer whose `str` is `text`. Raises ValueError for any other text."""
    kind, unit, number, chunk = _parts(text)
    return Buffer(BufferKind(kind), unit, number, chunk)


def _read_content(text: str) -> Content:
    """Returns the content whose `str` is `text`. Raises ValueError for any other text."""
    text, _, slot_text = text.partition(" in ")
    kind, unit, number, chunk = _parts(text)
    slot = _read_buffer(slot_text) if slot_text else None
    return Content(ContentKind(kind), unit, number, chunk, slot)


# ---------------------------------------------------------------------- a plan

_OF_EVERY_OP = ("index", "unit", "reads", "writes", "waits", "waits_previous")
_READERS: dict[str, Callable[[str], Any]] = {
    "micro_batch": int,
    "chunk": lambda text: tuple(map(int, text.split("-"))),
    "keeps": Keeps,
    "following": str,
    **dict.fromkeys(
        ("first", "adds", "last", "recomputes", "whole", "after_weights"),
        lambda text: text == "yes",
    ),
    **dict.fromkeys(
        ("slot", "grad", "staging", "total", "ring", "host", "buffer", "states"),
        _read_buffer,
    ),
}
"""Functions that parse the text of an op field, by its name."""

OP_TYPES: dict[OpKind, type[Op]] = {
    op.kind: op
    for op in (
        Prefetch,
        AllGather,
        Barrier,
        FetchBlockInput,
        FetchGrad,
        Embed,
        Forward,
        Recompute,
        Loss,
        Backward,
        EmbedBackward,
        Reduce,
        ReduceScatter,
        AllReduce,
        Summary,
        UpdateInPlace,
        OffloadBlockInput,
        WriteBlockInput,
        ReadBlockInput,
        Offload,
        OffloadKeptGradient,
        Clip,
        Update,
        UpdateMoments,
        ReadStates,
        WriteStates,
        OptimizerStep,
        FetchStates,
        FetchGradient,
        DeviceUpdate,
        OffloadWeights,
        OffloadStates,
    )
}
"""Class of each kind of op."""


def to_text(plan: StepPlan) -> str:
    """Returns the plan as text: one line for each property, an empty line, and one line for each
    op.
    """
    facts = [
        f"compiled: {'yes' if plan.compiled else 'no'}",
        f"updated on the device: {', '.join(plan.device_updated_units)}",
        f"placed: {_places_text(plan.placed)}",
        f"slots: {_units_text(plan.slots)}",
        f"main_grads: {_units_text(plan.grads)}",
        f"stagings: {_units_text(plan.stagings)}",
        f"rings: {', '.join(map(str, plan.rings))}",
        f"update buffers: {', '.join(map(str, plan.update_buffers))}",
        f"elements of a chunk: {plan.chunk_numel}",
        f"elements of a ring buffer: {plan.ring_numel}",
    ]
    facts += [fact for fact in _rare_facts(plan) if not fact.endswith(": ")]
    lines = [fact.rstrip() for fact in facts] + ["", *map(_op_text, plan.ops)]
    return "\n".join(lines) + "\n"


def _rare_facts(plan: StepPlan) -> Iterator[str]:
    """Yields the properties that only some plans have. One that a plan lacks ends with a colon."""
    if plan.arena:
        yield f"arena: {'; '.join(f'{buffer} at {start}' for buffer, start in plan.arena)}"
        yield f"bytes of the arena: {plan.arena_bytes}"
    if plan.shards.ranks > 1:
        yield f"shard: {plan.shards.rank} of {plan.shards.ranks}"
    if plan.replicas > 1:
        yield f"replicas: {plan.replicas}"
    if plan.nodes_per_replica > 1:
        yield f"nodes per replica: {plan.nodes_per_replica}"
    yield f"gradients in place of main_grads: {', '.join(plan.without_main_grad)}"
    yield f"gradients in their main_grads: {', '.join(plan.rounded_in_main_grads)}"
    if plan.embed_and_head_in_kept_gradients:
        yield "embed and head: in kept gradients"
    yield f"graphs of micro-batches: {plan.graphs or ''}"
    yield f"elements of a chunk of embed: {plan.embed_chunk or ''}"
    yield f"tokens of a sequence chunk: {plan.tile_tokens or ''}"
    if plan.with_attention:
        yield f"with attention: {', '.join(plan.with_attention)}"
        yield f"bytes of attention: {plan.attention_bytes}"
    yield f"gradient rings: {', '.join(map(str, plan.gradient_rings))}"
    yield f"state rings: {', '.join(map(str, plan.state_rings))}"
    if plan.state_rings:
        yield f"elements of a chunk on the disk: {plan.disk_chunk_numel}"
    yield f"disk rings: {', '.join(map(str, plan.disk_rings))}"
    yield f"gpu-resident: {_places_text(plan.gpu_resident)}"
    yield f"frozen: {', '.join(plan.frozen)}"
    yield f"forward only: {', '.join(plan.forward_only)}"
    yield f"held: {_places_text(plan.held)}"  # only some passes without gradients have such units


def from_text(text: str) -> StepPlan:
    """Returns the plan whose `to_text` is `text`. Raises ValueError for any other text."""
    try:
        plan = _read_plan(text)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the text of a plan: {error}") from None
    # Parsing ignores labels, lanes and some words, so the whole text is compared.
    if to_text(plan) != text:
        raise ValueError("not the text of a plan: written again, it reads otherwise")
    return plan


def _read_plan(text: str) -> StepPlan:
    head, _, ops = text.partition("\n\n")
    lines = [line.partition(":") for line in head.splitlines()]
    facts = {label: value.strip() for label, _, value in lines}
    return StepPlan(
        ops=tuple(map(_read_op, ops.splitlines())),
        slots=_read_units(facts["slots"]),
        grads=_read_units(facts["main_grads"]),
        stagings=_read_units(facts["stagings"]),
        rings=_read_buffers(facts["rings"]),
        shards=_read_shards(facts.get("shard", "")),
        replicas=int(facts.get("replicas", 1)),
        nodes_per_replica=int(facts.get("nodes per replica", 1)),
        gradient_rings=_read_buffers(facts.get("gradient rings", "")),
        state_rings=_read_buffers(facts.get("state rings", "")),
        disk_chunk_numel=int(facts.get("elements of a chunk on the disk", 0)),
        disk_rings=_read_buffers(facts.get("disk rings", "")),
        compiled=facts["compiled"] == "yes",
        tile_tokens=int(facts.get("tokens of a sequence chunk", 0)),
        with_attention=_words(facts.get("with attention", "")),
        attention_bytes=int(facts.get("bytes of attention", 0)),
        device_updated_units=_words(facts["updated on the device"]),
        placed=_read_places(facts["placed"]),
        update_buffers=_read_buffers(facts["update buffers"]),
        chunk_numel=int(facts["elements of a chunk"]),
        ring_numel=int(facts["elements of a ring buffer"]),
        arena=_read_arena(facts.get("arena", "")),
        arena_bytes=int(facts.get("bytes of the arena", 0)),
        without_main_grad=_words(facts.get("gradients in place of main_grads", "")),
        rounded_in_main_grads=_words(facts.get("gradients in their main_grads", "")),
        embed_and_head_in_kept_gradients="embed and head" in facts,
        graphs=int(facts.get("graphs of micro-batches", 0)),
        embed_chunk=int(facts.get("elements of a chunk of embed", 0)),
        gpu_resident=_read_places(facts.get("gpu-resident", "")),
        held=_read_places(facts.get("held", "")),
        frozen=_words(facts.get("frozen", "")),
        forward_only=_words(facts.get("forward only", "")),
    )


def _places_text(places: Sequence[tuple[str, Buffer]]) -> str:
    return "; ".join(f"{unit} in {slot}" for unit, slot in places)


def _read_places(text: str) -> tuple[tuple[str, Buffer], ...]:
    parts = [each.partition(" in ") for each in _words(text, "; ")]
    return tuple((unit, _read_buffer(slot)) for unit, _, slot in parts)


def _read_arena(text: str) -> tuple[tuple[Buffer, int], ...]:
    parts = [each.partition(" at ") for each in _words(text, "; ")]
    return tuple((_read_buffer(buffer), int(start)) for buffer, _, start in parts)


def _read_shards(text: str) -> Shards:
    rank, _, ranks = text.partition(" of ")
    return Shards(int(ranks), int(rank)) if text else Shards()


def _words(text: str, between: str = ", ") -> tuple[str, ...]:
    return tuple(text.split(between)) if text else ()


def _read_buffers(text: str) -> tuple[Buffer, ...]:
    return tuple(map(_read_buffer, _words(text)))


def _units_text(units: dict[Buffer, tuple[str, ...]]) -> str:
    texts = [f"{buffer} = {', '.join(names)}" for buffer, names in units.items()]
    return "; ".join(texts)


def _read_units(text: str) -> dict[Buffer, tuple[str, ...]]:
    pairs = [each.partition(" =") for each in _words(text, "; ")]
    return {_read_buffer(buffer): _words(names.strip()) for buffer, _, names in pairs}


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
    if isinstance(value, tuple) and not isinstance(value, Buffer):
        return "-".join(map(str, value))
    return str(value)


def _uses_text(uses: Uses) -> str:
    return "; ".join(f"{buffer}: {content}" for buffer, content in uses)


def _read_op(line: str) -> Op:
    what, own, reads, writes, waits, previous = (part.strip() for part in line.split("|"))
    index, rest = what.split(maxsplit=1)
    kind, _, unit = rest.rpartition(" of ")
    fields_of_kind = [each.partition("=") for each in _words(own)]
    values = {name: _READERS[name](value) for name, _, value in fields_of_kind}
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
    pairs = [each.partition(": ") for each in _words(text.strip(), "; ")]
    return tuple((_read_buffer(buffer), _read_content(content)) for buffer, _, content in pairs)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, _words(text.strip())))
