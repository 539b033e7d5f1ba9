"""Lines of a run's record, decoded and encoded. All readers of a record use this module."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Union

from msgspec.json import Decoder

from engine import safe_files
from engine.errors import RunError
from engine.runs.record.events import EVENT_TYPES, Envelope, Record

_ANY_EVENT: Any = Union[tuple(EVENT_TYPES.values())]  # noqa: UP007  made from a list

_envelope = Decoder(Envelope).decode
_event = Decoder(_ANY_EVENT).decode

_HEAD = 80
"""Number of bytes within which the kind of a line ends."""
LONGEST_LINE = 1 << 26
"""Number of bytes above which a line is damaged; the timeline of a long step has some millions."""
_PASSED_OVER = 1 << 20
"""Bytes of a line that is too long which are in memory at once."""


# ---------------------------------------------------------------------- reading


def open_record(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens the record `path` in a run folder, which is in a folder of runs. No link below that is
    followed. Raises OSError, and FileFault for what is no file or too large.
    """
    record = Path(path)
    return safe_files.open_to_read(record, record.parent.parent)


def complete_lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yields each line with its line break, and the number of its bytes in the file. A last line
    without a line break is left out. A line that is longer than any that a run writes is a line
    break alone.
    """
    # Asking the file for its offset would take as long as reading the line.
    for line in iter(functools.partial(file.readline, LONGEST_LINE), b""):
        if line.endswith(b"\n"):
            yield line, len(line)
        elif len(line) < LONGEST_LINE:
            return
        elif (rest := _pass_over(file)) is not None:
            yield b"\n", len(line) + rest


def next_line(file: BinaryIO) -> bytes:
    """Returns the next line as `complete_lines` yields it, or nothing at the end."""
    for line, _ in complete_lines(file):
        return line
    return b""


def _pass_over(file: BinaryIO) -> int | None:
    """Returns the number of bytes up to the next line break, or None if there is none."""
    passed = 0
    while chunk := file.readline(_PASSED_OVER):
        passed += len(chunk)
        if chunk.endswith(b"\n"):
            return passed
    return None


def line_kind(line: bytes) -> str:
    """Returns the kind of a line that `RunRecorder` wrote, or "" if the line has none.

    The line is not parsed: its kind is the first value, between the third and fourth quotation
    marks.
    """
    if line.count(b'"', 0, _HEAD) < 4:
        return ""
    return line[:_HEAD].split(b'"', 4)[3].decode("ascii", "replace")


def parse_line(line: bytes) -> Record:
    """Returns the record in a line. Raises ValueError when the line is not a record."""
    # Every line that `RunRecorder` wrote is ASCII. In other lines, msgspec does not fully check the
    # values that it skips.
    if line.isascii():
        try:
            envelope = _envelope(line)
            return Record(
                envelope.run_id, envelope.seq, envelope.time, _event(line), envelope.elapsed
            )
        except (ValueError, RecursionError):
            # json may still accept the line, for example one with an unknown kind, with a field
            # named twice, or with NaN where any value is allowed.
            pass
    try:
        return Record.from_json(_loaded(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"not a record: {error}") from None


def _loaded(line: bytes) -> Any:
    """Returns the JSON values of a line, with all text made valid so that it can be sent to a page.

    Raises ValueError if the line is not JSON.
    """
    values = json.loads(line)
    # Half of a surrogate pair, which a file name may contain, is not valid text: it becomes "?".
    if b"\\u" in line or not line.isascii():
        values = json.loads(json.dumps(values, ensure_ascii=False).encode("utf-8", "replace"))
    return values


class AddedLines:
    """A record that grows, each line of which is read once. One thread at a time may call."""

    def __init__(self, path: Path, forget: Callable[[], None]):
        """`forget` is called if the record at `path` is gone or was replaced by another one."""
        self._path = path
        self._forget = forget
        self._offset = 0
        """Offset in bytes up to which lines were read."""

    def read(self, take: Callable[[bytes, int], None]) -> None:
        """Calls `take` with each complete line that was added since the last call, and the offset
        of its first byte. Raises RunError for a record that cannot be read.
        """
        try:
            with open_record(self._path) as file:
                # A shorter file means that another record has replaced this one.
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._begin_anew()
                file.seek(self._offset)
                for line, length in complete_lines(file):
                    take(line, self._offset)
                    self._offset += length
        except FileNotFoundError:
            self._begin_anew()
        except OSError as error:
            raise RunError(f"The record {self._path} cannot be read ({error.strerror}).") from None

    def _begin_anew(self) -> None:
        self._offset = 0
        self._forget()


# ---------------------------------------------------------------------- writing


def encode_line(record: Record) -> bytes:
    """Returns a record as a line of ASCII with a line break.

    Raises ValueError for a number that is not finite, and TypeError for a value that JSON cannot
    represent.
    """
    values = record.to_json()
    try:
        return json.dumps(values, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
    except ValueError:
        for name, number in _numbers(values, values["kind"]):
            if not math.isfinite(number):
                raise ValueError(
                    f"{name} is {number}: a number that is not finite must end the run by name "
                    "before it is recorded."
                ) from None
        raise


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yields each float in a JSON value with its place as text."""
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}")
            yield from _numbers(key, f"{name}: a key")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{name}[{index}]")
