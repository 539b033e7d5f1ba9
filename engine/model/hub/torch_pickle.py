"""Weights that `torch.save` wrote (`pytorch_model.bin`) are read as tensors alone. Such a file is
a pickle, which may name any function and have it called. torch is made to refuse every name but
those that tensors need, so nothing of the file ever runs.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from engine import safe_files
from engine.errors import ModelError
from engine.machine.short_memory import refuse_short_memory
from engine.model.hub.safetensors_header import MOST_FILE

SUFFIX = ".bin"
_ZIP = b"PK\x03\x04"
"""torch.save has written zip archives since PyTorch 1.6. Only these can be mapped into memory."""
_OLDER = b"\x80\x02"
"""First bytes of a file of an older PyTorch: it is a bare pickle."""
_FOREIGN = re.compile(r"GLOBAL (\S+)")
"""Texts in the errors of torch that name what it refuses to load."""
_SAFE = "give a folder or Hugging Face id with safetensors weights"


def is_pickled(file: Path) -> bool:
    """Returns whether a weight file, by its name, is one that `torch.save` wrote."""
    return file.suffix == SUFFIX


def open_pickled(file: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file that `torch.save` wrote, by name, each of its own shape. They
    are views of the mapped file, whose pages are read when they are accessed.

    Raises ModelError for a file that holds anything but tensors by name, was written by PyTorch
    before 1.6, or cannot be read.
    """
    _refuse_other_archives(file)
    _refuse_bombs(file)
    try:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        named = _FOREIGN.search(str(error))
        what = "" if named is None else f" ({named[1]})"
        raise ModelError(
            f"model.source: {file.name} holds pickled objects that are not tensors{what}, and "
            f"pickled code is never run; {_SAFE}."
        ) from error
    except Exception as error:
        refuse_short_memory(error, "while the weights were read")
        # A damaged archive fails in torch or in pickle, with errors of many kinds and many words.
        raise ModelError(
            f"model.source: the weights in {file.name} cannot be loaded (the file is damaged or "
            f"not whole); get it again, or {_SAFE}."
        ) from error
    _refuse_other_values(file, found)
    return found


def _refuse_other_archives(file: Path) -> None:
    try:
        with safe_files.open_linked(file, MOST_FILE) as opened:
            begins = opened.read(len(_ZIP))
    except OSError as error:
        raise ModelError(
            f"model.source: the weights in {file.name} cannot be loaded ({error.strerror}); get "
            f"the file again, or {_SAFE}."
        ) from error
    if begins.startswith(_OLDER):
        raise ModelError(
            f"model.source: {file.name} was written by PyTorch before 1.6, in a form that cannot "
            f"be read tensor by tensor; {_SAFE}."
        )
    if begins != _ZIP:
        raise ModelError(
            f"model.source: the weights in {file.name} cannot be loaded (it is no file of "
            f"torch.save); get the file again, or {_SAFE}."
        )


def _refuse_bombs(file: Path) -> None:
    """Raises ModelError for an archive that unpacks to more than it is: `torch.save` compresses
    nothing, and its pickle only names the tensors.
    """
    try:
        with safe_files.open_linked(file, MOST_FILE) as opened, zipfile.ZipFile(opened) as archive:
            parts = archive.infolist()
    except (OSError, ValueError, zipfile.BadZipFile):
        return  # torch reports what is wrong
    for part in parts:
        is_large = part.filename.endswith("/data.pkl") and part.file_size > safe_files.MEDIUM
        if part.compress_type != zipfile.ZIP_STORED or is_large:
            raise ModelError(
                f"model.source: the weights in {file.name} cannot be loaded (torch.save would not "
                f"compress {part.filename[:80]!r} in it, or write it so large); {_SAFE}."
            )


def _refuse_other_values(file: Path, found: Any) -> None:
    """Raises ModelError where `found` is anything but plain tensors by name."""
    what = type(found).__name__
    if isinstance(found, dict):
        others = [name for name, value in found.items() if not _is_plain(name, value)]
        if found and not others:
            return
        what = f"{others[0]!r} is none" if others else "it is empty"
    raise ModelError(f"model.source: {file.name} does not hold tensors by name ({what}); {_SAFE}.")


def _is_plain(name: Any, value: Any) -> bool:
    return (
        isinstance(name, str)
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
    )
