"""The sessions: a browser has one until it logs out, or for two weeks.

A browser holds a random token in its cookie. The server keeps only a keyed hash of it, in a file
that outlives a restart: who reads the file cannot log in with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from engine import safe_files
from engine.safe_files import FileFault

SESSION_SECONDS = 14 * 24 * 3600
MOST_SESSIONS = 100
"""Largest number of sessions; of more, the one that was not seen for the longest time ends."""
WRITE_SECONDS = 300.0
"""Least number of seconds between two writes of when a session was last seen."""
NAME_LENGTH = 12


@dataclass(frozen=True)
class Record:
    """A session as the file keeps it; times are in seconds since 1970."""

    hash: str
    began: float
    seen: float
    address: str
    browser: str


class LoginSession:
    """One browser that is logged in."""

    def __init__(self, record: Record):
        self._record = record
        self._ended = False
        self._watchers: list[Callable[[], None]] = []

    @property
    def name(self) -> str:
        """Name of this session for a page; nobody can log in with it."""
        return self._record.hash[:NAME_LENGTH]

    @property
    def record(self) -> Record:
        """The session as the file keeps it."""
        return self._record

    def is_over(self, now: float | None = None) -> bool:
        """Returns whether the session was ended, or is too old."""
        now = time.time() if now is None else now
        return self._ended or now >= self._record.began + SESSION_SECONDS

    def was_seen(self, address: str, now: float) -> None:
        """Notes a request of the session."""
        self._record = replace(self._record, seen=now, address=address)

    def end(self) -> None:
        """Ends the session for good, and notifies those who watch it."""
        self._ended = True
        for notify in list(self._watchers):
            notify()

    @contextlib.contextmanager
    def watched(self, notify: Callable[[], None]) -> Iterator[None]:
        """Within this context, `notify` is called when the session is ended."""
        self._watchers.append(notify)
        try:
            yield
        finally:
            self._watchers.remove(notify)


UNREADABLE = (
    "The file of earlier logins was damaged when the app started, so every browser has to log in "
    "again; the terminal of the app says where that file is."
)
KEY_REPLACED = (
    "The key of earlier logins was damaged, or open to other accounts, when the app started, and "
    "was replaced, so every browser has to log in again; the terminal of the app says why."
)
KEY_NOT_KEPT = (
    "The key of logins cannot be kept on the disk, so every browser has to log in again after a "
    "restart; the terminal of the app says why."
)
NOT_KEPT = (
    "The logins cannot be written to the disk, so every browser has to log in again after a "
    "restart; the terminal of the app says why."
)


class LoginSessions:
    """Keeps all sessions of a server. It is used by the event loop's thread alone."""

    def __init__(self, path: Path, key: bytes, fault: str = ""):
        """Reads the sessions from the file `path`. A file that is damaged logs everybody out; a
        session that was begun under another `key` is left out. fault: what is wrong with the key,
        in a sentence.
        """
        self._path, self._key = path, key
        self._written = 0.0
        self._sessions: dict[str, LoginSession] = {}
        self.fault = fault
        """Sentence for a person who was logged in before, or nothing."""
        try:
            kept = _read(path, self._keys_mark())
        except OSError as error:
            self.fault = UNREADABLE
            _set_aside(path, error)
            kept = []
        for record in kept:
            self._sessions[record.hash] = LoginSession(record)

    def begin(self, address: str, browser: str, now: float | None = None) -> str:
        """Begins a session, and returns the token that proves it."""
        now = time.time() if now is None else now
        token = secrets.token_urlsafe(32)
        record = Record(self._hash(token), now, now, address, browser)
        self._sessions[record.hash] = LoginSession(record)
        self._forget_old(now)
        self._write(now)
        return token

    def find(self, token: str, now: float | None = None) -> LoginSession | None:
        """Returns the session that a token proves, or None if it is none or over."""
        # The search is by the keyed hash: its duration reveals nothing about any token.
        session = self._sessions.get(self._hash(token))
        return None if session is None or session.is_over(now) else session

    def saw(self, session: LoginSession, address: str, now: float | None = None) -> None:
        """Notes a request of a session."""
        now = time.time() if now is None else now
        session.was_seen(address, now)
        if abs(now - self._written) >= WRITE_SECONDS:
            self._write(now)

    def all(self, now: float | None = None) -> list[LoginSession]:
        """Returns the sessions in force, the one seen last first."""
        now = time.time() if now is None else now
        self._forget_old(now)
        return sorted(self._sessions.values(), key=lambda each: -each.record.seen)

    def end(self, name: str) -> bool:
        """Ends a session for good. Returns whether there was one of that name."""
        return self._end([each for each in self._sessions.values() if each.name == name])

    def end_others(self, own: LoginSession | None) -> None:
        """Ends every session other than `own`, which may be none of them."""
        self._end([each for each in self._sessions.values() if each is not own])

    def _end(self, ending: list[LoginSession]) -> bool:
        for session in ending:
            del self._sessions[session.record.hash]
        if ending:
            # The file is written first: a session that has ended must not come back.
            self._write(time.time())
        for session in ending:
            session.end()
        return bool(ending)

    def _forget_old(self, now: float) -> None:
        by_age = sorted(self._sessions.values(), key=lambda each: -each.record.seen)
        for number, session in enumerate(by_age):
            if number >= MOST_SESSIONS or session.is_over(now):
                del self._sessions[session.record.hash]
                session.end()

    def _hash(self, token: str) -> str:
        return hmac.new(self._key, token.encode(), hashlib.sha256).hexdigest()

    def _keys_mark(self) -> str:
        """Returns a mark of the key, which distinguishes the sessions of this password."""
        return self._hash("the key of this file")

    def _write(self, now: float) -> None:
        self._written = now
        records = [asdict(session.record) for session in self._sessions.values()]
        text = json.dumps({"key": self._keys_mark(), "sessions": records})
        folder, mode = self._path.parent, safe_files.PRIVATE
        try:
            safe_files.write_whole(self._path, text, folder, durable=False, mode=mode)
        except OSError as error:
            self._leave_none(error)
        else:
            if self.fault == NOT_KEPT:
                self.fault = ""

    def _leave_none(self, error: OSError) -> None:
        """Removes the file, which is out of date: after a restart everybody logs in again, and no
        session that was ended comes back.
        """
        self.fault = NOT_KEPT
        print(
            f"ramstream: {self._path}: the logins cannot be kept here ({error.strerror}); after a "
            "restart, log in again.",
            file=sys.stderr,
        )
        try:
            safe_files.remove(self._path, self._path.parent)
        except OSError:
            print(
                f"ramstream: {self._path}: remove this file before the next start, or logins that "
                "were ended are in force again.",
                file=sys.stderr,
            )


class _Kept(msgspec.Struct):
    """Content of the file."""

    key: str
    sessions: list[Record]


def _read(path: Path, mark: str) -> list[Record]:
    """Returns the sessions that a file keeps: none if it is missing or of another key. Raises
    OSError for a damaged one.
    """
    try:
        kept = safe_files.read_json(path, path.parent, _Kept)
    except FileNotFoundError:
        return []
    times = [time for record in kept.sessions for time in (record.began, record.seen)]
    if not all(map(math.isfinite, times)):
        raise FileFault(path, "has a time that is no number")
    return kept.sessions if kept.key == mark else []


def _set_aside(path: Path, error: OSError) -> None:
    """Gives a damaged file another name, and reports it in the terminal."""
    aside = path
    with contextlib.suppress(OSError):
        aside = safe_files.set_aside(path, path.parent)
    print(
        f"ramstream: The logins of before cannot be read ({error.strerror}), so log in again: see "
        f"{aside}.",
        file=sys.stderr,
    )
