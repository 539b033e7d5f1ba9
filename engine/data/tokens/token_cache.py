"""Tokens on disk: each source is tokenized once, and every later run with the same data maps the
same files.

- The tokens of one source are stored in a folder below `tokens` in the cache (`RAMSTREAM_CACHE`, or
  `ramstream` in the user's cache folder). The folder's name is its key, which covers everything
  that determines the tokens (`identity.py`).
- A folder is written under another name, synced, and only then renamed. So a folder named by a key
  was complete once. The sizes and checksums in its manifest show whether it still is; a damaged
  folder is made again.
- If two processes make the same tokens, both succeed, and one of the folders is kept.
- When there are more than 64 folders, or more bytes than max(10 GiB, a tenth of the disk), the
  least recently used folders are removed. A run can still read files that it has mapped.
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
import stat
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine import paths, safe_files
from engine.data.formats.formats import ColumnMap
from engine.data.tokens.documents import Documents
from engine.data.tokens.mapped_arrays import WrittenFile, mapped
from engine.errors import DataError
from engine.files import body_checksum, new_digest
from engine.progress import Progress

_MANIFEST = "manifest.json"
_PROMPTS = "prompts.jsonl"
_LOCK = "lock"
_TYPES = {
    "ids": np.int32,
    "loss_mask": np.bool_,
    "starts": np.int64,
    "examples": np.int64,
}
_MORE_TYPES = {"references": np.float64, "weights": np.float32}
"""Files that only some splits have: `references` of answers for preferences, and `weights` of
answers with one in their row.
"""
_NEEDED = {_PROMPTS, *(f"{split}.{name}" for split in ("train", "eval") for name in _TYPES)}
_OPTIONAL = {f"{split}.{name}" for split in ("train", "eval") for name in _MORE_TYPES}
_ONES = 1 << 18
"""Number of weights of 1 that are written at a time."""
_KEY = re.compile("[0-9a-f]{40}")
_LEFT = re.compile(r"\.[0-9a-f]{32}\.(partial|removed)")
_ANY_SIZE = 1 << 62
_MOST_FOLDERS = 64
_LEAST_BYTES = 10 << 30
_CHUNK_BYTES = 8 << 20
_GRACE_SECONDS = 60.0
"""Age in seconds below which a folder is left alone: another process may have just made it and not
locked it yet.
"""


@dataclass
class Tally:
    """Counts of the rows of a source while they are read."""

    name: str
    columns: ColumnMap
    rows: int = 0
    cut: int = 0
    highest_id: int = -1
    """The highest token id, or -1 if there are no tokens."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of rows that were skipped, by reason."""
    first_skipped: dict[str, str] = field(default_factory=dict)
    """The place of the first row that was skipped for each reason."""
    warnings: Counter[str] = field(default_factory=Counter)
    ends: list[str] = field(default_factory=list)
    """Tokens that end the answers of the source, as its rows were written."""

    def count(self, rows: int, cut: int, highest_id: int, warnings: Counter[str]) -> None:
        """Adds a batch of `rows` rows, `cut` of which were too long."""
        self.rows += rows
        self.cut += cut
        self.highest_id = max(self.highest_id, highest_id)
        self.warnings.update(warnings)

    def skip(self, reason: str, where: str) -> None:
        """Counts the row at `where` as skipped."""
        self.skipped[reason] += 1
        self.first_skipped.setdefault(reason, where)


@dataclass(frozen=True)
class Split:
    """Documents of training or of validation, as mapped arrays."""

    ids: np.ndarray
    """The token ids, int32[tokens]."""
    loss_mask: np.ndarray
    """Mask of the tokens that are training targets, bool[tokens]."""
    starts: np.ndarray
    """First token of each document: int64[documents + 1]."""
    examples: np.ndarray
    """Index of the first document of each example: int64[examples + 1]."""
    references: np.ndarray
    """`Document.reference` of the answers of pairs, float64[documents], else empty."""
    weights: np.ndarray
    """`Document.weights` of the tokens, float32[tokens]; empty if all weights are 1."""

    @property
    def holds_pairs(self) -> bool:
        """Whether the documents are answers of pairs."""
        return len(self.references) > 0

    @classmethod
    def mapped_from(cls, folder: Path, split: str) -> Split:
        """Opens the files of `split` ("train" or "eval") in `folder`, mapped."""
        root, arrays = folder.parent, {}
        for name, kind in (_TYPES | _MORE_TYPES).items():
            path = folder / f"{split}.{name}"
            is_left_out = name in _MORE_TYPES and safe_files.lstat(path, root) is None
            arrays[name] = np.zeros(0, kind) if is_left_out else mapped(path, root, kind)
        return cls(**arrays)


