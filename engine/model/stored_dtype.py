"""`reading_dtype` says in which dtype a checkpoint must be read so that no bit of it is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from engine.model.hub_cache import weight_files

_MOST_HEADER_BYTES = 100 << 20
"""safetensors allows no longer header."""
_FINER = {"F64", "F32", "F16"}
"""Values of these dtypes may have bits that bf16 does not hold."""


def reading_dtype(folder: Path | None) -> torch.dtype:
    """Returns bfloat16 for a folder whose weights are all stored so, and float32 for any other,
    also for one that cannot be looked at.

    float32 holds every value of bf16 and fp16.
    """
    try:
        stored = set() if folder is None else _stored_dtypes(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        stored = set()  # the library says what is wrong with the files
    is_bf16 = "BF16" in stored and not stored & _FINER
    return torch.bfloat16 if is_bf16 else torch.float32


def _stored_dtypes(folder: Path) -> set[str]:
    """Returns the names that safetensors gives the dtypes of all weights in `folder`."""
    names = [path.name for path in folder.iterdir()]
    files = weight_files(names, lambda name: (folder / name).read_text(encoding="utf-8"))
    found: set[str] = set()
    for file in files:
        if file.endswith(".json"):  # the index
            continue
        found |= {entry["dtype"] for entry in read_header(folder / file).values()}
    return found


def read_header(file: Path) -> dict[str, Any]:
    """Returns what a safetensors file says of each of its tensors, by name. The file begins with
    the length of this header, in 8 bytes, and the header as JSON.

    Raises OSError or ValueError for a file that is none.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError("the header is longer than safetensors allows")
        entries = json.loads(opened.read(length))
    entries.pop("__metadata__", None)
    return entries
