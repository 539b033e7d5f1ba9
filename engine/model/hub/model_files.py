"""The small files in a model's folder, which may come from a stranger: a pipe, a device, a folder
or a file of gigabytes under the name of one is found before a library opens it.

Links are followed to where the model is, since the hub's cache consists of them, and no further.
No torch is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine import safe_files
from engine.errors import ModelError
from engine.safe_files import MEDIUM, SMALL, FileFault

CONFIG = "config.json"
GENERATION = "generation_config.json"
TEMPLATES = "additional_chat_templates"
"""Name of the folder in which transformers reads each .jinja."""
_SETTINGS = re.compile(
    r"((generation_|processor_|preprocessor_|video_preprocessor_|audio_tokenizer_|adapter_)?config"
    r"|config\..+|modelcard)\.json|chat_template\.json|.+\.jinja"
)
"""Names of small files that transformers reads."""
_TABLES = re.compile(
    r"tokenizer.*|(special_tokens_map|added_tokens|((entity|target)_)?vocab.*|emoji|byte_maps"
    r"|tekken|normalizer|word_pronunciation|word_shape)\.json|(merges|vocab|dict)\.txt"
    r"|.+\.(model|tokenizer|tiktoken|codes|spm|index\.json)"
)
"""Names of further files that transformers reads: tables of tokens, and of tensors."""
_WEIGHTS = re.compile(r".+\.safetensors|pytorch_model.*\.bin")
_BLOB = re.compile(r"(.*/)?models--[^/]+/blobs/([0-9a-f]{40}|[0-9a-f]{64})")
"""Paths under which the hub's cache keeps the files of a model, by their hashes."""


def most_bytes(name: str) -> int | None:
    """Returns how many bytes the file of this name may have; None for one that is not read here."""
    if _SETTINGS.fullmatch(name):
        return SMALL
    return MEDIUM if _TABLES.fullmatch(name) else None


def read_small(file: Path) -> bytes:
    """Returns the content of a model's small file. Raises OSError, and FileFault."""
    return safe_files.read_linked(file, most_bytes(file.name) or SMALL)


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object that a model's small file holds as JSON. Raises OSError, and FileFault."""
    found: dict[str, Any] = safe_files.decoded(file, read_small(file), dict[str, Any])
    return found


def refuse_unlike_files(path: Path | None) -> None:
    """Raises ModelError, in one sentence, if in the folder `path` of a model a name that
    transformers reads is no file, is far too large for what it holds or leads elsewhere
    (`refuse_links_elsewhere`), or if the settings of answers are no JSON. `path` may be one such
    file, or None for a model that is not here.
    """
    if path is None:
        return
    try:
        files = [file for file in _files(path) if most_bytes(file.name) is not None]
        for file in files:
            safe_files.refuse_unlike_files(file, most_bytes(file.name) or SMALL)
        if path.is_dir():
            refuse_links_elsewhere(path, [file for file in files if file.exists()])
        for file in files:
            if file.name == GENERATION and file.exists():
                read_object(file)
    except FileFault as fault:
        text = str(fault).rstrip(".")
        raise ModelError(f"model.source: {text}; get the files of the model again.") from None
    except OSError:
        pass  # reading it reports what is wrong


def refuse_links_elsewhere(folder: Path, files: Iterable[Path]) -> None:
    """Raises ModelError if one of these `files` of a model's folder is a link, or is reached by
    one, that leads elsewhere than to where the model is: its folder, one in which its configuration
    or its weights really lie, or the hub's cache. A stranger's link could lead to any file of this
    account. Raises OSError where a folder cannot be listed.
    """
    own = folder.resolve()
    beside: set[Path] | None = None
    for file in files:
        real = file.resolve()
        if own in real.parents or _BLOB.fullmatch(real.as_posix()):
            continue
        if beside is None:  # most models have no such link
            others = _real_folders(folder)
            beside = others | {other / TEMPLATES for other in others}
        if real.parent not in beside:
            raise ModelError(
                f"model.source: {file} is a link to a file outside of the model's folder, and "
                "would be copied into the export; put the file itself there, or remove the link."
            )


def _real_folders(folder: Path) -> set[Path]:
    """Returns where the configuration and the weights of a model really lie. What is neither of
    them by its content or by its name does not count.
    """
    found = set()
    for file in folder.iterdir():
        real = file.resolve()
        if _WEIGHTS.fullmatch(real.name) or (file.name == CONFIG and _is_config(file)):
            found.add(real.parent)
    return found


def _is_config(file: Path) -> bool:
    try:
        return isinstance(read_object(file).get("model_type"), str)
    except OSError:
        return False


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.iterdir())
    templates = path / TEMPLATES
    return found + (sorted(templates.iterdir()) if templates.is_dir() else [])