class StoredTokens:
    """Tokens of one source, mapped from files. They stay readable after the files are removed.
    `cached`: whether the tokens were in the cache already.
    """

    def __init__(self, folder: Path, tally: Tally, cached: bool):
        self.tally = tally
        self.cached = cached
        self.train = Split.mapped_from(folder, "train")
        self.eval = Split.mapped_from(folder, "eval")
        self._prompts: mmap.mmap | None = None
        with safe_files.open_to_read(folder / _PROMPTS, folder.parent, _ANY_SIZE) as file:
            if os.fstat(file.fileno()).st_size > 0:  # an empty file cannot be mapped
                self._prompts = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def prompts(self) -> Iterator[dict[str, Any]]:
        """Yields the validation questions as `TokenWriter.prompt` wrote them."""
        if self._prompts is None:
            return
        begin = 0
        while begin < len(self._prompts):
            end = self._prompts.find(b"\n", begin)
            yield json.loads(self._prompts[begin:end])
            begin = end + 1


def cache_folder() -> Path:
    """Returns the folder that holds all tokens."""
    return paths.cache_folder() / "tokens"


# ---------------------------------------------------------------------- finding


def find(key: str, progress: Progress) -> StoredTokens | None:
    """Returns the tokens under `key`, or None if there are none. Damaged tokens are removed.
    `progress` receives the number of rows verified.
    """
    folder = cache_folder() / key
    with contextlib.suppress(OSError):
        if safe_files.lstat(folder, folder.parent) is None:
            return None
    for found in _opened(folder):
        if isinstance(found, StoredTokens):
            return found
        progress(*found)
    _remove(folder)
    return None


def _opened(folder: Path) -> Iterator[tuple[int, int] | StoredTokens]:
    """Yields (rows verified, rows in all) repeatedly, then the tokens. If the folder is damaged, it
    ends without yielding tokens.

    It is a generator so that an exception from the caller's progress callback is never mistaken for
    damage.
    """
    root = folder.parent
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        manifest = safe_files.read_json(folder / _MANIFEST, root, _Manifest)
        body = msgspec.convert(manifest.body, _Body)
        files = body.files
        if manifest.checksum != body_checksum(manifest.body) or body.key != folder.name:
            return
        if not _NEEDED <= set(files) <= _NEEDED | _OPTIONAL:
            return
        sizes = {name: size for name, (size, _) in files.items()}
        if sizes != {name: safe_files.size_of(folder / name, root) for name in files}:
            return
        total = sum(sizes.values())
        rows = body.tally.rows
        done = 0
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        for name, (_, checksum) in files.items():
            digest = new_digest()
            with safe_files.open_to_read(folder / name, root, _ANY_SIZE, buffering=0) as file:
                while count := file.readinto(buffer):  # type: ignore[attr-defined]
                    digest.update(buffer[:count])
                    done += count
                    yield rows * done // total, rows
            if digest.hexdigest() != checksum:
                return
        # Records the last use for `remove_old`.
        os.utime(folder / _MANIFEST, follow_symlinks=False)
        yield StoredTokens(folder, _tally(manifest.body["tally"]), cached=True)


class _TallyTypes(msgspec.Struct):
    """Types of a tally in a manifest."""

    name: str
    columns: dict[str, Any]
    rows: int
    cut: int
    highest_id: int
    skipped: dict[str, int]
    first_skipped: dict[str, str]
    warnings: dict[str, int]
    ends: list[str] = []


class _Body(msgspec.Struct):
    """The types of the body of a manifest."""

    key: str
    files: dict[str, tuple[int, str]]
    """The bytes and the checksum of each file."""
    tally: _TallyTypes


class _Manifest(msgspec.Struct):
    """The content of a manifest."""

    checksum: str
    body: dict[str, Any]


