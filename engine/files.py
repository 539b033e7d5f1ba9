"""Files and folders: whether a disk has room, and how a file is written so that it is there after a power failure, whole or
not at all. No torch."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
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


def disk_free(path: str | os.PathLike[str]) -> int:
    """Bytes that this user may still write at `path` or, where it does not exist, at its nearest existing parent."""
    place = Path(path).expanduser().absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full_in_words(error: OSError) -> str:
    """The beginning of a sentence."""
    return "The disk quota is used up" if error.errno == errno.EDQUOT else "The disk is full"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever reads it, even after a crash, finds the old text or the new one. Raises OSError."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def file_size(path: Path) -> int:
    """Bytes; 0 where there is no file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
