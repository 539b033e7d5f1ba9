"""What a folder or a file lacks that is named as a model on this machine.

Only names, sizes and headers are read, and no torch is needed: `check` and the form ask this on
each change of a setting, before anything else runs.
"""

from __future__ import annotations

import functools
import json
import re
import zipfile
from collections.abc import Collection
from pathlib import Path

from engine.adapters.peft_folder import CONFIG as ADAPTER_CONFIG
from engine.errors import ModelError
from engine.hub.hub_cache import INDEX, LISTED, PICKLED_INDEX, weight_files
from engine.words import counted

CONFIG = "config.json"
_GGUF = ".gguf"
_OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz")
_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
_LFS = b"version https://git-lfs.github.com/spec/"
"""So begins a text that Git LFS leaves in place of a large file."""
_MOST_HEADER_BYTES = 100 << 20
"""safetensors allows no longer header."""
_ZIP = b"PK\x03\x04"
"""So begins what torch.save has written since PyTorch 1.6."""
_SHOWN = 3
_AGAIN = "get the files again"
_WHOLE = "give the folder or hub id of a whole model with safetensors weights"


def is_gguf(name: str) -> bool:
    """Returns whether a file, by its name, holds a model for llama.cpp."""
    return name.lower().endswith(_GGUF)


def about_gguf(what: str) -> str:
    """Returns a sentence on a model that is there as GGUF alone. what: how it begins."""
    return (
        f"model.source: {what} in GGUF, the format of llama.cpp, which cannot be trained; give the "
        "folder or hub id of the model from which it was made, with safetensors weights."
    )


def refuse_no_model(source: str, path: Path | None) -> None:
    """Raises ModelError where `path`, which `source` names on this machine, is neither a folder
    with a configuration nor a configuration file, and where `source` names a GGUF file, even one
    that is not there.
    """
    if is_gguf(source) and (path is None or not path.is_dir()):
        raise ModelError(about_gguf(f"{source} is a file"))
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
                f"model.source: {source} is a file; give a Hugging Face model folder or a hub id."
            )
        return
    names = _names(path)
    if CONFIG not in names:
        _refuse_adapter(source, path, names)
        if any(map(is_gguf, names)):
            raise ModelError(about_gguf(f"{source} has its weights"))
        raise ModelError(
            f"model.source: {source} has no {CONFIG}; give a Hugging Face model folder."
        )


def refuse_no_weights(source: str, path: Path | None) -> None:
    """Raises ModelError, in one sentence, where the folder `path`, which `source` names on this
    machine, lacks weights that can be loaded, or has a part of them alone. Pickled weights are not
    opened.
    """
    if path is None or not path.is_dir():
        return
    names = _names(path)
    if CONFIG in names and not _is_object(path / CONFIG):
        return  # reading the configuration says what is wrong with it
    files = weight_files(names, lambda name: (path / name).read_text(encoding="utf-8"))
    if not files:
        _refuse_adapter(source, path, names)
        raise ModelError(_without_weights(source, names))
    lacking = [name for name in files if not (path / name).is_file()]
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
        return isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError, RecursionError):
        return False


def _refuse_adapter(source: str, path: Path, names: Collection[str]) -> None:
    """Raises ModelError for a folder with an adapter and no model of its own."""
    if ADAPTER_CONFIG not in names:
        return
    base = "its base model"
    try:
        settings = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        base = f"{settings['base_model_name_or_path']}, its base model"
    except (OSError, ValueError, LookupError, TypeError):
        pass  # the sentence can do without its name
    raise ModelError(
        f"model.source: {source} holds an adapter and no whole model; set model.source to {base}, "
        "and to go on with the adapter set train.method to lora and model.start_from to this "
        "folder."
    )


def _without_weights(source: str, names: Collection[str]) -> str:
    """Returns what is said of a folder in which nothing says where its weights are."""
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
    with file.open("rb") as opened:
        begin = opened.read(len(_LFS))
        if begin == _LFS:
            return (
                "is a pointer of Git LFS in place of the weights; run `git lfs pull` in its folder"
            )
        if file.suffix == ".bin":
            return _wrong_of_pickled(file, begin)
        length = int.from_bytes(begin[:8], "little")
        if length > _MOST_HEADER_BYTES and size >= 8:
            return f"is no file of safetensors; {_AGAIN}"
        if size < 8 + length:
            return f"is cut off: it ends after {size:,} bytes; {_AGAIN}"
        opened.seek(8)
        return _wrong_of_header(opened.read(length), size)


def _wrong_of_header(header: bytes, size: int) -> str:
    """Returns what the header of a file of safetensors, of `size` bytes, tells that is wrong."""
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name[:2] != "__"]
        whole = 8 + len(header) + max(ends, default=0)
        has_weights = bool(ends)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return f"is no file of safetensors; {_AGAIN}"
    if size < whole:
        return f"is cut off: it has {size:,} of {whole:,} bytes; {_AGAIN}"
    return "" if has_weights else f"holds no weights; {_AGAIN}"


def _wrong_of_pickled(file: Path, begin: bytes) -> str:
    """Returns what is wrong with a file of torch.save as far as its ends tell. Another form than an
    archive has sentences of its own where it is opened (`engine.stored.pickled`).
    """
    if begin.startswith(_ZIP) and not zipfile.is_zipfile(file):
        return f"is cut off; {_AGAIN}"
    return ""
