"""Whether a run's model can be a GGUF file, by its files on this machine, before it is exported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine import safe_files
from engine.model.hub.hub_cache import cached_config
from engine.paths import resolve_source
from engine.training.export.gguf_known import FAMILIES, OTHER_TOKENIZER, kind_of_tokenizer


@dataclass(frozen=True)
class GgufForecast:
    """What is known before an export."""

    why_not: str = ""
    """Why there is no GGUF file of the model; empty if there is one, or nobody knows."""
    is_read: bool = True
    """llama.cpp reads texts as the model's tokenizer does, as far as is known."""


def forecast(source: str) -> GgufForecast:
    """Returns what is known of a model of this `source`. A file that cannot be read tells nothing:
    the export will say.
    """
    folder = _folder_of(source)
    if folder is None:
        return GgufForecast()
    tokenizer = _read(folder, "tokenizer.json")
    try:
        is_read = tokenizer is None or kind_of_tokenizer(tokenizer) is not None
    except (LookupError, TypeError, AttributeError):
        is_read = True
    if not is_read:
        return GgufForecast(OTHER_TOKENIZER, is_read)
    family = (_read(folder, "config.json") or {}).get("model_type")
    if isinstance(family, str) and family not in FAMILIES:
        return GgufForecast(
            f"Models of the family {family} are not written as GGUF files here. Export a folder, "
            "and convert it by convert_hf_to_gguf.py of llama.cpp."
        )
    return GgufForecast()


def _folder_of(source: str) -> Path | None:
    path = resolve_source(source.strip())
    if path is not None:
        return path if path.is_dir() else None
    file = cached_config(source.strip())
    return None if file is None else file.parent


def _read(folder: Path, name: str) -> dict[str, Any] | None:
    """Returns a file of a model, which is a link in the cache of the hub."""
    try:
        content = msgspec.json.decode(safe_files.read_linked(folder / name, safe_files.MEDIUM))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