def _tally(values: dict[str, Any]) -> Tally:
    """Rebuilds a tally from the plain values that `_manifest_body` wrote."""
    restored = {
        "columns": ColumnMap(**values["columns"]),
        "skipped": Counter(values["skipped"]),
        "warnings": Counter(values["warnings"]),
    }
    return Tally(**values | restored)


# ---------------------------------------------------------------------- writing


class TokenWriter:
    """Writes the tokens of one source. Use it in a `with` block: `publish` keeps the tokens, and
    leaving the block without it removes them.

    Every file system error is raised as a DataError that names the source, `name`.
    """

    def __init__(self, name: str):
        self._name = name
        root = cache_folder()
        self._folder = root / f".{uuid.uuid4().hex}.partial"
        self._open = contextlib.ExitStack()
        with self._write_errors():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_leftovers(root)
            safe_files.make_folder(self._folder, root)
            descriptor = safe_files.create(self._folder / _LOCK, root)
            lock = self._open.enter_context(os.fdopen(descriptor, "wb"))
            # The kernel holds the lock until this process ends, however it ends. A folder whose
            # lock is free is a leftover.
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.train = SplitWriter(self._folder, "train", self._open, self._write_errors)
            self.eval = SplitWriter(self._folder, "eval", self._open, self._write_errors)
            self._prompts = WrittenFile(self._folder / _PROMPTS, root, self._open)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        # Closing writes the buffered bytes, which fails again if the disk is full.
        with contextlib.suppress(OSError):
            self._open.close()
        with contextlib.suppress(OSError):
            safe_files.remove_tree(self._folder, self._folder.parent)

    def prompt(self, document: int, answer: tuple[int, int], asked: str) -> None:
        """Writes a validation question: the number of its document among the validation ones, the
        token range of its answer, and the text of the question.
        """
        line = json.dumps({"document": document, "answer": answer, "asked": asked})
        with self._write_errors():
            self._prompts.write(line.encode() + b"\n")

    def publish(self, key: str | None, tally: Tally) -> StoredTokens:
        """Maps the written files and keeps them under `key`. Without a key, the files are removed
        at the end of the `with` block, and their content stays mapped as long as the run needs it.
        """
        files = [self._prompts, *self.train.files, *self.eval.files]
        with self._write_errors():
            for file in files:
                file.close(synced=key is not None)
            made = StoredTokens(self._folder, tally, cached=False)
            if key is not None:
                self._write_manifest(_manifest_body(key, files, tally))
                self._move_into_place(cache_folder() / key)
        return made

    def _write_manifest(self, body: dict[str, Any]) -> None:
        manifest = WrittenFile(self._folder / _MANIFEST, self._folder.parent, self._open)
        manifest.write(json.dumps({"checksum": body_checksum(body), "body": body}).encode())
        manifest.close(synced=True)

    def _move_into_place(self, place: Path) -> None:
        # The file names must be on the disk before the folder is renamed, so that a folder named by
        # a key is complete even after a power failure.
        root = place.parent
        safe_files.sync_folder(self._folder, root)
        try:
            safe_files.rename(self._folder, place, root)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return  # another process was faster with the same tokens
        safe_files.remove(place / _LOCK, root)
        safe_files.sync_folder(root, root)

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Turns an OSError into a DataError for the user, and removes the files written so far."""
        try:
            yield
        except OSError as error:
            self.__exit__()
            raise DataError(
                f"The tokens of {self._name} cannot be written in {cache_folder()} "
                f"({error.strerror or error}); free some disk space there, or set RAMSTREAM_CACHE "
                "to a folder that has room."
            ) from None


def _manifest_body(key: str, files: list[WrittenFile], tally: Tally) -> dict[str, Any]:
    plain_tally = asdict(tally)
    plain_tally["skipped"] = dict(tally.skipped)
    plain_tally["warnings"] = dict(tally.warnings)
    return {
        "key": key,
        "files": {file.name: [file.bytes, file.digest.hexdigest()] for file in files},
        "tally": plain_tally,
    }


class SplitWriter:
    """Writes the documents of one side, "train" or "eval", row after row."""

    def __init__(
        self, folder: Path, split: str, stack: contextlib.ExitStack, write_errors: Callable[[], Any]
    ):
        root = folder.parent
        self.files = [WrittenFile(folder / f"{split}.{name}", root, stack) for name in _TYPES]
        self._ids, self._loss_mask, self._starts, self._examples = self.files
        self._more: dict[str, WrittenFile] = {}
        self._make = lambda name: WrittenFile(folder / f"{split}.{name}", root, stack)
        self._write_errors = write_errors
        self.examples = 0
        self.documents = 0
        self._tokens = 0
        # Both lists of n + 1 starts begin with 0.
        self._starts.write(np.zeros(1, np.int64))
        self._examples.write(np.zeros(1, np.int64))

    def write(self, found: Documents) -> None:
        """Appends the documents of some rows. A row without documents does not count as an
        example.
        """
        if not len(found.lengths):
            return
        counts = found.counts[found.counts > 0]
        with self._write_errors():
            self._ids.write(found.ids)
            self._loss_mask.write(found.loss_mask)
            self._starts.write(self._tokens + np.cumsum(found.lengths))
            self._examples.write(self.documents + np.cumsum(counts))
            if len(found.references):
                self._file("references").write(found.references)
            if len(found.weights) or "weights" in self._more:
                self._write_weights(found)
        self._tokens += len(found.ids)
        self.documents += len(found.lengths)
        self.examples += len(counts)

    def _write_weights(self, found: Documents) -> None:
        """Appends the weight of each token. Those of all earlier tokens are 1 in a new file."""
        if "weights" not in self._more:
            self._write_ones(self._tokens)
        if len(found.weights):
            self._file("weights").write(found.weights)
        else:
            self._write_ones(len(found.ids))

    def _write_ones(self, count: int) -> None:
        file = self._file("weights")
        for start in range(0, count, _ONES):
            file.write(np.ones(min(_ONES, count - start), np.float32))

    def _file(self, name: str) -> WrittenFile:
        """Returns one of the files that not every side has, and makes it where it is new."""
        if name not in self._more:
            self._more[name] = self._make(name)
            self.files.append(self._more[name])
        return self._more[name]


# ---------------------------------------------------------------------- removing


@dataclass(frozen=True)
class _KeptFolder:
    folder: Path
    last_used: float
    bytes: int


def remove_old(keys_in_use: Collection[str]) -> None:
    """Removes the least recently used folders until the cache is within its limits, but keeps those
    under `keys_in_use`.
    """
    root = cache_folder()
    every = _kept_folders(root)
    folders = len(every)
    total_bytes = sum(kept.bytes for kept in every)
    most_bytes = max(_LEAST_BYTES, shutil.disk_usage(root).total // 10)
    removable = [kept for kept in every if kept.folder.name not in keys_in_use]
    for oldest in sorted(removable, key=lambda kept: kept.last_used):
        if folders <= _MOST_FOLDERS and total_bytes <= most_bytes:
            return
        _remove(oldest.folder)
        folders -= 1
        total_bytes -= oldest.bytes


def _kept_folders(root: Path) -> list[_KeptFolder]:
    found = []
    for name, status in safe_files.entries(root, root).items():
        if not _KEY.fullmatch(name) or not stat.S_ISDIR(status.st_mode):
            continue
        with contextlib.suppress(OSError, KeyError):  # another process is removing it
            files = safe_files.entries(root / name, root)
            total = sum(file.st_size for file in files.values())
            found.append(_KeptFolder(root / name, files[_MANIFEST].st_mtime, total))
    return found


def _remove(folder: Path) -> None:
    """Removes a folder, or a link in its place. It is renamed first, so that no process finds half
    of it under its key.
    """
    root = folder.parent
    gone = folder.with_name(f".{uuid.uuid4().hex}.removed")
    with contextlib.suppress(OSError):
        safe_files.rename(folder, gone, root)
        safe_files.remove_tree(gone, root)


def _remove_leftovers(root: Path) -> None:
    """Removes folders that killed processes left half-written or half-removed."""
    for name, status in safe_files.entries(root, root).items():
        left = _LEFT.fullmatch(name)
        if left is None or not stat.S_ISDIR(status.st_mode):
            continue
        with contextlib.suppress(OSError):
            if left[1] == "removed":
                safe_files.remove_tree(root / name, root)
                continue
            if time.time() - status.st_mtime < _GRACE_SECONDS:
                continue
            descriptor = safe_files.open_lock(root / name / _LOCK, root, makes=True)
            with os.fdopen(descriptor, "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its writer lives
                safe_files.remove_tree(root / name, root)
