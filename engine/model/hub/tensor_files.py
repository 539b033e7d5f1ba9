"""The tensors that the weight files of a model have, without reading them. Files are safetensors,
or what `torch.save` wrote (`engine.model.hub.torch_pickle`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from engine import safe_files
from engine.model.hub.hub_cache import weight_files
from engine.model.hub.model_files import read_small
from engine.model.hub.safetensors_header import MOST_FILE, read_safetensors_header
from engine.model.hub.torch_pickle import is_pickled, open_pickled

_FINER = {"F64", "F32", "F16"}
"""Types whose values may have bits that bf16 does not hold."""
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""Names in safetensors for types of torch."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is stored in `file`. `dtype` is the name of its type in safetensors."""

    file: Path
    dtype: str
    bytes: int


def files_with_weights(folder: Path | None) -> list[Path]:
    """Returns the files that hold the weights of the model in `folder`, without their index. The
    list is empty where there are none, or no folder.
    """
    if folder is None or not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir()]
    files = weight_files(names, lambda name: read_small(folder / name))
    return [folder / name for name in files if not name.endswith(".json")]


def reading_dtype(folder: Path | None) -> torch.dtype:
    """Returns bfloat16 for a folder whose weights are all stored so, and float32 for any other,
    also for one that cannot be read.

    float32 holds every value of bf16 and fp16. Raises ModelError for a pickled file that is
    refused.
    """
    try:
        found = [tensors_in(file) for file in files_with_weights(folder)]
        stored = {each.dtype for tensors in found for each in tensors.values()}
    except (OSError, ValueError):
        stored = set()  # the library reports what is wrong with the files
    is_bf16 = "BF16" in stored and not stored & _FINER
    return torch.bfloat16 if is_bf16 else torch.float32


def tensors_in(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name. Raises OSError or ValueError for safetensors that
    cannot be read, and ModelError for a pickled file that is refused.
    """
    if is_pickled(file):
        return {
            name: StoredTensor(file, _NAMES.get(tensor.dtype, str(tensor.dtype)), tensor.nbytes)
            for name, tensor in open_pickled(file).items()
        }
    _, entries = read_safetensors_header(file)
    return {name: StoredTensor(file, entry.dtype, entry.bytes) for name, entry in entries.items()}


def read_tensor(file: Path, name: str) -> torch.Tensor:
    """Returns a copy of one tensor of a file, in its own shape and type."""
    if is_pickled(file):
        return open_pickled(file)[name].detach().clone(memory_format=torch.contiguous_format)
    safe_files.refuse_unlike_files(file, MOST_FILE)
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)
