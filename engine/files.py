"""Files and folders: whether a disk has space, and how a file is written so that it is there after
a power failure, whole or not at all. No torch.
"""

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
    """Returns when the entries of a folder are on the disk: names that were made, renamed or
    removed. Raises OSError, but not where the file system has no such call for folders: it then
    does what it can by itself.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def disk_free(path: str | os.PathLike[str]) -> int:
    """Bytes that this user may still write at `path` or, where it does not exist, at its nearest
    existing parent.
    """
    place = Path(path).expanduser().absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full_in_words(error: OSError) -> str:
    """The beginning of a sentence."""
    return "The disk quota is used up" if error.errno == errno.EDQUOT else "The disk is full"


def write_synced(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file whose content is on the disk when this returns; its name is once the folder is
    synced. Raises OSError.
    """
    with open(path, "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def write_whole(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Write a file so that whoever reads it finds the old content or the new one, and after a power
    failure the new one. `durable=False` is for what may be lost then: it waits for no disk. Raises
    OSError; nothing is left beside the file.
    """
    partial = path.with_name(f".{path.name[:40]}.{uuid.uuid4().hex[:8]}.partial")
    try:
        write_synced(partial, content.encode() if isinstance(content, str) else content, durable)
        partial.replace(path)
        if durable:
            sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def file_size(path: Path) -> int:
    """Bytes; 0 where there is no file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
