"""Lines of a run's record become records here, and records become lines.

Whoever reads a record reads it through this module.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Union

from msgspec import MsgspecError
from msgspec.json import Decoder

from engine.runs.events import EVENT_TYPES, Envelope, Record

_ANY_EVENT: Any = Union[tuple(EVENT_TYPES.values())]  # noqa: UP007  made from a list

_envelope = Decoder(Envelope).decode
_event = Decoder(_ANY_EVENT).decode

_HEAD = 80
"""The kind of a line ends within so many bytes."""


# ---------------------------------------------------------------------- reading


def line_kind(line: bytes) -> str:
    """Returns the kind of a line that `RunRecorder` wrote, "" where there is none.

    The line is not parsed: its kind is the first value, between the third quotation mark and the
    fourth.
    """
    if line.count(b'"', 0, _HEAD) < 4:
        return ""
    return line[:_HEAD].split(b'"', 4)[3].decode("ascii", "replace")


def parse_line(line: bytes) -> Record:
    """Returns the record of a line. Raises ValueError when the line is not a record."""
    # Every line that `RunRecorder` wrote is ASCII. In other lines, msgspec looks less closely at
    # the values that it passes over.
    if line.isascii():
        try:
            envelope = _envelope(line)
            return Record(envelope.run_id, envelope.seq, envelope.time, _event(line))
        except (MsgspecError, ValueError, RecursionError):
            # json may accept the line all the same: one of an unknown kind, one that names a field
            # twice, one with NaN where anything may stand.
            pass
    try:
        return Record.from_json(_loaded(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"not a record: {error}") from None


def _loaded(line: bytes) -> Any:
    """Returns the JSON values of a line, with nothing in them that cannot be sent to a page.

    Raises ValueError where the line is not JSON.
    """
    values = json.loads(line)
    # Half of a surrogate pair, which a file's name may contain, is no text: it becomes "?".
    if b"\\u" in line or not line.isascii():
        values = json.loads(json.dumps(values, ensure_ascii=False).encode("utf-8", "replace"))
    return values


# ---------------------------------------------------------------------- writing


def encode_line(record: Record) -> bytes:
    """Returns the line of a record, in ASCII and with its line break.

    Raises ValueError for a number that is not finite, and TypeError for a value without a JSON
    form.
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
    """Yields each float in a JSON value with words for its place."""
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}")
            yield from _numbers(key, f"{name}: a key")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{name}[{index}]")
