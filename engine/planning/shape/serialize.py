"""Shapes of models are stored as rows of JSON. A row has each kind of unit once, and stores numbers
that depend on the dtype under the dtype's name. No torch is needed.

A row of adapters has what a shape with adapters of every linear layer has beside that of the whole
model. Only the features of the layers, and what autograd keeps, must be stored: all else follows
from the rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any

from engine.planning.layout.adapter_layout import adapted_layout
from engine.planning.layout.optimizer_states import ParameterRun
from engine.planning.schedule.buffers import EMBED, HEAD
from engine.planning.shape.activation_sizes import Activations
from engine.planning.shape.attention_shape import AttentionShape
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.quantized_weights import Method
from engine.planning.shape.sequence_tiling import tiled_block
from engine.planning.shape.unit_shape import UnitShape

MODEL_FIELDS = (
    "model_type",
    "tied",
    "packs",
    "hidden_size",
    "vocab_size",
    "active_parameters",
    "max_position_embeddings",
    "learned_positions",
    "argument_numel",
)
"""Fields of ModelShape that are the same in every dtype. Units are stored by kind."""
ATTENTION_FIELDS = {
    "attention": "implementation",
    "sliding_window": "sliding_window",
    "mask_kinds": "mask_kinds",
    "attention_heads": "heads",
    "attention_width": "width",
}
"""Fields of AttentionShape by the keys that a row has them under."""

ACTIVATION_FIELDS = ("activations", "masked_activations", "compiled_activations")
RUNS = "runs"
"""A unit has the shapes of the parameters in its planes under this key, in their order, each with
the number of those that follow each other.
"""
STREAMS = "residual_streams"
"""A row has this key where a block's input has several hidden states per token."""
KEEP_IN_FP32 = "exact"
"""A unit with parameters that stay in fp32 in a bf16 model has their number under this key."""
FROZEN, NOT_TRAINED = "frozen", "not_trained"
"""A unit with parameters that are not trained has the elements that they take in weight_high alone
under the first key, and their number under the second.
"""
SHARED = "shared"
"""A unit has the number of parameters that blocks share under this key, where it has any."""
WORK = "work_parameters"
"""A row of a model of which parts are trained has this key."""
UNTOUCHED = "untouched_numel"
"""A row of a model that also reads images or sound has this key."""
HANDED = "handed_numel"
"""A row of a model whose blocks hand values to later blocks has this key."""
CACHE = "cache_numel"
"""A row of a model that keeps keys and values of each token has this key."""
STORED_AS = "stored_as"
"""A row of a checkpoint whose weights are dequantized on loading has this key."""
NON_LINEAR_MATRIX = "non_linear_matrix"
"""A row of a model with such a parameter has this key."""
TILED = "{} in tiles"
"""A block of which parts can run in sequence chunks has the numbers of its `TiledBlock` under this
key, with the name of each dtype.
"""
LOW_RANK = 16
LAYERS = "layers"
"""A kind of block of a row of adapters has the features under this key that each layer with an
adapter takes and returns.
"""


@dataclass(frozen=True)
class AdaptedBlock:
    """What of a block with adapters must be stored beside activations."""

    layers: Sequence[tuple[int, int]]
    """Numbers of features that each layer with an adapter takes and returns."""
    keep_in_fp32: Sequence[int]
    """Numbers of elements of the parameters that stay in fp32 in a bf16 model."""


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
    return {
        **{name: getattr(first, name) for name in MODEL_FIELDS},
        **{key: getattr(first.attention, name) for key, name in ATTENTION_FIELDS.items()},
        **({STREAMS: first.residual_streams} if first.residual_streams > 1 else {}),
        **({} if first.work_parameters is None else {WORK: first.work_parameters}),
        **({UNTOUCHED: first.untouched_numel} if first.untouched_numel else {}),
        **({HANDED: first.handed_numel} if first.handed_numel else {}),
        **({CACHE: first.cache_numel} if first.cache_numel else {}),
        **({} if first.stored_as is None else {STORED_AS: first.stored_as.value}),
        **({NON_LINEAR_MATRIX: first.non_linear_matrix} if first.non_linear_matrix else {}),
        "logit_bytes": {dtype: shape.logit_bytes for dtype, shape in shapes.items()},
        **_in_kinds(units),
    }


