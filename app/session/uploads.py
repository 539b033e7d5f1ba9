"""The server keeps the files that a person uploads, each in a folder of its own.

``<runs>/.uploads/<id>/`` has the file and ``.about.json``, which keeps the name that the person
gave it.

- While a file arrives, its folder is called ``<id>.partial``, and the receiving process holds a
  lock on the file. The folder is renamed once its content is on the disk, so an upload is either
  complete or absent.
- The kernel releases the lock when that process dies. The next server removes what is left.
- A file gets a name of letters and digits. The person's own name is a label that is only shown.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import threading
import time
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from app.words import in_bytes
from engine.errors import RunError
from engine.files import FULL, disk_free, is_full_in_words, sync_folder, write_whole
from engine.sources.kinds import KINDS, is_data, stem_of, suffixes_of
from engine.words import GIB

UPLOADS_FOLDER = ".uploads"
"""The folder of runs has the uploads in a folder of this name, which cannot be that of a run."""
ID = re.compile(r"[0-9a-f]{16}")
LONGEST_LABEL = 120
_ABOUT_FILE = ".about.json"
_PARTIAL = ".partial"
_LONGEST_STEM = 60
_OTHER_SIGNS = re.compile(r"[^A-Za-z0-9_]+")
NO_NAME = "data"
"""A file is called so where its own name has no sign that can be used."""


class RefusedUpload(RunError):
    """An upload is refused. `status` is the HTTP status of the answer."""

    def __init__(self, status: int, sentence: str):
        self.status = status
        super().__init__(sentence)


@dataclass(frozen=True)
class UploadLimits:
    """These are the limits of uploads; sizes are in bytes."""

    largest: int = 20 * GIB
    """One file has at most this many bytes."""
    quota: int = 100 * GIB
    """All files together have at most this many bytes."""
    reserve: int = 4 * GIB
    """Uploads leave this many bytes of the disk free, for checkpoints and other programs."""
    idle_seconds: float = 30.0
    """An upload of which nothing arrives for this long has ended."""


@dataclass(frozen=True)
class Upload:
    """An `Upload` is a file that is complete."""

    id: str
    name: str
    """The person gave the file this name."""
    path: Path
    bytes: int
    uploaded: float
    """It was complete at this Unix time."""


class Uploads:
    """An `Uploads` has the uploads of one folder. All methods may be called from any thread."""

    def __init__(self, folder: Path, limits: UploadLimits | None = None):
        self.limits = limits or UploadLimits()
        self._folder = folder
        # Under this lock, checking that there is room and taking it are one step.
        self._lock = threading.Lock()
        self._arriving: dict[str, Incoming] = {}

    def listed(self) -> list[Upload]:
        """Returns all complete uploads, newest first."""
        found = [self._read(folder) for folder in self._folders() if ID.fullmatch(folder.name)]
        return sorted(filter(None, found), key=lambda upload: upload.uploaded, reverse=True)

    def find(self, upload_id: str) -> Upload:
        """Returns a complete upload. Raises RefusedUpload if there is none with this id."""
        found = self._read(self._folder / upload_id) if ID.fullmatch(upload_id) else None
        if found is None:
            raise RefusedUpload(404, "There is no such upload; it may have been removed.")
        return found

    def new_id(self, name: str, size: int) -> str:
        """Returns an unused id for a file of `size` bytes called `name`. Raises RefusedUpload if
        such a file would be refused now.
        """
        with self._lock:
            self._refuse(name, size)
        return secrets.token_hex(8)

    def begin(self, upload_id: str, name: str, size: int) -> Incoming:
        """Makes room for a file of `size` bytes called `name`, and returns what receives it.

        Raises RefusedUpload if the id is taken or no id, if the file is of a kind that is not read,
        and if it is too large for the limits or for the disk.
        """
        if not ID.fullmatch(upload_id):
            raise RefusedUpload(404, "An upload is named by 16 hexadecimal digits.")
        with self._lock:
            if upload_id in self._arriving:
                raise RefusedUpload(409, "This upload is under way already; wait for its end.")
            if (self._folder / upload_id).exists():
                raise RefusedUpload(409, "This upload is complete already; upload it anew.")
            self._refuse(name, size)
            try:
                incoming = Incoming(self._folder / upload_id, label_of(name), size, self)
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
            folder.rename(gone)
            shutil.rmtree(gone)
        except OSError as error:
            raise RefusedUpload(
                409, f"The file cannot be removed ({error.strerror}); remove {gone} by hand."
            ) from None

    def remove_leftovers(self) -> None:
        """Deletes what uploads of killed servers have left, as far as that is possible."""
        for folder in self._folders():
            if folder.name.endswith(_PARTIAL) and not _is_arriving(folder):
                shutil.rmtree(folder, ignore_errors=True)

    # ------------------------------------------------------------------ what is refused

    def _refuse(self, name: str, size: int) -> None:
        """Raises RefusedUpload for a file that must not be received. The lock is held."""
        label = label_of(name)
        if not is_data(Path(label)):
            raise RefusedUpload(
                415, f"The name {label!r} is none that is read; give a file that ends in {KINDS}."
            )
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
        left = self.limits.quota - sum(upload.bytes for upload in self.listed())
        left -= sum(incoming.size for incoming in arriving)
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

    def _folders(self) -> list[Path]:
        try:
            return [path for path in self._folder.iterdir() if path.is_dir()]
        except OSError:  # nothing was uploaded yet
            return []

    def _read(self, folder: Path) -> Upload | None:
        try:
            about = json.loads((folder / _ABOUT_FILE).read_text(encoding="utf-8"))
            path = folder / about["file"]
            return Upload(folder.name, about["name"], path, path.stat().st_size, about["uploaded"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


class Incoming:
    """An `Incoming` is a file that arrives. It ends with `keep` or `drop`."""

    def __init__(self, folder: Path, name: str, size: int, owner: Uploads):
        """Makes the partial folder. Raises OSError."""
        self.id = folder.name
        self.size = size
        self._name = name
        self._owner = owner
        self._folder = folder
        self._partial = folder.with_name(folder.name + _PARTIAL)
        self._written = 0
        # A thread may still be writing when the request is cancelled: the end waits for it.
        self._lock = threading.Lock()
        self._partial.parent.mkdir(parents=True, exist_ok=True)
        self._partial.mkdir(mode=0o700)
        try:
            self._file: BinaryIO | None = (self._partial / stored_name(name)).open("wb")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise

    @property
    def missing(self) -> int:
        """Returns how many bytes have not arrived yet."""
        return self.size - self._written

    def write(self, piece: bytes | bytearray) -> None:
        """Adds a piece. Raises RefusedUpload if the disk has no room for it, or fails."""
        with self._lock:
            if self._file is None:
                return
            reserve = self._owner.limits.reserve
            try:
                if disk_free(self._partial) - len(piece) < reserve:
                    raise RefusedUpload(507, no_room(self._name, reserve))
                self._file.write(piece)
                self._file.flush()
            except OSError as error:
                raise refused_by_disk(error) from None
            self._written += len(piece)

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
                write_whole(self._partial / _ABOUT_FILE, json.dumps(about))
                self._partial.rename(self._folder)
                sync_folder(self._folder.parent)
            except OSError as error:
                raise refused_by_disk(error) from None
            self._close()
        return self._owner.find(self.id)

    def drop(self) -> None:
        """Deletes what has arrived. Does nothing after `keep`."""
        with self._lock:
            if self._file is None:
                return
            shutil.rmtree(self._partial, ignore_errors=True)
            self._close()

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
    words = "".join(map(_shown, last)).split()
    label = unicodedata.normalize("NFC", " ".join(words))
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
            507, f"{is_full_in_words(error)}; free some space or remove uploads, then try again."
        )
    return RefusedUpload(
        409, f"The upload cannot be written ({error.strerror}); check the folder of the runs."
    )


def _shown(sign: str) -> str:
    """Returns a character, or a space for one that controls, is no text, or is a kind of space."""
    return " " if unicodedata.category(sign)[0] in "CZ" else sign


def _is_arriving(partial: Path) -> bool:
    """Returns whether a living process receives the file of a partial folder."""
    for path in partial.iterdir():
        with contextlib.suppress(OSError), path.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False
