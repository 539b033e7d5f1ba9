"""Shapes of models are stored as rows of JSON. A row has each kind of unit once, and stores numbers
that depend on the dtype under the dtype's name. No torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from engine.model.activation_sizes import Activations
from engine.model.shape import ModelShape, UnitShape
from engine.plan.buffers import EMBED, HEAD

MODEL_FIELDS = (
    "model_type",
    "attention",
    "tied",
    "packs",
    "hidden_size",
    "vocab_size",
    "active_parameters",
    "max_position_embeddings",
    "learned_positions",
    "sliding_window",
    "mask_kinds",
    "argument_numel",
    "attention_heads",
    "attention_width",
)
"""These fields of ModelShape are the same in every dtype. Units are stored by kind."""

ACTIVATION_FIELDS = ("activations", "masked_activations", "compiled_activations")
SMALL, BLOCKS = "small", "blocks"
"""A unit has the number of elements of its small parameters under the first key, and the number of
blocks into which its others are cut under the second (`engine.planes.moments`).
"""
STREAMS = "residual_streams"
"""A row has this key where a block's input has several hidden states per token."""
EXACT = "exact"
"""A unit with parameters that stay in fp32 in a bf16 model has their number under this key."""
FROZEN, NOT_TRAINED = "frozen", "not_trained"
"""A unit with parameters that are not trained has the elements that they take in weight_high alone
under the first key, and their number under the second.
"""
WORK = "work_parameters"
"""A row of a model of which parts are trained has this key."""


def pack(shapes: Mapping[str, ModelShape]) -> dict[str, Any]:
    """Returns the row of one model, from its shapes by dtype.

    `kinds` has each kind of unit once, and `units` has the sequence of kinds as pairs of kind and
    count. Names of units are not stored: they are always embed, block 0, block 1 ... head.
    """
    first, *_ = shapes.values()
    units: list[dict[str, Any]] = [{} for _ in first.units]
    for dtype, shape in shapes.items():
        for row, unit in zip(units, shape.units, strict=True):
            row.update(_kind(unit, dtype))
    kinds: list[dict[str, Any]] = []
    for row in units:
        if row not in kinds:
            kinds.append(row)
    order = groupby(kinds.index(row) for row in units)
    return {
        **{name: getattr(first, name) for name in MODEL_FIELDS},
        **({STREAMS: first.residual_streams} if first.residual_streams > 1 else {}),
        **({} if first.work_parameters is None else {WORK: first.work_parameters}),
        "logit_bytes": {dtype: shape.logit_bytes for dtype, shape in shapes.items()},
        "kinds": kinds,
        "units": [[kind, len(list(run))] for kind, run in order],
    }


def unpack(row: Mapping[str, Any], dtype: str, source: str, **changes: Any) -> ModelShape | None:
    """Returns the shape stored in `row` for `dtype`, with `source` as its name; None if there is
    none.

    `changes` replace values of MODEL_FIELDS.
    """
    if dtype not in row["logit_bytes"]:
        return None
    values = {name: row[name] for name in MODEL_FIELDS} | changes
    values.setdefault(STREAMS, row.get(STREAMS, 1))
    values.setdefault(WORK, row.get(WORK))
    kinds = [row["kinds"][kind] for kind, count in row["units"] for _ in range(count)]
    blocks = [f"block {position}" for position in range(len(kinds) - 2)]
    units = zip((EMBED, *blocks, HEAD), kinds, strict=True)
    return ModelShape(
        source=source,
        dtype=dtype,
        logit_bytes=row["logit_bytes"][dtype],
        **values,
        units=tuple(_unit(name, kind, dtype) for name, kind in units),
    )


def _kind(unit: UnitShape, dtype: str) -> dict[str, Any]:
    """Returns what a row stores for a unit, with the numbers of one dtype. The name is not
    stored.
    """
    numbers: list[float] = []
    for name in ACTIVATION_FIELDS:
        activations = getattr(unit, name)
        numbers += [activations.per_token, activations.per_pair]
    kind: dict[str, Any] = {
        "numel": unit.numel,
        "parameters": unit.parameter_count,
        "widest": unit.widest,
        SMALL: unit.small_numel,
        BLOCKS: unit.block_count,
    }
    if any(numbers):
        kind[dtype] = numbers
    if unit.exact_numel:
        kind[EXACT] = unit.exact_numel
    if unit.frozen_count:
        kind |= {FROZEN: unit.frozen_numel, NOT_TRAINED: unit.frozen_count}
    return kind


def _unit(name: str, kind: Mapping[str, Any], dtype: str) -> UnitShape:
    """Returns the unit stored in `kind`.

    `kind` lists the bytes of activations in each dtype: per token and per pair, first plain, then
    masked, then compiled.
    """
    numbers = kind.get(dtype, [])
    pairs = zip(numbers[::2], numbers[1::2])
    activations = {
        field_name: Activations(per_token, per_pair)
        for field_name, (per_token, per_pair) in zip(ACTIVATION_FIELDS, pairs)
    }
    exact_numel = kind.get(EXACT, 0) if dtype == "bfloat16" else 0
    return UnitShape(
        name,
        kind["numel"],
        kind["parameters"],
        kind["widest"],
        exact_numel=exact_numel,
        small_numel=kind[SMALL],
        block_count=kind[BLOCKS],
        frozen_numel=kind.get(FROZEN, 0),
        frozen_count=kind.get(NOT_TRAINED, 0),
        **activations,
    )
