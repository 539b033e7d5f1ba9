"""What the Hugging Face cache of this machine holds of a model. It asks no hub. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path


def cached_config(source: str) -> Path | None:
    """The configuration of this model in the Hugging Face cache, or None. It is the truth where it
    differs from the catalog, and reading it needs no network.

    The folders are those of huggingface_hub (its cache is documented at
    https://huggingface.co/docs/huggingface_hub/guides/manage-cache), whose own functions take
    longer to import than a bundled shape takes to answer.
    """
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    hub = Path(os.path.expandvars(own or os.path.join(home, "hub"))).expanduser()
    model = hub / f"models--{source.strip().replace('/', '--')}"
    try:
        revision = (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):  # unreadable, no text, or no name that a file can have
        return None
    file = model / "snapshots" / revision / "config.json"
    return file if file.is_file() else None


def is_offline() -> bool:
    """Whether huggingface_hub was told to ask nobody."""
    return (
        os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    ).upper() in ("1", "ON", "YES", "TRUE")


def cached_weights(source: str) -> Path | None:
    """The folder of the hub's cache that has the whole of a model's weights, or None."""
    files = cached_files(source)
    found = weight_files(files, lambda name: files[name].read_text(encoding="utf-8"))
    return files["config.json"].parent if found and files.keys() >= set(found) else None


def cached_files(source: str) -> dict[str, Path]:
    """What the cache has of a model that has a configuration there, by name in the model's folder."""
    config = cached_config(source)
    try:
        return (
            {}
            if config is None
            else {
                path.relative_to(config.parent).as_posix(): path
                for path in config.parent.rglob("*")
                if path.is_file()
            }
        )
    except OSError:
        return {}


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(names: Collection[str], read: Callable[[str], str]) -> list[str]:
    """The files, of `names` in a model's folder, that its weights are read from, as transformers
    chooses them, with their index; empty where there are no safetensors. `read` gives the text of a
    file that is there.
    """
    try:
        config = json.loads(read("config.json")) if "config.json" in names else {}
        own = config.get("transformers_weights")
        found = next((name for name in ([own] if own else [WEIGHTS, INDEX]) if name in names), None)
        if found is None or not found.endswith(".json"):
            return [] if found is None else [found]
        return [found, *sorted(set(json.loads(read(found))["weight_map"].values()))]
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ):  # no file that transformers would read
        return []
