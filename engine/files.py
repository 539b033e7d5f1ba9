"""Checksums of files, the free space on a disk, and what a folder takes.

How files are written is in `engine.safe_files`. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_DIGEST_BYTES = 16


def new_digest() -> Any:
    """Returns a new BLAKE2b hash, to be updated with a file's content chunk by chunk.

    A manifest stores its `hexdigest()`.
    """
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def checksum_of(content: bytes) -> str:
    """Returns the checksum that `new_digest` would give for content that is completely in
    memory.
    """
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def body_checksum(body: dict[str, Any]) -> str:
    """Returns the checksum of a manifest's `body`: all of its values except that checksum."""
    return checksum_of(json.dumps(body, sort_keys=True).encode())


def code_digest(rooms: Iterable[str]) -> str:
    """Returns a digest of the names and contents of the files of these packages of the engine and
    of the packages in them, and of its single files. What is kept under it is not found by a
    version that makes it otherwise.

    Raises OSError if a file cannot be read.
    """
    engine = Path(__file__).parent
    found = new_digest()
    names: list[str] = []
    for folder in (engine, *(engine / room for room in rooms)):
        for place, folders, files in os.walk(folder):
            if folder == engine:
                folders.clear()
            names += [str(Path(place, name)) for name in files if name.endswith(".py")]
    for name in sorted(names):
        content = Path(name).read_bytes()
        found.update(f"{name[len(str(engine)) :]} {len(content)}\n".encode() + content)
    return found.hexdigest()


def disk_free(path: str | os.PathLike[str]) -> int:
    """Returns how many bytes this user may still write at `path` or, if it does not exist, at its
    nearest existing parent.
    """
    return shutil.disk_usage(existing_part(path)).free


def on_one_disk(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> bool:
    """Returns whether what is written at these two paths takes the space of the same disk."""
    one, other = (existing_part(path).stat().st_dev for path in (first, second))
    return one == other


def existing_part(path: str | os.PathLike[str]) -> Path:
    """Returns a path or, if it does not exist, its nearest parent that does."""
    place = Path(path).expanduser().absolute()
    while not place.exists():
        place = place.parent
    return place


def nameless_file(folder: str | os.PathLike[str], flags: int = 0) -> int:
    """Returns the descriptor of a new file without a name, which is gone when it is closed."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    # Some file systems have no files without a name, but a file may lose the one that it has.
    descriptor, path = tempfile.mkstemp(prefix=".ramstream-", dir=folder)
    os.close(descriptor)
    try:
        return os.open(path, os.O_RDWR | flags)
    finally:
        Path(path).unlink()


def takes_direct_access(path: str | os.PathLike[str]) -> bool | None:
    """Returns whether files at `path`, or at its nearest existing parent, can be written past the
    page cache (O_DIRECT); None where this user can write none.
    """
    try:
        place = existing_part(path)
        return _takes_direct_access(place, place.stat().st_dev)
    except OSError:
        return None


@functools.cache
def _takes_direct_access(place: Path, _disk: int) -> bool | None:
    """Tries it once for each folder and the disk that it is on."""
    try:
        os.close(nameless_file(place, os.O_DIRECT))
    except OSError as error:
        return False if error.errno in (errno.EINVAL, errno.EOPNOTSUPP) else None
    return True


FULL = (errno.ENOSPC, errno.EDQUOT)
"""The system's error numbers for a full disk and for an exhausted quota."""


def disk_full_text(error: OSError) -> str:
    """Returns the beginning of a sentence on which error in FULL occurred."""
    return "The disk quota is used up" if error.errno == errno.EDQUOT else "The disk is full"


def open_to_others(folder: Path) -> None:
    """Gives the files in `folder` the mode that any new file gets there, from the umask or from the
    folder's access list.

    Libraries that write a file under another name first, such as safetensors, make it readable by
    its owner alone. Raises OSError.
    """
    # Asking for the umask would change it for a moment, in every thread.
    trial = folder / f".{uuid.uuid4().hex}.mode"
    trial.touch(exist_ok=False)
    mode = stat.S_IMODE(trial.stat().st_mode)
    trial.unlink()
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def file_size(path: Path) -> int:
    """Returns the size of a file in bytes, or 0 if there is no file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def bytes_in(folder: Path) -> int:
    """Returns the bytes that the files in a folder take on the disk. Of a file that has several
    names (hard links), each name has a share. Files that go away meanwhile do not count, and links
    lead nowhere.
    """
    total = 0.0
    waiting = [] if folder.is_symlink() else [folder]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
                    else:
                        file = entry.stat(follow_symlinks=False)
                        total += file.st_size / max(1, file.st_nlink)
    return round(total)
