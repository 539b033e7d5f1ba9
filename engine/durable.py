"""What folders share that must still be right after a crash: checksums, and entries that are on the disk."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def new_digest() -> Any:
    """Of a file's content, piece by piece; its `hexdigest()` is what a manifest keeps."""
    return hashlib.blake2b(digest_size=16)


def checksum_of(content: bytes) -> str:
    """The same of content that is at hand."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def body_checksum(body: dict[str, Any]) -> str:
    """Checksum of a manifest without its own."""
    return checksum_of(json.dumps(body, sort_keys=True).encode())


def sync_folder(path: Path) -> None:
    """Returns when the entries of a folder are on the disk: names that were made, renamed or removed. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
