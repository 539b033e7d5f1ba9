"""Shapes that were built on this machine, kept in `shapes` of the cache folder, so that a model
seen before is answered without torch: one small JSON file a shape. No torch here.

A file is found by all that decides a shape: the bytes of the model's config.json, dtype and
attention, the versions of the libraries and the engine's own source files. What is damaged, of
another form or not readable counts as not there, and a folder that cannot be written to keeps
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.files import write_whole
from engine.model.shape import ModelShape
from engine.model.shape_rows import ACTIVATION_FIELDS, pack, unpack
from engine.paths import cache_folder
from engine.plan import buffers

FORM = 1
"""Of the files; another one counts as not there."""
MOST_FILES = 200
LIBRARIES = ("torch", "transformers", "accelerate", "kernels")
"""Whose versions decide a shape; `kernels` because some families compute otherwise where it is
installed.
"""

_ELSEWHERE = "configuration_files"
"""The key by which a config.json names other files for some versions of transformers."""
_MOST_BYTES, _MOST_UNITS, _LARGEST = 1 << 20, 100_000, 1 << 62
_NUMBERS = {
    "hidden_size": 1,
    "vocab_size": 1,
    "active_parameters": 0,
    "mask_kinds": 1,
    "argument_numel": 0,
    "attention_heads": 1,
    "attention_width": 1,
}
"""The least value of each."""


def shape_key(content: bytes, dtype: str, attention: str) -> str | None:
    """The name under which the shape of a model is kept whose config.json has these bytes. None
    where the bytes do not decide it: they are no JSON object, or name other files.
    """
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if _SOURCES is None or not isinstance(config, dict) or _ELSEWHERE in config:
        return None
    parts = [FORM, hashlib.sha256(content).hexdigest(), dtype, attention, _versions(), _SOURCES]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def kept_shape(key: str, dtype: str, source: str) -> ModelShape | None:
    """The shape that is kept under `key`, named `source`; None where there is none that can be
    trusted.
    """
    try:
        file = _file(key)
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return None
        shape = _read(file.read_bytes(), key, dtype, source)
    except (OSError, RuntimeError):
        return None
    if shape is not None:
        with contextlib.suppress(OSError):
            os.utime(file)  # what is in use is the last to go
    return shape


def keep_shape(key: str, shape: ModelShape) -> None:
    """Keep `shape` under `key`, whole or not at all. Nothing is kept where the folder cannot be
    written to, where the engine's files were edited since this process read them, or where the
    shape would not be read again as it is.
    """
    try:
        content = _written(key, shape)
        if _sources() != _SOURCES or _read(content, key, shape.dtype, shape.source) != shape:
            return
        file = _file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content, durable=False)
        _remove_oldest(file.parent)
    except (OSError, ValueError, TypeError, RuntimeError):
        return


def _file(key: str) -> Path:
    """Raises RuntimeError where the user has no home."""
    return cache_folder() / "shapes" / f"{key}.json"


def _remove_oldest(folder: Path) -> None:
    """Beyond MOST_FILES, what was left behind by a process that ended as it wrote included."""
    found = []
    for file in folder.iterdir():
        with contextlib.suppress(OSError):  # another process removes as well
            found.append((file.stat().st_mtime_ns, file))
    for _, file in sorted(found)[:-MOST_FILES]:
        with contextlib.suppress(OSError):
            file.unlink()


# ---------------------------------------------------------------------- what decides a shape, besid


@functools.cache
def _versions() -> list[str | None]:
    found: list[str | None] = []
    for name in LIBRARIES:
        try:
            found.append(metadata.version(name))
        except metadata.PackageNotFoundError:
            found.append(None)
    return found


def _sources() -> str | None:
    """A digest of names, sizes and times of the files that decide a shape: those of this room, and
    the names of units. None where there are none to look at.
    """
    try:
        with os.scandir(Path(__file__).parent) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries if entry.name.endswith(".py")]
        stats.append((buffers.__name__, Path(buffers.__file__).stat()))
    except OSError:
        return None
    listed = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


_SOURCES = _sources()
"""As this process runs them."""


# ---------------------------------------------------------------------- files


def _written(key: str, shape: ModelShape) -> bytes:
    """Raises ValueError or TypeError for what JSON does not have."""
    row = pack({shape.dtype: shape})
    return json.dumps(
        {"key": key, "sha256": _checksum(row), "shape": row}, allow_nan=False
    ).encode()


def _checksum(row: Any) -> str:
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()


def _read(content: bytes, key: str, dtype: str, source: str) -> ModelShape | None:
    """The shape in a file's content, or None for what `_written` does not write."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(found, dict)
        or found.get("key") != key
        or not _is_row(found.get("shape"), dtype)
    ):
        return None
    return (
        unpack(found["shape"], dtype, source)
        if found.get("sha256") == _checksum(found["shape"])
        else None
    )


def _is_row(row: Any, dtype: str) -> bool:
    """Whether `row` is what `pack` makes of a shape in `dtype` alone: every value there, of its
    type, in its range.
    """
    if (
        not isinstance(row, dict)
        or not isinstance(row.get("logit_bytes"), dict)
        or set(row["logit_bytes"]) != {dtype}
    ):
        return False
    kinds, units = row.get("kinds"), row.get("units")
    if not (
        isinstance(kinds, list)
        and all(_is_kind(kind, dtype) for kind in kinds)
        and isinstance(units, list)
    ):
        return False
    if not all(
        isinstance(pair, list)
        and len(pair) == 2
        and _is_count(pair[0])
        and pair[0] < len(kinds)
        and _is_count(pair[1], 1, _MOST_UNITS)
        for pair in units
    ):
        return False
    return (
        2 <= sum(count for _, count in units) <= _MOST_UNITS
        and _is_count(row["logit_bytes"][dtype], 1)
        and all(isinstance(row.get(name), str) for name in ("model_type", "attention"))
        and all(isinstance(row.get(name), bool) for name in ("tied", "packs", "learned_positions"))
        and all(_is_count(row.get(name), least) for name, least in _NUMBERS.items())
        and all(
            name in row and (row[name] is None or _is_count(row[name]))
            for name in ("max_position_embeddings", "sliding_window")
        )
    )


def _is_kind(kind: Any, dtype: str) -> bool:
    if not isinstance(kind, dict) or not all(
        _is_count(kind.get(name)) for name in ("numel", "parameters", "widest")
    ):
        return False
    numbers = kind.get(dtype, [0.0] * 2 * len(ACTIVATION_FIELDS))
    return (
        isinstance(numbers, list)
        and len(numbers) == 2 * len(ACTIVATION_FIELDS)
        and all(map(_is_size, numbers))
    )


def _is_count(value: Any, least: int = 0, most: int = _LARGEST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_size(value: Any) -> bool:
    """Bytes, that may be a part of one in the mean."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and 0 <= value <= _LARGEST
    )
