"""Shapes of models built on this machine are kept in files, so that the shape of a known model is
found without torch.

Each shape is one small JSON file in the folder `shapes` of the cache folder (`KeptFiles`). Its name
is a digest of everything that decides the shape: the bytes of the model's config.json, dtype and
attention, the versions of the libraries and the engine's own source files. A file that is damaged
or of another form counts as missing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib import metadata
from typing import Any

from engine.config.adapters import Adapters
from engine.config.trained_parts import Parts
from engine.files import code_digest
from engine.kept_files import KeptFiles
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.quantized_weights import Method
from engine.planning.shape.sequence_tiling import TiledBlock
from engine.planning.shape.serialize import (
    ACTIVATION_FIELDS,
    CACHE,
    FROZEN,
    HANDED,
    KEEP_IN_FP32,
    NON_LINEAR_MATRIX,
    NOT_TRAINED,
    RUNS,
    SHARED,
    STORED_AS,
    STREAMS,
    TILED,
    UNTOUCHED,
    WORK,
    pack,
    unpack,
)

FORM = 2
"""The files have this form. A file of another form counts as missing."""
MOST_FILES = 200
LIBRARIES = ("torch", "transformers", "accelerate", "kernels")
"""The versions of these libraries affect a shape; `kernels` because some families compute
differently when it is installed.
"""
ROOMS = ("config", "model", "planning/layout", "planning/schedule", "planning/shape")
"""The code of these packages and the single files of the engine decide a shape: all that building
and measuring a model imports, and how the model of a run is read. A test walks the imports.
"""

_ELSEWHERE = "configuration_files"
"""With this key a config.json names other files for some versions of transformers."""
_MOST_UNITS = 100_000
_LARGEST = 1 << 62
_NUMBERS = {
    "hidden_size": 1,
    "vocab_size": 1,
    "active_parameters": 0,
    "mask_kinds": 1,
    "argument_numel": 0,
    "attention_heads": 1,
    "attention_width": 1,
}
"""Least values of the whole numbers of a row, by key."""


def shape_key(
    content: bytes,
    dtype: str,
    attention: str,
    parts: Parts | Adapters | None = None,
    changes: Mapping[str, Any] | None = None,
) -> str | None:
    """Returns the name under which a shape is kept, for a model whose config.json is `content`.
    parts: those that are trained, None for all. changes: what else the run changes of the model.

    Returns None if the bytes do not decide the shape, because they are not a JSON object or they
    name other files.
    """
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or _ELSEWHERE in config:
        return None
    trained = None if parts is None else asdict(parts)
    deciding = [FORM, hashlib.sha256(content).hexdigest(), dtype, attention, trained]
    deciding += [] if changes is None else [changes]
    return FILES.key([*deciding, _versions()])


def kept_shape(key: str, dtype: str, source: str) -> ModelShape | None:
    """Returns the shape kept under `key`, with `source` as its name.

    Returns None if there is no valid file.
    """
    content = FILES.read(key)
    return None if content is None else _read(content, key, dtype, source)


def keep_shape(key: str, shape: ModelShape) -> None:
    """Writes the file for `shape` under `key`, unless reading it would not give an equal shape."""
    try:
        content = _written(key, shape)
    except (ValueError, TypeError):
        return
    if _read(content, key, shape.dtype, shape.source) == shape:
        FILES.keep(key, content)


# ---------------------------------------------------------------------- what decides a shape


@functools.cache
def _versions() -> list[str | None]:
    """Returns the versions of LIBRARIES, with None for a library that is not installed."""
    found: list[str | None] = []
    for name in LIBRARIES:
        try:
            found.append(metadata.version(name))
        except metadata.PackageNotFoundError:
            found.append(None)
    return found


def _sources() -> list[str]:
    """Returns a digest of the code that decides a shape."""
    return [code_digest(ROOMS)]


FILES = KeptFiles("shapes", MOST_FILES, _sources)


# ---------------------------------------------------------------------- files


def _written(key: str, shape: ModelShape) -> bytes:
    """Returns the content of a file. Raises ValueError or TypeError for values that JSON cannot
    represent.
    """
    row = pack({shape.dtype: shape})
    content = {"key": key, "sha256": _checksum(row), "shape": row}
    return json.dumps(content, allow_nan=False).encode()


def _checksum(row: Any) -> str:
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()


def _read(content: bytes, key: str, dtype: str, source: str) -> ModelShape | None:
    """Returns the shape in a file's content, or None if `_written` cannot have written it."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("key") != key:
        return None
    row: Any = found.get("shape")
    if not _is_row(row, dtype) or found.get("sha256") != _checksum(row):
        return None
    return unpack(row, dtype, source)