def pack_adapters(
    low: Mapping[str, ModelShape], high: Mapping[str, ModelShape], blocks: Sequence[AdaptedBlock]
) -> dict[str, Any]:
    """Returns the row of adapters of one model, from its shapes by dtype with adapters of two
    ranks: `LOW_RANK` and twice as much.
    """
    rows: list[dict[str, Any]] = []
    for block in blocks:
        rows.append({LAYERS: list(map(list, block.layers))})
        if block.keep_in_fp32:
            rows[-1][KEEP_IN_FP32] = list(block.keep_in_fp32)
    for dtype, shape in low.items():
        for row, unit, other in zip(rows, shape.blocks, high[dtype].blocks, strict=True):
            first, second = _numbers(unit), _numbers(other)
            grown = [(after - before) / LOW_RANK for before, after in zip(first, second)]
            # What is kept for pairs of tokens does not depend on the rank.
            at_zero = [2 * before - after for before, after in zip(first, second)]
            row[dtype] = [round(number, 6) for number in (*at_zero, *grown[::2])]
            if unit.tiled is not None and other.tiled is not None:
                row[TILED.format(dtype)] = _by_rank(unit.tiled.numbers, other.tiled.numbers)
    return _in_kinds(rows)


def _by_rank(low: Sequence[float], high: Sequence[float]) -> list[float]:
    """Returns numbers of a block without adapters, and by how much each grows with the rank. low:
    those with adapters of `LOW_RANK`. high: those with twice that.
    """
    at_zero = [2 * before - after for before, after in zip(low, high, strict=True)]
    grown = [(after - before) / LOW_RANK for before, after in zip(low, high)]
    return [round(number, 6) for number in (*at_zero, *grown)]


def with_adapters(shape: ModelShape, row: Mapping[str, Any], rank: int) -> ModelShape | None:
    """Returns the shape of the same model with adapters of this rank beside every linear layer of
    its blocks. shape: that of the whole model. row: its row of adapters.

    Returns None if the row has no counts in the dtype of the shape.
    """
    kinds = [row["kinds"][kind] for kind, count in row["units"] for _ in range(count)]
    if not all(shape.dtype in kind for kind in kinds):
        return None
    blocks = [_adapted(*each, shape.dtype, rank) for each in zip(shape.blocks, kinds, strict=True)]
    units = (_frozen(shape.embed), *blocks, _frozen(shape.head))
    trained = sum(unit.trained_count for unit in units)
    below = sum(unit.parameter_count for unit in takewhile(lambda unit: unit.is_frozen, units))
    if shape.tied:  # backward passes through the table as the head
        below -= units[0].parameter_count
    active = shape.active_parameters + trained
    work = (active + (active - below) + trained) // 3
    return replace(
        shape, units=units, active_parameters=active, work_parameters=work, non_linear_matrix=""
    )


def _frozen(unit: UnitShape) -> UnitShape:
    """Returns a unit of which nothing is trained."""
    return replace(
        unit,
        numel=0,
        runs=(),
        frozen_numel=unit.numel,
        frozen_count=unit.parameter_count,
    )


def _adapted(unit: UnitShape, kind: Mapping[str, Any], dtype: str, rank: int) -> UnitShape:
    """Returns a block with the adapters of `kind`."""
    keep_in_fp32 = kind.get(KEEP_IN_FP32, ()) if dtype == "bfloat16" else ()
    layout = adapted_layout(unit.name, kind[LAYERS], keep_in_fp32, rank)
    *at_zero, plain, masked, compiled = kind[dtype]
    numbers = list(at_zero)
    for place, grown in zip((0, 2, 4), (plain, masked, compiled)):
        numbers[place] += rank * grown
    by_rank = kind.get(TILED.format(dtype), [])
    half = len(by_rank) // 2
    tiled_numbers = [each + rank * grown for each, grown in zip(by_rank[:half], by_rank[half:])]
    return replace(
        unit,
        numel=layout.numel,
        tiled=tiled_block(tiled_numbers),
        parameter_count=unit.parameter_count + layout.trained_count,
        widest=max(unit.widest, rank if kind[LAYERS] else 0),
        runs=layout.runs,
        frozen_numel=unit.numel - unit.fp32_numel,
        frozen_count=unit.parameter_count,
        adapter_features=sum(map(sum, kind[LAYERS])),
        **_activations(numbers),
    )


