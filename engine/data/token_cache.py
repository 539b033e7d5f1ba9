"""Tokens on disk: each source is tokenised once, and every later run with the same data maps the
same files.

A folder in `tokens` of the cache (`RAMSTREAM_CACHE`, or `ramstream` in the user's cache folder)
holds those of one source, under the key of all that determines them (identity.py). It is written
beside, synced, and only then renamed into place, so what has a key for a name was complete once;
sizes and checksums in its manifest tell whether it still is, and one that is not is made again. Two
processes that make the same tokens both succeed, and one folder stays. The least recently used
folders are removed beyond 64 of them or max(10 GiB, a tenth of the disk); what a run has mapped
stays readable.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine import paths
from engine.data.encode import Documents
from engine.data.formats import ColumnMap
from engine.data.mapped import mapped
from engine.errors import DataError
from engine.files import body_checksum, new_digest, sync_folder
from engine.progress import Progress

_MANIFEST, _PROMPTS, _LOCK = "manifest.json", "prompts.jsonl", "lock"
_TYPES = {"ids": np.int32, "trained": np.bool_, "starts": np.int64, "examples": np.int64}
_SIDES = ("train", "eval")
_KEY = re.compile("[0-9a-f]{40}")
_MOST_FOLDERS = 64
_LEAST_BYTES = 10 << 30
_CHUNK_BYTES = 8 << 20
_GRACE_SECONDS = 60.0
"""A younger folder may be one that another process has made and not locked yet."""


@dataclass
class Tally:
    """What reading a source found, beside its tokens."""

    name: str
    columns: ColumnMap
    rows: int = 0
    cut: int = 0
    highest_id: int = -1
    """Of all tokens, -1 without any."""
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: dict[str, str] = field(default_factory=dict)
    """Where the first row was that was skipped for each reason."""
    warnings: Counter[str] = field(default_factory=Counter)

    def count(self, rows: int, cut: int, highest_id: int, warnings: Counter[str]) -> None:
        """Some more rows were read; `cut` of them were too long."""
        self.rows += rows
        self.cut += cut
        self.highest_id = max(self.highest_id, highest_id)
        self.warnings.update(warnings)

    def skip(self, reason: str, where: str) -> None:
        """A row is left out."""
        self.skipped[reason] += 1
        self.first_skipped.setdefault(reason, where)


@dataclass(frozen=True)
class Side:
    """Documents that are trained on, or those that are held out, mapped."""

    ids: np.ndarray
    """int32[tokens]"""
    trained: np.ndarray
    """bool[tokens]"""
    starts: np.ndarray
    """int64[documents + 1]: where each document starts in `ids`."""
    examples: np.ndarray
    """int64[examples + 1]: the first document of each example."""


class StoredTokens:
    """The tokens of one source, mapped from their files: these may be removed meanwhile."""

    def __init__(self, folder: Path, tally: Tally, cached: bool):
        self.tally = tally
        self.cached = cached
        """Whether they were there already."""
        self.train, self.eval = (
            Side(**{name: mapped(folder / f"{side}.{name}", kind) for name, kind in _TYPES.items()})
            for side in _SIDES
        )
        with open(folder / _PROMPTS, "rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0
            self._prompts = None if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def prompts(self) -> Iterator[dict[str, Any]]:
        """Held-out questions as they were written."""
        begin = 0
        while self._prompts is not None and begin < len(self._prompts):
            end = self._prompts.find(b"\n", begin)
            yield json.loads(self._prompts[begin:end])
            begin = end + 1


def cache_folder() -> Path:
    """Where tokens are kept."""
    return paths.cache_folder() / "tokens"


# ---------------------------------------------------------------------- finding


def find(key: str, progress: Progress) -> StoredTokens | None:
    """The tokens under `key`, or None when there are none or they are damaged; these are then
    removed.
    """
    folder = cache_folder() / key
    if not folder.exists():
        return None
    for found in _opened(folder):
        if isinstance(found, StoredTokens):
            return found
        progress(*found)
    _remove(folder)
    return None


def _opened(folder: Path) -> Iterator[tuple[int, int] | StoredTokens]:
    """Rows verified and rows in all, again and again, and the tokens at last; it ends early where
    they are damaged.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        body = manifest["body"]
        files = body["files"]
        sizes = {name: size for name, (size, _) in files.items()}
        if manifest["checksum"] != body_checksum(body) or sizes != {
            n: (folder / n).stat().st_size for n in files
        }:
            return
        done, total, rows = 0, sum(sizes.values()), body["tally"]["rows"]
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        for name, (_, checksum) in files.items():
            digest = new_digest()
            with open(folder / name, "rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])
                    done += count
                    yield rows * done // total, rows
            if digest.hexdigest() != checksum:
                return
        os.utime(folder / _MANIFEST)  # the last use
        yield StoredTokens(folder, _tally(body["tally"]), cached=True)


def _tally(values: dict[str, Any]) -> Tally:
    return Tally(
        **values
        | {
            "columns": ColumnMap(**values["columns"]),
            "skipped": Counter(values["skipped"]),
            "warnings": Counter(values["warnings"]),
        }
    )


# ---------------------------------------------------------------------- writing


class TokenWriter:
    """Writes the tokens of one source. Either `publish` ends it, or leaving the `with` block
    removes all of it.

    What the file system refuses is raised as one DataError that names `name`, the source.
    """

    def __init__(self, name: str):
        self._name = name
        root = cache_folder()
        self._folder = root / f".{uuid.uuid4().hex}.partial"
        self._open = contextlib.ExitStack()
        with self._told():
            root.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(root)
            self._folder.mkdir(mode=0o700)
            lock = self._open.enter_context(open(self._folder / _LOCK, "wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends, however it ends
            self.train, self.eval = (
                SideWriter(self._folder, side, self._open, self._told) for side in _SIDES
            )
            self._prompts = _File(self._folder / _PROMPTS, self._open)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(OSError):  # what a full disk has not taken yet
            self._open.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def prompt(self, document: int, answer: tuple[int, int], asked: str) -> None:
        """A held-out question: its document among the held-out ones, the token range of the answer,
        what was asked.
        """
        line = json.dumps({"document": document, "answer": answer, "asked": asked})
        with self._told():
            self._prompts.write(line.encode() + b"\n")

    def publish(self, key: str | None, tally: Tally) -> StoredTokens:
        """Map what was written and keep it under `key`; without a key, it goes when the run ends."""
        files = {file.name: file for file in (self._prompts, *self.train.files, *self.eval.files)}
        with self._told():
            for file in files.values():
                file.close(synced=key is not None)
            values = asdict(tally)
            body = {
                "key": key,
                "files": {
                    name: [file.bytes, file.digest.hexdigest()] for name, file in files.items()
                },
                "tally": values
                | {"skipped": dict(tally.skipped), "warnings": dict(tally.warnings)},
            }
            made = StoredTokens(self._folder, tally, cached=False)
            if key is not None:
                manifest = _File(self._folder / _MANIFEST, self._open)
                manifest.write(json.dumps({"checksum": body_checksum(body), "body": body}).encode())
                manifest.close(synced=True)
                self._move_into_place(cache_folder() / key)
        return made

    def _move_into_place(self, place: Path) -> None:
        sync_folder(self._folder)
        try:
            os.rename(self._folder, place)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return  # another process was faster with the same tokens
        (place / _LOCK).unlink()
        sync_folder(place.parent)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.__exit__()
            raise DataError(
                f"The tokens of {self._name} cannot be written in {cache_folder()} "
                f"({error.strerror or error}); free some disk space there, or set RAMSTREAM_CACHE "
                "to a folder that has room."
            ) from None


class SideWriter:
    """Appends the documents of one side."""

    def __init__(
        self, folder: Path, side: str, stack: contextlib.ExitStack, told: Callable[[], Any]
    ):
        self._ids, self._trained, self._starts, self._examples = self.files = [
            _File(folder / f"{side}.{name}", stack) for name in _TYPES
        ]
        self._told = told
        self.examples = self.documents = self._tokens = 0
        for file in (self._starts, self._examples):
            file.write(np.zeros(1, np.int64))

    def add(self, found: Documents) -> None:
        """Rows without documents are no examples."""
        if not len(found.lengths):
            return
        counts = found.counts[found.counts > 0]
        with self._told():
            self._ids.write(found.ids)
            self._trained.write(found.trained)
            self._starts.write(self._tokens + np.cumsum(found.lengths))
            self._examples.write(self.documents + np.cumsum(counts))
        self._tokens += len(found.ids)
        self.documents += len(found.lengths)
        self.examples += len(counts)


class _File:
    """A file that knows how long it is and what is in it."""

    def __init__(self, path: Path, stack: contextlib.ExitStack):
        self.name, self.bytes, self.digest = path.name, 0, new_digest()
        self._file = stack.enter_context(open(path, "xb", buffering=_CHUNK_BYTES // 8))

    def write(self, values: np.ndarray | bytes) -> None:
        content = memoryview(
            np.ascontiguousarray(values) if isinstance(values, np.ndarray) else values
        ).cast("B")
        self._file.write(content)
        self.digest.update(content)
        self.bytes += len(content)

    def close(self, synced: bool) -> None:
        self._file.flush()
        if synced:
            os.fsync(self._file.fileno())
        self._file.close()


# ---------------------------------------------------------------------- removing


def remove_old(kept: Collection[str]) -> None:
    """Remove the least recently used tokens beyond the bounds, but none of the keys `kept`."""
    root = cache_folder()
    found = []
    for folder in root.iterdir():
        if not _KEY.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError):
            used = (folder / _MANIFEST).stat().st_mtime
            found.append((used, folder, sum(file.stat().st_size for file in folder.iterdir())))
    found.sort(key=lambda entry: (entry[1].name in kept, entry[0]))
    total, most = (
        sum(size for *_, size in found),
        max(_LEAST_BYTES, shutil.disk_usage(root).total // 10),
    )
    for place, (_, folder, size) in enumerate(found):
        if folder.name in kept or (len(found) - place <= _MOST_FOLDERS and total <= most):
            return
        _remove(folder)
        total -= size


def _remove(folder: Path) -> None:
    """Out of sight at once, so that nobody finds half of it."""
    gone = folder.with_name(f".{uuid.uuid4().hex}.removed")
    with contextlib.suppress(OSError):
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    """What killed processes left."""
    for folder in root.glob(".*.removed"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in root.glob(".*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime < _GRACE_SECONDS:
                continue
            with open(folder / _LOCK, "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its writer lives
                shutil.rmtree(folder, ignore_errors=True)
