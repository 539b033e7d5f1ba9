"""Lines of a run's record as records, one line at a time. Whoever reads a record reads it through this module."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from engine.runs.events import PLAIN_KINDS, Event, Record, StepTimeline, UnreadTimeline


def _loads_ascii(line: bytes) -> Any:
    """By json, what can hold no half of a surrogate pair, which is no text and which orjson refuses as well."""
    if b"\\" in line or not line.isascii():
        raise ValueError("not plain")
    return json.loads(line)


try:
    from orjson import loads as _loads
except ImportError:  # where only the engine runs; it gives the same records, in more time
    _loads = _loads_ascii


def plain_start(kind: type[Event]) -> bytes:
    """What a line of this kind that `RunRecorder` wrote begins with."""
    return f'{{"kind":"{kind.kind}",'.encode("ascii")


_PLAIN_STARTS = tuple(map(plain_start, PLAIN_KINDS))
_LONG_NUMBER = re.compile(rb"[:,\[\s]-?[0-9]{19}")
"""A whole number that may not fit into 64 bits, of which orjson makes a float."""
_LINE_START = b'{"kind":"'
TIMELINE_START = plain_start(StepTimeline)
_TIMELINE = re.compile(re.escape(TIMELINE_START) + rb'"run_id":"([^"\\\x00-\x1f\x7f-\xff]*)","seq":(0|[1-9][0-9]{0,14}),'
                       rb'"time":((?:0|[1-9][0-9]{0,10})\.[0-9]{1,20}),"step":(0|[1-9][0-9]{0,14}),"spans":\[')


def line_kind(line: bytes) -> str:
    """The kind of a line that `RunRecorder` wrote, read without parsing the line: it is the first value."""
    return line[:80].split(b'"', 4)[3].decode("ascii", "replace") if line.count(b'"', 0, 80) >= 4 else ""


def parse_line(line: bytes) -> Record:
    """Raises ValueError when the line is not a record."""
    try:
        if line.startswith(_PLAIN_STARTS):
            try:
                record = Record.from_plain(_loads(line))
                if record is not None:
                    return record
            except ValueError:  # json may take it all the same
                pass
        return Record.from_json(loaded(line))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a record: {error}") from None


def plain_values(lines: Iterable[bytes]) -> list[Any]:
    """The JSON values of each line, as any parser reads them where they are of the form that `Record.from_plain` takes. Raises
    ValueError where one is not JSON."""
    return [_loads(line) for line in lines]


def unread_timeline(line: bytes) -> Record | None:
    """A line of a `StepTimeline` with its spans left unread, as an `UnreadTimeline`; None unless it begins and ends exactly
    as `RunRecorder` writes such a line, and holds no zeros (of a disk that lost a block), no byte that is not ASCII and no
    second line."""
    head = _TIMELINE.match(line)
    if head is None or not line.endswith(b"]}\n") or not line.isascii() or b"\0" in line or line.find(_LINE_START, 1) > 0:
        return None
    run_id, seq, time, step = head.groups()
    return Record(run_id.decode("ascii"), int(seq), float(time), UnreadTimeline(int(step), line))


def loaded(line: bytes) -> Any:
    """The JSON values of a line, with nothing in them that a page cannot be sent. Raises ValueError where it is not JSON."""
    if not _LONG_NUMBER.search(line):
        try:
            return _loads(line)
        except ValueError:  # json may take it all the same: NaN, for instance, which a check then refuses by its field
            pass
    values = json.loads(line)
    if b"\\u" in line or not line.isascii():  # half of a surrogate pair, as a file's name may have it, is no text
        values = json.loads(json.dumps(values, ensure_ascii=False).encode("utf-8", "replace"))
    return values
