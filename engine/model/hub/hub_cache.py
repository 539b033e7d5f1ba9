"""The files of a model in this machine's Hugging Face cache.

No network request is made, and no torch is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
from msgspec import Struct

from engine.model.hub.model_files import CONFIG, read_small
from engine.safe_files import read_linked

_LONGEST_REVISION = 1000
_MOST_FILES = 10_000
"""Largest number of files with the weights of a model."""


def cached_config(source: str) -> Path | None:
    """Returns the configuration of this model in the Hugging Face cache, or None.

    It takes precedence over the catalog, and reading it needs no network.
    """
    model = cache_folder() / f"models--{source.strip().replace('/', '--')}"
    try:
        revision = read_linked(model / "refs" / "main", _LONGEST_REVISION).decode().strip()
    except (OSError, ValueError):  # unreadable, not text, or not a valid file name
        return None
    file = model / "snapshots" / revision / CONFIG
    return file if file.is_file() else None


def cache_folder() -> Path:
    """Returns the folder of huggingface_hub's cache.

    The cache is documented at https://huggingface.co/docs/huggingface_hub/guides/manage-cache. The
    library's own functions take longer to import than a bundled shape takes to answer.
    """
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not given:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
        given = f"{home}/hub"
    return Path(os.path.expandvars(given)).expanduser()


def is_offline() -> bool:
    """Returns whether huggingface_hub is set to offline mode."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def cached_weights(source: str) -> Path | None:
    """Returns the folder in the hub's cache that has all weights of a model, or None."""
    files = cached_files(source)
    found = weight_files(files, lambda name: read_small(files[name]))
    return files[CONFIG].parent if found and files.keys() >= set(found) else None


def cached_files(source: str) -> dict[str, Path]:
    """Returns the cached files of a model, by their names in the model's folder.

    The result is empty if the model's configuration is not in the cache.
    """
    config = cached_config(source)
    if config is None:
        return {}
    folder = config.parent
    try:
        files = [path for path in folder.rglob("*") if path.is_file()]
    except OSError:
        return {}
    return {path.relative_to(folder).as_posix(): path for path in files}


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Index that lists the weight files when the weights are split into several files."""
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
"""Names of weights that `torch.save` wrote. They are read where there are no safetensors."""
LISTED = (WEIGHTS, INDEX, PICKLED, PICKLED_INDEX)
"""Files of which the first that a folder has lists its weights."""


class _Config(Struct):
    """What is used of a configuration."""

    transformers_weights: str | None = None


class _Index(Struct):
    """What is used of an index."""

    weight_map: dict[str, str]


def weight_files(names: Collection[str], read: Callable[[str], bytes]) -> list[str]:
    """Returns the files from which transformers reads a model's weights.

    `names` are the names of the files in the model's folder, and `read` returns the content of one.
    An index comes first, followed by the files that it lists. The result is empty if the folder has
    no weights, or if its index names files outside of it or more than any model has.
    """
    try:
        config = read(CONFIG) if CONFIG in names else b"{}"
        own = msgspec.json.decode(config, type=_Config).transformers_weights
        wanted = [own] if own else LISTED
        there = [name for name in wanted if name in names]
        if not there:
            return []
        first = there[0]
        if not first.endswith(".json"):
            return [first]
        listed = sorted(set(msgspec.json.decode(read(first), type=_Index).weight_map.values()))
        # A stranger's index may name files elsewhere.
        outside = [name for name in listed if ".." in Path(name).parts or Path(name).is_absolute()]
        return [] if outside or len(listed) > _MOST_FILES else [first, *listed]
    except (OSError, ValueError, RecursionError):
        # Transformers would not read such a file either.
        return []
