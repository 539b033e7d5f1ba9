"""These functions read a model's configuration, tokenizer and generation settings from a folder,
from the hub's cache or from the hub.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from engine.errors import ModelError, first_line
from engine.machine.short_memory import refuse_short_memory
from engine.model.build.config_file import is_of_a_field, refuse_broken, why_refused
from engine.model.build.library import hub_is_cut_off, transformers
from engine.model.hub.hub import is_fetched
from engine.model.hub.hub_cache import cached_config
from engine.model.hub.local_weights import refuse_no_model, refuse_no_path
from engine.model.hub.missing_files import refuse_missing_files
from engine.model.hub.model_files import refuse_unlike_files
from engine.paths import resolve_source


def load_config(source: str) -> Any:
    """Returns the model's configuration, from a local folder or the hub.

    Raises ModelError, in one sentence, where there is none that can be read.
    """
    path = resolve_source(source)
    refuse_no_model(source, path)
    file = cached_config(source)
    if path is not None:
        file = path / "config.json" if path.is_dir() else path
        refuse_broken(file, transformers().CONFIG_MAPPING)
    elif file is not None:
        refuse_unlike_files(file.parent)
    try:
        return transformers().AutoConfig.from_pretrained(
            str(path or source),
            trust_remote_code=False,
            local_files_only=path is None and _asks_nobody(source),
        )
    except Exception as error:
        refuse_short_memory(error, "while the model's configuration was read")
        # The library raises many kinds of errors. All mean that this source cannot be used.
        if path is None and not is_of_a_field(error):
            refuse_missing_files(source, weights=False)
            raise ModelError(
                f"model.source: {source!r} is neither a local folder nor a model that the hub gave "
                f"({first_line(error)}); check the name or your connection."
            ) from error
        raise ModelError(
            f"model.source: {file or source} cannot be used: {why_refused(file, error)}."
        ) from error


def with_vocabulary(config: Any, tokens: int) -> Any:
    """Returns a copy of a configuration of transformers for a vocabulary of `tokens` tokens."""
    grown = copy.deepcopy(config)
    grown.get_text_config().vocab_size = tokens
    return grown


def load_tokenizer(source: str) -> Any:
    """Returns the model's tokenizer, from a local folder or the hub.

    Raises ModelError, in one sentence, where there is none that can be read.
    """
    path = resolve_source(source)
    refuse_no_path(source, path)
    refuse_unlike_files(_folder_of(source, path))
    try:
        return transformers().AutoTokenizer.from_pretrained(
            str(path or source),
            trust_remote_code=False,
            local_files_only=path is None and _asks_nobody(source),
        )
    except Exception as error:
        refuse_short_memory(error, "while the tokenizer was read")
        refuse_missing_files(source, weights=False)
        # The library raises many kinds of errors. All mean that there is no usable tokenizer.
        raise ModelError(
            f"model.source: the tokenizer of {source} cannot be loaded ({first_line(error)}); give "
            "a folder or Hugging Face id that has one."
        ) from error


def load_generation_config(source: str) -> Any | None:
    """Returns the model's optional generation settings.

    Returns None if the model has no such settings, or if the hub does not answer. Raises ModelError
    for settings that are no file, or no JSON.
    """
    path = resolve_source(source)
    refuse_unlike_files(_folder_of(source, path))
    try:
        return transformers().GenerationConfig.from_pretrained(
            str(path or source), local_files_only=path is None and _asks_nobody(source)
        )
    except Exception as error:  # noqa: BLE001  the library raises many kinds, also of connections
        refuse_short_memory(error, "while the generation settings were read")
        return None


def ids_of_end(owner: Any) -> list[int]:
    """Returns the ids of the tokens that end an answer by a configuration or by a tokenizer, which
    has one of them, several or none.
    """
    value = getattr(owner, "eos_token_id", None)
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _folder_of(source: str, path: Path | None) -> Path | None:
    """Returns where the files of a model are on this machine; None where they are not."""
    cached = cached_config(source) if path is None else None
    return path if cached is None else cached.parent


def _asks_nobody(source: str) -> bool:
    """Returns whether to read only the cache, because the files were fetched before or the hub
    cannot be reached.
    """
    return is_fetched(source) or hub_is_cut_off()
