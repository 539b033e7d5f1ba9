"""Results that take long to compute are kept in files of the cache folder. Each is named by a
digest of everything that decides it.

A file that is unreadable counts as missing. If the folder cannot be written to, nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine import safe_files
from engine.paths import cache_folder

OURS = re.compile(r"[0-9a-f]{64}\.json|\..+")
"""Names of these files, and of those that a process left behind that ended while it wrote one."""
_MOST_BYTES = 1 << 20


class KeptFiles:
    """The files of one folder in the cache folder, `most` of them.

    `sources` returns digests of the code and of the data that decide every result, and raises
    OSError if these cannot be read. This process runs what they were when the object was made.
    """

    def __init__(self, folder: str, most: int, sources: Callable[[], Sequence[str]]):
        self.folder = folder
        self.most = most
        self.sources = sources
        self.first = self._sources_now()

    def key(self, deciding: Sequence[Any]) -> str | None:
        """Returns the name of the result that `deciding` and the sources decide; None if these
        could not be read.
        """
        if self.first is None:
            return None
        return hashlib.sha256(msgspec.json.encode([*deciding, self.first])).hexdigest()

    def read(self, key: str) -> bytes | None:
        """Returns the content of a file. It is then the last to be removed."""
        try:
            file = self._file(key)
            content = safe_files.read_bytes(file, file.parent, _MOST_BYTES)
        except (OSError, RuntimeError):
            return None
        with contextlib.suppress(OSError):
            os.utime(file, follow_symlinks=False)
        return content

    def keep(self, key: str, content: bytes) -> None:
        """Writes a file atomically, unless its sources were edited since this process read them."""
        if self._sources_now() != self.first:
            return
        try:
            file = self._file(key)
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            safe_files.write_whole(file, content, file.parent, durable=False)
            safe_files.remove_oldest(file.parent, OURS, self.most)
        except (OSError, RuntimeError):
            return

    def _file(self, key: str) -> Path:
        """Returns the file for a key. Raises RuntimeError if the user has no home folder."""
        return cache_folder() / self.folder / f"{key}.json"

    def _sources_now(self) -> list[str] | None:
        try:
            return list(self.sources())
        except OSError:
            return None
