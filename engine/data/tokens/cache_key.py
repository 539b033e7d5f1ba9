"""The key of a data set's tokens covers everything that determines them: the same key means
bit-identical tokens.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

from engine.config.data_settings import DataConfig
from engine.data.sources.folders import files_of
from engine.data.sources.registry import registered
from engine.files import code_digest
from engine.paths import registry_entry, resolve_source

_BYTES_HASHED = 64 << 20
"""Largest total size in bytes of the files of a source that are identified by their content. Larger
ones are identified by size, times and inode.
"""
LIBRARIES = (
    "datasets",
    "jinja2",
    "msgspec",
    "openpyxl",
    "pyarrow",
    "tokenizers",
    "transformers",
)
"""Libraries that read rows, write them by templates, and make tokens of them. Python's own tables
of letters divide texts as well.
"""
ROOMS = ("config", "data")
"""Packages and single files of the engine whose code makes tokens. A test walks the imports."""

Identity = list[Any]
"""JSON values that identify the content of a source."""


def identity_of(config: DataConfig) -> tuple[Identity, bool]:
    """Returns the identity of the source of `config`, and whether it is complete: the content of a
    data set on the hub is known only once it is open (`Source.fingerprint`). Raises DataError for a
    source that cannot be used.
    """
    entry = registered(config)
    named = registry_entry(config.only_source)
    if entry is not None and named is not None:
        registry, name = named
        inner, whole = identity_of(entry.config)
        return ["registry", name, _content(registry), inner], whole
    path = resolve_source(config.only_source)
    if path is None:
        return ["hub", config.source, config.split], False
    return ["files", path.name, config.split if path.is_dir() else "", *_files(path, config)], True


def _files(path: Path, config: DataConfig) -> list[Identity]:
    """Returns [name, digest or state] for each file of a source on this machine."""
    root = path if path.is_dir() else path.parent
    files = files_of(path, config)
    hashed = sum(file.stat().st_size for file in files) <= _BYTES_HASHED
    found: list[Identity] = []
    for file in files:
        name = str(file.relative_to(root))
        found.append([name, _content(file) if hashed else _state(file)])
    return found


def key_of(identity: Identity, config: DataConfig, tokenizer: Any) -> str:
    """Returns the key under which the tokens of a source are kept. Weights, packing, order and seed
    are not part of it: they only choose among existing tokens.
    """
    settings = [
        config.format,
        config.columns.named(),
        config.max_seq_len,
        config.train_on,
        config.dropped_turns,
        config.typed_tokens,
        config.add_tokens,
        config.roles,
        config.unused_flags,
        config.long_texts,
        config.overlap,
        config.eval_fraction,
        config.reads,
    ]
    return _digest([identity, settings, _tokenizer(tokenizer), PROGRAM])


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _state(path: Path) -> list[Any]:
    # A program can reset the modification time of the content (mtime), but not that of the inode
    # (ctime).
    found = path.stat()
    return [
        str(path.resolve()),
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
        found.st_ino,
        found.st_dev,
    ]


def _tokenizer(tokenizer: Any) -> Identity:
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    tree["truncation"] = None  # both are left over from an earlier use of the tokenizer
    tree["padding"] = None
    return [
        type(tokenizer).__name__,
        _digest(tree),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
    ]


def _code() -> Identity:
    versions = [_version(name) for name in LIBRARIES]
    return [code_digest(ROOMS), list(sys.version_info[:2]), *versions]


def _version(library: str) -> str | None:
    """Returns the version of a library, or None where it is not installed: a run whose tokens are
    made otherwise, as benches do, needs no reader of rows.
    """
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(value: Any) -> str:
    # `os.fsencode` also accepts file names that are not valid Unicode.
    return hashlib.blake2b(os.fsencode(json.dumps(value, default=str)), digest_size=20).hexdigest()


PROGRAM = _code()
"""Identity of the code that makes tokens, that of `ROOMS` and of the libraries, as this process
loaded it. A newer version never reuses the tokens of an older one.
"""