def _is_row(row: Any, dtype: str) -> bool:
    """Returns whether `row` is a valid result of `pack` for a shape in `dtype` alone.

    Every value must be present, of the right type and in its range.
    """
    if not isinstance(row, dict) or not _has_units(row, dtype):
        return False
    logit_bytes = row.get("logit_bytes")
    if not isinstance(logit_bytes, dict) or set(logit_bytes) != {dtype}:
        return False
    optional = ("max_position_embeddings", "sliding_window")
    return (
        _is_count(logit_bytes[dtype], 1)
        and all(isinstance(row.get(name), str) for name in ("model_type", "attention"))
        and all(isinstance(row.get(name), bool) for name in ("tied", "packs", "learned_positions"))
        and all(_is_count(row.get(name), least) for name, least in _NUMBERS.items())
        and _is_count(row.get(STREAMS, 1), 1)
        and _is_count(row.get(WORK, 0))
        and _is_count(row.get(UNTOUCHED, 0))
        and _is_count(row.get(HANDED, 0))
        and _is_count(row.get(CACHE, 0))
        and isinstance(row.get(NON_LINEAR_MATRIX, ""), str)
        and row.get(STORED_AS) in (None, *Method)
        and all(name in row and (row[name] is None or _is_count(row[name])) for name in optional)
    )


def _has_units(row: dict[str, Any], dtype: str) -> bool:
    """Returns whether the kinds of units and their sequence have the form that `pack` makes."""
    kinds, units = row.get("kinds"), row.get("units")
    if not isinstance(kinds, list) or not isinstance(units, list):
        return False
    if not all(_is_kind(kind, dtype) for kind in kinds):
        return False
    if not all(_is_run(run, len(kinds)) for run in units):
        return False
    return 2 <= sum(count for _, count in units) <= _MOST_UNITS


def _is_run(run: Any, kinds: int) -> bool:
    """Returns whether `run` is a pair of the index of a kind, below `kinds`, and a count."""
    return (
        isinstance(run, list)
        and len(run) == 2
        and _is_count(run[0], 0, kinds - 1)
        and _is_count(run[1], 1, _MOST_UNITS)
    )


def _is_kind(kind: Any, dtype: str) -> bool:
    if not isinstance(kind, dict) or not _are_runs(kind.get(RUNS)):
        return False
    if not all(_is_count(kind.get(name)) for name in ("numel", "parameters", "widest")):
        return False
    if not all(
        _is_count(kind.get(name, 0)) for name in (KEEP_IN_FP32, FROZEN, NOT_TRAINED, SHARED)
    ):
        return False
    tiled = kind.get(TILED.format(dtype))
    if tiled is not None and not (
        isinstance(tiled, list)
        and len(tiled) == len(fields(TiledBlock))
        and all(map(_is_size, tiled))
    ):
        return False
    if dtype not in kind:  # a unit without activations
        return True
    numbers = kind[dtype]
    return (
        isinstance(numbers, list)
        and len(numbers) == 2 * len(ACTIVATION_FIELDS)
        and all(map(_is_size, numbers))
    )


def _are_runs(runs: Any) -> bool:
    """Returns whether `runs` are pairs of the shape of a parameter and a count."""
    return isinstance(runs, list) and all(
        isinstance(run, list)
        and len(run) == 2
        and isinstance(run[0], list)
        and all(map(_is_count, run[0]))
        and _is_count(run[1], 1, _MOST_UNITS)
        for run in runs
    )


def _is_count(value: Any, least: int = 0, most: int = _LARGEST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_size(value: Any) -> bool:
    """Returns whether `value` is a number of bytes, which may be fractional because it may be a
    mean.
    """
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and 0 <= value <= _LARGEST
    )
