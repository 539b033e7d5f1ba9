"""Lines of a run's record as records, one line at a time. Whoever reads a record reads it through
this module.
"""

from __future__ import annotations

import json
from typing import Any, Union

from msgspec import MsgspecError
from msgspec.json import Decoder

from engine.runs.events import EVENT_TYPES, Envelope, Record

_envelope = Decoder(Envelope).decode
_event = Decoder(Union[tuple(EVENT_TYPES.values())]).decode


def line_kind(line: bytes) -> str:
    """The kind of a line that `RunRecorder` wrote, read without parsing the line: it is the first
    value.
    """
    return (
        line[:80].split(b'"', 4)[3].decode("ascii", "replace")
        if line.count(b'"', 0, 80) >= 4
        else ""
    )


def parse_line(line: bytes) -> Record:
    """Raises ValueError when the line is not a record."""
    # as every line that `RunRecorder` wrote; in others, msgspec looks at what it passes over less
    # closely
    if line.isascii():
        try:
            envelope = _envelope(line)
            return Record(envelope.run_id, envelope.seq, envelope.time, _event(line))
        except (MsgspecError, ValueError, RecursionError):
            # json may take it all the same: an unknown kind, a field that is named twice, NaN where
            # anything may stand
            pass
    try:
        return Record.from_json(_loaded(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"not a record: {error}") from None


def _loaded(line: bytes) -> Any:
    """The JSON values of a line, with nothing in them that a page cannot be sent. Raises ValueError
    where it is not JSON.
    """
    values = json.loads(line)
    if (
        b"\\u" in line or not line.isascii()
    ):  # half of a surrogate pair, as a file's name may have it, is no text
        values = json.loads(json.dumps(values, ensure_ascii=False).encode("utf-8", "replace"))
    return values
