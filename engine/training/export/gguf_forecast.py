"""Whether a run's model can be a GGUF file, by its files on this machine, before it is exported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine import safe_files
from engine.model.hub.hub_cache import cached_config
from engine.paths import resolve_source
from engine.training.export.gguf_known import FAMILIES, kind_of_tokenizer, refusal_of_tokenizer

_CONVERT = "Export a folder; its commands then say how llama.cpp converts it."


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
    if tokenizer is not None and not is_read:
        return GgufForecast(refusal_of_tokenizer(tokenizer), is_read)
    config = _read(folder, "config.json") or {}
    family = config.get("model_type")
    if not isinstance(family, str) or family in FAMILIES:
        return GgufForecast()
    if "text_config" in config:
        return GgufForecast(
            f"Models of the family {family} also read images or sound, and a GGUF file has text "
            f"alone. {_CONVERT}"
        )
    return GgufForecast(
        f"Models of the family {family} are not written as GGUF files here. {_CONVERT}"
    )


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
