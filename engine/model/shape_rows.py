"""A `ModelShape` as JSON keeps it: each kind of unit once, and what differs from dtype to dtype
under its name. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from engine.model.layout import Activations
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
"""Fields of ModelShape that are the same in every dtype. Units are kept by kind."""

ACTIVATION_FIELDS = ("activations", "masked_activations", "compiled_activations")


def pack(shapes: Mapping[str, ModelShape]) -> dict[str, Any]:
    """The row of one model, from its shapes by dtype: each kind of unit once, and the sequence of
    kinds as pairs of kind and count. Names of units are not kept: they are always embed, block 0,
    block 1 ... head.
    """
    shape = next(iter(shapes.values()))
    by_dtype = [[_kind(unit, dtype) for unit in of.units] for dtype, of in shapes.items()]
    units = [
        {name: value for part in parts for name, value in part.items()}
        for parts in zip(*by_dtype, strict=True)
    ]
    kinds = [unit for place, unit in enumerate(units) if unit not in units[:place]]
    order = groupby(kinds.index(unit) for unit in units)
    return {
        **{name: getattr(shape, name) for name in MODEL_FIELDS},
        "logit_bytes": {dtype: of.logit_bytes for dtype, of in shapes.items()},
        "kinds": kinds,
        "units": [[kind, len(list(run))] for kind, run in order],
    }


def unpack(row: Mapping[str, Any], dtype: str, source: str, **changes: Any) -> ModelShape | None:
    """The shape that `row` keeps for `dtype`, named `source`, with `changes` of MODEL_FIELDS; None
    where it has none.
    """
    if dtype not in row["logit_bytes"]:
        return None
    values = {name: row[name] for name in MODEL_FIELDS} | changes
    units = [kind for kind, count in row["units"] for _ in range(count)]
    names = (EMBED, *(f"block {position}" for position in range(len(units) - 2)), HEAD)
    return ModelShape(
        source=source,
        dtype=dtype,
        logit_bytes=row["logit_bytes"][dtype],
        **values,
        units=tuple(
            _unit(name, row["kinds"][kind], dtype) for name, kind in zip(names, units, strict=True)
        ),
    )


def _kind(unit: UnitShape, dtype: str) -> dict[str, Any]:
    counts = [getattr(unit, name) for name in ACTIVATION_FIELDS]
    numbers = [number for count in counts for number in (count.per_token, count.per_pair)]
    return {
        "numel": unit.numel,
        "parameters": unit.parameter_count,
        "widest": unit.widest,
        **({dtype: numbers} if any(numbers) else {}),
    }


def _unit(name: str, kind: Mapping[str, Any], dtype: str) -> UnitShape:
    """`kind` gives the bytes of activations in each dtype: per token and per pair, plain, masked
    and compiled.
    """
    counts = kind.get(dtype)
    activations = (
        {}
        if counts is None
        else {
            field_name: Activations(*counts[2 * place : 2 * place + 2])
            for place, field_name in enumerate(ACTIVATION_FIELDS)
        }
    )
    return UnitShape(name, kind["numel"], kind["parameters"], kind["widest"], **activations)
