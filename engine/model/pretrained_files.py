"""Configuration, tokenizer and generation settings of a model, read from a folder, the cache or the
hub.
"""

from __future__ import annotations

from typing import Any

from engine.errors import ModelError, first_line
from engine.model.hub import is_fetched
from engine.model.library import hub_is_cut_off, transformers
from engine.paths import resolve_source


def load_config(source: str) -> Any:
    """The model's configuration, from a local folder or the hub. Raises ModelError in one sentence."""
    path = resolve_source(source)
    if path is not None and path.is_dir() and not (path / "config.json").exists():
        raise ModelError(
            f"model.source: {source} has no config.json; give a Hugging Face model folder."
        )
    if path is not None and not path.is_dir() and path.suffix != ".json":
        raise ModelError(
            f"model.source: {source} is a file; give a Hugging Face model folder or a hub id."
        )
    try:
        return transformers().AutoConfig.from_pretrained(
            str(path or source),
            trust_remote_code=False,
            local_files_only=path is None and _asks_nobody(source),
        )
    except (
        Exception
    ) as error:  # the library raises many kinds; all mean that this source cannot be used
        if path is None:
            raise ModelError(
                f"model.source: {source!r} is neither a local folder nor a model that the hub gave "
                f"({first_line(error)}); check the name or your connection."
            ) from error
        raise ModelError(
            f"model.source: the configuration in {source} cannot be read ({first_line(error)})."
        ) from error


def load_tokenizer(source: str) -> Any:
    """The model's tokenizer, from a local folder or the hub. Raises ModelError in one sentence."""
    path = resolve_source(source)
    try:
        return transformers().AutoTokenizer.from_pretrained(
            str(path or source),
            trust_remote_code=False,
            local_files_only=path is None and _asks_nobody(source),
        )
    except (
        Exception
    ) as error:  # the library raises many kinds; all mean that there is no usable tokenizer
        raise ModelError(
            f"model.source: the tokenizer of {source} cannot be loaded ({first_line(error)}); give "
            "a folder or hub id that has one."
        ) from error


def _asks_nobody(source: str) -> bool:
    return is_fetched(source) or hub_is_cut_off()


def load_generation_config(source: str) -> Any | None:
    """The model's generation config; None where it has none, or where the hub does not answer: it
    is optional.
    """
    path = resolve_source(source)
    try:
        return transformers().GenerationConfig.from_pretrained(
            str(path or source), local_files_only=path is None and _asks_nobody(source)
        )
    except Exception:  # the library raises many kinds, those of connections among them
        return None
