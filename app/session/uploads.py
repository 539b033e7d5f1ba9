"""The server keeps the files that a person uploads, each in a folder of its own.

``<runs>/.uploads/<id>/`` has the file and ``.about.json``, which keeps the name that the person
gave it.

- While a file arrives, its folder is called ``<id>.partial``, and the receiving process holds a
  lock on the file. The folder is renamed once its content is on the disk, so an upload is either
  complete or absent.
- The kernel releases the lock when that process dies. The next server removes what is left.
- A file gets a name of letters and digits. The person's own name is a label that is only shown.
- Others may have written the folder (`engine.safe_files`): what leads out of it, by a link or by a
  name in ``.about.json``, is reported as unreadable, and neither listed nor removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import stat
import sys
import threading
import time
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from app.labels import in_bytes
from engine import safe_files
from engine.data.sources.kinds import USABLE, is_data, stem_of, suffixes_of
from engine.errors import RunError
from engine.files import FULL, disk_free, disk_full_text
from engine.safe_files import FileFault
from engine.text import GIB

UPLOADS_FOLDER = ".uploads"
"""Name of the folder of uploads in the folder of runs, which cannot be that of a run."""
ID = re.compile(r"[0-9a-f]{16}")
_LEFT = re.compile(r"[0-9a-f]{16}\.partial")
"""Folder of an upload that arrives, or that was left."""
LONGEST_LABEL = 120
_ABOUT_FILE = ".about.json"
_PARTIAL = ".partial"
_LONGEST_STEM = 60
_OTHER_SIGNS = re.compile(r"[^A-Za-z0-9_]+")
NO_NAME = "data"
"""Name of a file whose own name has no character that can be used."""


class RefusedUpload(RunError):
    """Raised for an upload that is refused. `status` is the HTTP status of the answer."""

    def __init__(self, status: int, sentence: str):
        self.status = status
        super().__init__(sentence)


@dataclass(frozen=True)
class UploadLimits:
    """Limits of uploads; sizes are in bytes."""

    largest: int = 20 * GIB
    """Largest size of one file."""
    quota: int = 100 * GIB
    """Largest size of all files together."""
    most: int = 1000
    """Largest number of files."""
    reserve: int = 4 * GIB
    """Bytes of the disk that uploads leave free, for checkpoints and other programs."""
    idle_seconds: float = 30.0
    """Seconds without any byte after which an upload has ended."""
    least_rate: int = 1 << 10
    """Bytes a second over `idle_seconds` below which an upload has ended."""
    at_once: int = 16
    """Largest number of files that arrive at once."""
    of_one: int = 4
    """Largest number of files of one client that arrive at once. A page sends one after the other.
    """


@dataclass(frozen=True)
class Upload:
    """A file that is complete."""

    id: str
    name: str
    """Name that the person gave the file."""
    path: Path
    bytes: int
    uploaded: float
    """Unix time at which it was complete."""


class _About(msgspec.Struct):
    """Content of ``.about.json``."""

    name: str
    file: str
    uploaded: float


@dataclass(frozen=True)
class _Seen:
    """What was read of the folder of an upload."""

    state: tuple[int, int]
    """Number of the folder and when it was changed, from which a change is noticed."""
    upload: Upload | None
    fault: str
    """Why there is none, as a sentence without its full stop."""


class Uploads:
    """Uploads of one folder. All methods may be called from any thread."""

    def __init__(self, folder: Path, limits: UploadLimits | None = None):
        self.limits = limits or UploadLimits()
        self._folder = folder
        # Under this lock, checking that there is room and taking it are one step.
        self._lock = threading.Lock()
        self._arriving: dict[str, Incoming] = {}
        self._left: dict[str, str] = {}
        """Folders of killed servers that cannot be removed, and why."""
        # This lock guards the field below it. It may be taken under the other one.
        self._scanning = threading.Lock()
        self._seen: dict[str, _Seen] = {}

    def listed(self) -> list[Upload]:
        """Returns all complete uploads, newest first."""
        found = [seen.upload for seen in self._scan().values() if seen.upload is not None]
        return sorted(found, key=lambda upload: upload.uploaded, reverse=True)

    @property
    def problem(self) -> str:
        """Which uploads cannot be read, and what of killed servers cannot be removed. The text is
        empty if there is no problem.
        """
        faults = [seen.fault for seen in self._scan().values() if seen.fault]
        sentences = [
            why for name, why in self._left.items() if os.path.lexists(self._folder / name)
        ]
        if faults:
            count = "1 upload" if len(faults) == 1 else f"{len(faults):,} uploads"
            sentences.append(f"{count} cannot be read: {faults[0]}; look into {self._folder}.")
        return " ".join(sentences)

    def find(self, upload_id: str) -> Upload:
        """Returns a complete upload. Raises RefusedUpload if there is none with this id."""
        if not ID.fullmatch(upload_id):
            raise RefusedUpload(404, "There is no such upload; it may have been removed.")
        try:
            return self._read(self._folder / upload_id)
        except FileNotFoundError:
            raise RefusedUpload(404, "There is no such upload; it may have been removed.") from None
        except OSError as error:
            raise RefusedUpload(
                409, f"This upload cannot be read ({error.strerror}); look into {self._folder}."
            ) from None

    def new_id(self, name: str, size: int, client: str = "") -> str:
        """Returns an unused id for a file of `size` bytes called `name`. Raises RefusedUpload if
        such a file would be refused now.
        """
        with self._lock:
            self._refuse(name, size, client)
        return secrets.token_hex(8)

    def begin(self, upload_id: str, name: str, size: int, client: str = "") -> Incoming:
        """Makes room for a file of `size` bytes called `name`, and returns what receives it. It is
        sent by `client`.

        Raises RefusedUpload if the id is taken or no id, if the file is of a kind that is not read,
        and if it is too large for the limits or for the disk.
        """
        if not ID.fullmatch(upload_id):
            raise RefusedUpload(404, "An upload is named by 16 hexadecimal digits.")
        with self._lock:
            if upload_id in self._arriving:
                raise RefusedUpload(
                    409, "This file is being uploaded already. Wait until it is done."
                )
            if os.path.lexists(self._folder / upload_id):
                raise RefusedUpload(409, "This upload is complete already; upload it anew.")
            self._refuse(name, size, client)
            try:
                incoming = Incoming(self._folder / upload_id, label_of(name), size, self, client)
            except OSError as error:
                raise refused_by_disk(error) from None
            self._arriving[upload_id] = incoming
            return incoming

    def forget(self, incoming: Incoming) -> None:
        """Gives back the room of an upload that has ended."""
        with self._lock:
            self._arriving.pop(incoming.id, None)

    def remove(self, upload_id: str) -> None:
        """Deletes a complete upload. Raises RefusedUpload if there is none with this id, or if it
        cannot be deleted.
        """
        folder = self.find(upload_id).path.parent
        gone = folder.with_name(folder.name + _PARTIAL)
        try:
            # A server that is killed in the middle leaves a folder that the next one removes.
            safe_files.rename(folder, gone, self._folder)
            safe_files.remove_tree(gone, self._folder)
        except OSError as error:
            raise RefusedUpload(
                409, f"The file cannot be removed ({error.strerror}); remove {gone} by hand."
            ) from None

    def remove_leftovers(self) -> None:
        """Deletes what uploads of killed servers have left. What cannot be deleted stays, and is
        reported in the terminal and by `problem`.
        """
        for name, status in self._entries().items():
            folder = self._folder / name
            if not _LEFT.fullmatch(name) or not stat.S_ISDIR(status.st_mode):
                continue
            try:
                if not _is_arriving(folder, self._folder):
                    safe_files.remove_tree(folder, self._folder)
            except OSError as error:
                self._left[name] = (
                    f"{folder} is left of an upload that ended, and cannot be removed "
                    f"({error.strerror}); remove it by hand."
                )
                print(f"ramstream: {self._left[name]}", file=sys.stderr)

    # ------------------------------------------------------------------ what is refused

    def _refuse(self, name: str, size: int, client: str) -> None:
        """Raises RefusedUpload for a file that must not be received. The lock is held."""
        clients = [incoming.client for incoming in self._arriving.values()]
        for count, most in (
            (len(clients), self.limits.at_once),
            (clients.count(client), self.limits.of_one),
        ):
            if count >= most:
                raise RefusedUpload(
                    429, f"{count} files arrive already; upload this one when one of them is here."
                )
        label = label_of(name)
        if not is_data(Path(label)):
            raise RefusedUpload(415, f"{label or 'This'} is not a data file. {USABLE}")
        if size <= 0:
            raise RefusedUpload(400, f"{label} is empty; give a file with rows.")
        if size > self.limits.largest:
            raise RefusedUpload(
                413,
                f"{label} has {in_bytes(size)}, and an upload has at most "
                f"{in_bytes(self.limits.largest)}; put it on this machine in another way and name "
                "its path, or start the app with a higher --upload-limit.",
            )
        arriving = self._arriving.values()
        kept = [seen.upload.bytes for seen in self._scan().values() if seen.upload is not None]
        if len(kept) + len(arriving) >= self.limits.most:
            raise RefusedUpload(
                409,
                f"{self.limits.most:,} files are uploaded already, and there may be no more; "
                "remove some of them, or join small files into one.",
            )
        left = self.limits.quota - sum(kept) - sum(incoming.size for incoming in arriving)
        if size > left:
            raise RefusedUpload(
                413,
                f"{label} has {in_bytes(size)}, and {in_bytes(max(0, left))} are left for uploads; "
                "remove some, or start the app with a higher --upload-quota.",
            )
        free = disk_free(self._folder) - sum(incoming.missing for incoming in arriving)
        if size > free - self.limits.reserve:
            raise RefusedUpload(507, no_room(label, self.limits.reserve))

    # ------------------------------------------------------------------ the folder

    def _entries(self) -> dict[str, os.stat_result]:
        """Returns what is in the folder."""
        try:
            return safe_files.entries(self._folder, self._folder)
        except OSError:  # nothing was uploaded yet
            return {}

    def _scan(self) -> dict[str, _Seen]:
        """Returns what is known of each folder named by an id. Only folders that changed are read:
        each check of an upload asks this.
        """
        with self._scanning:
            found = {}
            for name, status in self._entries().items():
                if ID.fullmatch(name):
                    state = (status.st_ino, status.st_mtime_ns)
                    seen = self._seen.get(name)
                    found[name] = (
                        seen if seen is not None and seen.state == state else self._see(name, state)
                    )
            self._seen = found
            return found

    def _see(self, name: str, state: tuple[int, int]) -> _Seen:
        try:
            return _Seen(state, self._read(self._folder / name), "")
        except OSError as error:
            return _Seen(state, None, f"{name} ({error.strerror})")

    def _read(self, folder: Path) -> Upload:
        """Returns the upload in a folder. Raises OSError, and FileFault for a folder that this
        program has not written.
        """
        about = safe_files.read_json(folder / _ABOUT_FILE, self._folder, _About)
        path = folder / about.file
        if path.name != about.file or about.file.startswith("."):
            raise FileFault(folder / _ABOUT_FILE, "names a file that is not beside it")
        if not math.isfinite(about.uploaded):
            raise FileFault(folder / _ABOUT_FILE, "has a time that is no number")
        size = safe_files.size_of(path, self._folder)
        if not safe_files.is_file(path, self._folder):
            raise FileFault(path, "is missing")
        return Upload(folder.name, label_of(about.name), path, size, about.uploaded)


class Incoming:
    """A file that arrives. It ends with `keep` or `drop`."""

    def __init__(self, folder: Path, name: str, size: int, owner: Uploads, client: str):
        """Makes the partial folder. Raises OSError."""
        self.id = folder.name
        self.size = size
        self.client = client
        self._name = name
        self._owner = owner
        self._folder = folder
        self._partial = folder.with_name(folder.name + _PARTIAL)
        self._written = 0
        # A thread may still be writing when the request is cancelled: the end waits for it.
        self._lock = threading.Lock()
        self._all = folder.parent
        self._all.mkdir(mode=0o700, parents=True, exist_ok=True)
        safe_files.make_folder(self._partial, self._all)
        try:
            descriptor = safe_files.create(self._partial / stored_name(name), self._all)
            self._file: BinaryIO | None = os.fdopen(descriptor, "wb")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._remove()
            raise

    @property
    def missing(self) -> int:
        """Number of bytes that have not arrived yet."""
        return self.size - self._written

    def write(self, chunk: bytes | bytearray) -> None:
        """Adds a chunk. Raises RefusedUpload if the disk has no room for it, or fails."""
        with self._lock:
            if self._file is None:
                return
            reserve = self._owner.limits.reserve
            try:
                if disk_free(self._partial) - len(chunk) < reserve:
                    raise RefusedUpload(507, no_room(self._name, reserve))
                self._file.write(chunk)
                self._file.flush()
            except OSError as error:
                raise refused_by_disk(error) from None
            self._written += len(chunk)

    def keep(self) -> Upload:
        """Completes the upload and returns it. Raises RefusedUpload if bytes are missing, and if it
        cannot be written.
        """
        with self._lock:
            if self._file is None or self.missing:
                raise RefusedUpload(400, f"{self._name} did not arrive whole; upload it again.")
            about = {
                "name": self._name,
                "file": stored_name(self._name),
                "uploaded": time.time(),
            }
            try:
                os.fsync(self._file.fileno())
                safe_files.write_whole(self._partial / _ABOUT_FILE, json.dumps(about), self._all)
                safe_files.rename(self._partial, self._folder, self._all)
                safe_files.sync_folder(self._all, self._all)
            except OSError as error:
                raise refused_by_disk(error) from None
            self._close()
        return self._owner.find(self.id)

    def drop(self) -> None:
        """Deletes what has arrived. Does nothing after `keep`."""
        with self._lock:
            if self._file is None:
                return
            self._remove()
            self._close()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # the next server reports it
            safe_files.remove_tree(self._partial, self._all)

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of an unwritten rest, on a full disk
                self._file.close()
            self._file = None
        self._owner.forget(self)


def label_of(name: str) -> str:
    """Returns a file's name as it is shown: without folders and control characters, and not too
    long. Its suffixes are kept.
    """
    last = re.split(r"[/\\]", name)[-1]
    parts = "".join(map(_shown, last)).split()
    label = unicodedata.normalize("NFC", " ".join(parts))
    if not is_data(Path(label)):
        return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"
    stem_length = len(label) - len("".join(suffixes_of(Path(label))))
    suffix = label[stem_length:]
    return label[: min(stem_length, LONGEST_LABEL - len(suffix))] + suffix


def stored_name(label: str) -> str:
    """Returns the name that a file gets on the disk: letters and digits of its label, and its
    suffixes.
    """
    plain = unicodedata.normalize("NFKD", stem_of(Path(label))).encode("ascii", "ignore").decode()
    stem = _OTHER_SIGNS.sub("-", plain).strip("-_")[:_LONGEST_STEM]
    return (stem or NO_NAME) + "".join(suffixes_of(Path(label)))


def no_room(label: str, reserve: int) -> str:
    """Returns the sentence about a disk that has no room for the file `label`."""
    kept = f", of which {in_bytes(reserve)} are kept free" if reserve else ""
    return f"{label} does not fit on the disk of the runs{kept}; free some space or remove uploads."


def refused_by_disk(error: OSError) -> RefusedUpload:
    """Returns the refusal of an upload that cannot be written."""
    if error.errno in FULL:
        return RefusedUpload(
            507, f"{disk_full_text(error)}; free some space or remove uploads, then try again."
        )
    return RefusedUpload(
        409, f"The upload cannot be written ({error.strerror}); check the folder of the runs."
    )


def _shown(sign: str) -> str:
    """Returns a character, or a space for one that controls, is no text, or is a kind of space."""
    return " " if unicodedata.category(sign)[0] in "CZ" else sign


def _is_arriving(partial: Path, within: Path) -> bool:
    """Returns whether a living process receives the file of a partial folder. Raises OSError if the
    folder cannot be read.
    """
    for name in safe_files.entries(partial, within):
        with (
            contextlib.suppress(FileFault),
            safe_files.open_to_read(partial / name, within, most=1 << 62) as file,
        ):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False
