"""The tokenizer of an export, so that it is read again as it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine import safe_files
from engine.errors import ModelError
from engine.model.build.pretrained_files import load_tokenizer

_CONFIG = "tokenizer_config.json"
_AS_IT_IS = "PreTrainedTokenizerFast"
"""Class of tokenizers that are what tokenizer.json says."""


def write_tokenizer(tokenizer: Any, folder: Path) -> Any | None:
    """Writes a tokenizer into a folder, and returns it as it is read from there; None if it cannot
    be read.

    Some classes of transformers put it together anew when they read it, and leave out what they did
    not write: that of Llama 2 where spaces are put before texts. Such a folder names the class that
    takes tokenizer.json as it is.
    """
    tokenizer.save_pretrained(folder)
    try:
        read = load_tokenizer(str(folder))
    except ModelError:
        return None
    if _steps(read) == _steps(tokenizer):
        return read
    config = safe_files.read_json(folder / _CONFIG, folder, dict[str, Any], safe_files.MEDIUM)
    text = json.dumps(config | {"tokenizer_class": _AS_IT_IS}, indent=2, ensure_ascii=False)
    safe_files.write_whole(folder / _CONFIG, text + "\n", folder, durable=False)
    return load_tokenizer(str(folder))


def _steps(tokenizer: Any) -> tuple[str, ...]:
    """Returns what is done to a text before it is merged."""
    backend = tokenizer.backend_tokenizer
    return repr(backend.normalizer), repr(backend.pre_tokenizer)
