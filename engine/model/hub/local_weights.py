"""What a folder or a file lacks that is named as a model on this machine.

Only names, sizes and headers are read, and no torch is needed: `check` and the form ask this on
each change of a setting, before anything else runs.
"""

from __future__ import annotations

import functools
import re
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from engine import safe_files
from engine.errors import ModelError
from engine.model.hub.hub_cache import CONFIG, INDEX, LISTED, PICKLED_INDEX, weight_files
from engine.model.hub.model_files import read_object, read_small, refuse_unlike_files
from engine.model.hub.safetensors_header import (
    MOST_FILE,
    Contradiction,
    CutOff,
    safetensors_header_of,
)
from engine.model.lora.peft_folder import CONFIG as ADAPTER_CONFIG
from engine.paths import is_path
from engine.safe_files import FileFault
from engine.text import counted

_GGUF = ".gguf"
_OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz")
_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
_LFS = b"version https://git-lfs.github.com/spec/"
"""Beginning of a text that Git LFS leaves in place of a large file."""
_ZIP = b"PK\x03\x04"
"""Beginning of what torch.save has written since PyTorch 1.6."""
_SHOWN = 3
_AGAIN = "get the files again"
_WHOLE = "give the folder or Hugging Face id of a whole model with safetensors weights"


def is_gguf(name: str) -> bool:
    """Returns whether a file, by its name, holds a model for llama.cpp."""
    return name.lower().endswith(_GGUF)


def about_gguf(what: str) -> str:
    """Returns a sentence on a model that is there as GGUF alone. what: how it begins."""
    return (
        f"model.source: {what} in GGUF, the format of llama.cpp, which cannot be trained; give the "
        "folder or Hugging Face id of the model from which it was made, with safetensors weights."
    )


def refuse_no_path(source: str, path: Path | None) -> None:
    """Raises ModelError where `source` is a path, and there is nothing. path: what it names."""
    if path is None and is_path(source):
        raise ModelError(f"model.source: the folder {source} does not exist; check the path.")


def refuse_no_model(source: str, path: Path | None) -> None:
    """Raises ModelError where `path`, which `source` names on this machine, is neither a folder
    with a configuration nor a configuration file, where `source` is a path that leads nowhere, and
    where it names a GGUF file, even one that is not there.
    """
    if is_gguf(source) and (path is None or not path.is_dir()):
        raise ModelError(about_gguf(f"{source} is a file"))
    refuse_no_path(source, path)
    if path is None:
        return
    if not path.is_dir():
        if path.suffix in _OF_WEIGHTS:
            raise ModelError(
                f"model.source: {source} is a file of weights; give the folder that holds it with "
                f"its {CONFIG} and its tokenizer."
            )
        if path.suffix != ".json":
            raise ModelError(
                f"model.source: {source} is a file; give a model folder or a Hugging Face id."
            )
        refuse_unlike_files(path)
        return
    names = _names(path)
    if CONFIG not in names:
        _refuse_adapter(source, path, names)
        if any(map(is_gguf, names)):
            raise ModelError(about_gguf(f"{source} has its weights"))
        raise ModelError(
            f"model.source: {source} has no {CONFIG}; give a Hugging Face model folder."
        )
    refuse_unlike_files(path)


def refuse_no_weights(source: str, path: Path | None) -> None:
    """Raises ModelError, in one sentence, where the folder `path`, which `source` names on this
    machine, lacks weights that can be loaded, or has a part of them alone. Pickled weights are not
    opened.
    """
    if path is None or not path.is_dir():
        return
    names = _names(path)
    if CONFIG in names and not _is_object(path / CONFIG):
        return  # reading the configuration reports what is wrong with it
    files = weight_files(names, lambda name: read_small(path / name))
    if not files:
        _refuse_adapter(source, path, names)
        raise ModelError(_without_weights(source, names))
    lacking = [name for name in files if not (path / name).exists()]
    if lacking == files:
        raise ModelError(
            f"model.source: {path / files[0]} is a link to a file that is not there; {_AGAIN}."
        )
    if lacking:
        listed = len(files) - 1
        others = f" and {len(lacking) - 1:,} more" if len(lacking) > 1 else ""
        raise ModelError(
            f"model.source: {source} lacks {lacking[0]}{others} of the "
            f"{counted(listed, 'file')} that {files[0]} lists; {_AGAIN}."
        )
    for name in files:
        file = path / name
        try:
            stat = file.stat()
            wrong = _what_is_wrong(file, stat.st_size, stat.st_mtime_ns)
        except FileFault as fault:
            raise ModelError(f"model.source: {str(fault).rstrip('.')}; {_AGAIN}.") from None
        except OSError as error:
            wrong = f"cannot be read ({error.strerror or error}); {_AGAIN}"
        if wrong:
            raise ModelError(f"model.source: {file} {wrong}.")