def _in_kinds(units: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns each kind of unit once, and their sequence."""
    kinds: list[dict[str, Any]] = []
    for row in units:
        if row not in kinds:
            kinds.append(row)
    order = groupby(kinds.index(row) for row in units)
    return {"kinds": kinds, "units": [[kind, len(list(run))] for kind, run in order]}


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
    values.setdefault(UNTOUCHED, row.get(UNTOUCHED, 0))
    values.setdefault(HANDED, row.get(HANDED, 0))
    values.setdefault(CACHE, row.get(CACHE, 0))
    values.setdefault(NON_LINEAR_MATRIX, row.get(NON_LINEAR_MATRIX, ""))
    values[STORED_AS] = Method(row[STORED_AS]) if row.get(STORED_AS) else None
    attention = {name: row[key] for key, name in ATTENTION_FIELDS.items()}
    kinds = [row["kinds"][kind] for kind, count in row["units"] for _ in range(count)]
    blocks = [f"block {position}" for position in range(len(kinds) - 2)]
    units = zip((EMBED, *blocks, HEAD), kinds, strict=True)
    return ModelShape(
        source=source,
        dtype=dtype,
        attention=AttentionShape(**attention),
        logit_bytes=row["logit_bytes"][dtype],
        **values,
        units=tuple(_unit(name, kind, dtype) for name, kind in units),
    )


def _kind(unit: UnitShape, dtype: str) -> dict[str, Any]:
    """Returns what a row stores for a unit, with the numbers of one dtype. The name is not
    stored.
    """
    numbers = _numbers(unit)
    kind: dict[str, Any] = {
        "numel": unit.numel,
        "parameters": unit.parameter_count,
        "widest": unit.widest,
        RUNS: [[list(shape), count] for shape, count in unit.runs],
    }
    if any(numbers):
        kind[dtype] = numbers
    if unit.tiled is not None:
        kind[TILED.format(dtype)] = list(unit.tiled.numbers)
    if unit.fp32_numel:
        kind[KEEP_IN_FP32] = unit.fp32_numel
    if unit.frozen_count:
        kind |= {FROZEN: unit.frozen_numel, NOT_TRAINED: unit.frozen_count}
    if unit.shared_count:
        kind[SHARED] = unit.shared_count
    return kind


def _numbers(unit: UnitShape) -> list[float]:
    """Returns the bytes of activations per token and per pair: plain, masked, compiled."""
    numbers: list[float] = []
    for name in ACTIVATION_FIELDS:
        activations = getattr(unit, name)
        numbers += [activations.per_token, activations.per_pair]
    return numbers


def _activations(numbers: Sequence[float]) -> dict[str, Any]:
    """Returns the activations that `_numbers` lists."""
    pairs = zip(numbers[::2], numbers[1::2])
    return {
        field_name: Activations(per_token, per_pair)
        for field_name, (per_token, per_pair) in zip(ACTIVATION_FIELDS, pairs)
    }


def _unit(name: str, kind: Mapping[str, Any], dtype: str) -> UnitShape:
    """Returns the unit stored in `kind`, which lists the bytes of activations in each dtype, as
    `_numbers` does.
    """
    fp32_numel = kind.get(KEEP_IN_FP32, 0) if dtype == "bfloat16" else 0
    return UnitShape(
        name,
        kind["numel"],
        kind["parameters"],
        kind["widest"],
        fp32_numel=fp32_numel,
        runs=tuple(ParameterRun(tuple(shape), count) for shape, count in kind[RUNS]),
        frozen_numel=kind.get(FROZEN, 0),
        frozen_count=kind.get(NOT_TRAINED, 0),
        shared_count=kind.get(SHARED, 0),
        tiled=tiled_block(kind.get(TILED.format(dtype))),
        **_activations(kind.get(dtype, [])),
    )