def _names(folder: Path) -> set[str]:
    """Returns the names in a folder. Raises ModelError if it cannot be read."""
    try:
        return {path.name for path in folder.iterdir()}
    except OSError as error:
        raise ModelError(f"model.source: {folder} cannot be read ({error.strerror}).") from None


def _is_object(file: Path) -> bool:
    try:
        read_object(file)
    except OSError:
        return False
    return True


def _refuse_adapter(source: str, path: Path, names: Collection[str]) -> None:
    """Raises ModelError for a folder with an adapter and no model of its own."""
    if ADAPTER_CONFIG not in names:
        return
    base = "its base model"
    try:
        settings = read_object(path / ADAPTER_CONFIG)
        base = f"{settings['base_model_name_or_path']}, its base model"
    except (OSError, LookupError):
        pass  # the sentence can do without its name
    raise ModelError(
        f"model.source: {source} holds an adapter and no whole model; set model.source to {base}, "
        "and to go on with the adapter set train.method to lora and model.start_from to this "
        "folder."
    )


def _without_weights(source: str, names: Collection[str]) -> str:
    """Returns a sentence on a folder in which nothing shows where its weights are."""
    if any(map(is_gguf, names)):
        return about_gguf(f"{source} has its weights")
    index = next((name for name in LISTED if name in names), None)
    if index is not None:
        return f"model.source: {index} in {source} lists no weights of this folder; {_AGAIN}."
    shards = sorted(filter(_SHARD.fullmatch, names))
    if shards:
        index = INDEX if shards[0].endswith(".safetensors") else PICKLED_INDEX
        return f"model.source: {source} has {shards[0]} and lacks its index, {index}; {_AGAIN}."
    others = sorted(name for name in names if name.endswith(_OF_WEIGHTS))
    found = ""
    if others:
        more = ", ..." if len(others) > _SHOWN else ""
        found = f" and {', '.join(others[:_SHOWN])}{more} cannot be loaded as such"
    return (
        f"model.source: {source} has no weights ({LISTED[0]}){found}; {_WHOLE}, or set model.init "
        "to random."
    )


@functools.lru_cache(maxsize=1024)
def _what_is_wrong(file: Path, size: int, _time: int) -> str:
    """Returns what is wrong with one of the files that hold weights or list them, or an empty text.
    _time: when it was changed. Raises OSError.
    """
    if file.suffix == ".json":
        return ""
    with safe_files.open_linked(file, MOST_FILE) as opened:
        begin = opened.read(len(_LFS))
        if begin == _LFS:
            return (
                "is a pointer of Git LFS in place of the weights; run `git lfs pull` in its folder"
            )
        if file.suffix == ".bin":
            return _wrong_of_pickled(opened, begin)
        opened.seek(0)
        try:
            _, entries = safetensors_header_of(opened, size)
        except CutOff as error:
            return f"is cut off: {error}; {_AGAIN}"
        except Contradiction as error:
            return f"is no file of safetensors ({error}); {_AGAIN}"
    return "" if entries else f"holds no weights; {_AGAIN}"


def _wrong_of_pickled(opened: BinaryIO, begin: bytes) -> str:
    """Returns what is wrong with a file of torch.save as far as its ends show. Another form than an
    archive has sentences of its own where it is opened (`engine.model.hub.torch_pickle`).
    """
    if begin.startswith(_ZIP) and not zipfile.is_zipfile(opened):
        return f"is cut off; {_AGAIN}"
    return ""
