"""Keys that may mean what is not to be trained, but are in no table: a key of a turn, of a part or
of a row that is true or false, 0 or 1, or yes or no.

Whether one is such a flag is known by its values alone, since programs call them what they like. A
run asks about each once: `data.unused_flags` names those that do not concern training.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.data.formats.flags import KNOWN, LAST_ALONE, LISTS, ROW_WEIGHTS
from engine.data.formats.roles import plain_name
from engine.data.formats.turns import as_turns
from engine.data.formats.values import legible, listed
from engine.data.sources.json_files import Row
from engine.data.sources.not_trained import MEDIA_COLUMNS
from engine.errors import DataError

TURN_PARTS = ("messages", "prompt", "completion", "chosen", "rejected", "model_a", "model_b")
"""Parts of a row that may be turns."""
_COUNTED = frozenset(
    (
        *("id", "ids", "idx", "index", "num", "number", "nr", "no", "n", "count", "counts"),
        *("total", "turn", "turns", "round", "step", "position", "pos", "order", "rank", "line"),
        *("length", "len", "size", "tokens", "chars", "words", "seed", "version", "epoch", "shard"),
        *("year", "month", "day"),
    )
)
"""Words of a name by which the numbers 0 and 1 count something."""
_OF_REQUESTS = frozenset(
    (
        *("temperature", "top_p", "top_k", "n", "stream", "store", "seed", "best_of", "echo"),
        *("logprobs", "top_logprobs", "presence_penalty", "frequency_penalty"),
        "parallel_tool_calls",
    )
)
"""Keys that logs of requests have beside the turns."""
ROW_KNOWN = frozenset((*KNOWN, *ROW_WEIGHTS, *LISTS, *LAST_ALONE))
"""Names of columns that are read, or refused."""
_READ = frozenset(
    (
        *("role", "from", "content", "value", "text", "message", "parts"),
        *("tool_calls", "function_call", "refusal", "thought", "is_error"),
    )
)
"""Names of keys of turns and of parts that are read, or refused, wherever they stand."""
_MARKS = ("label", "kto_tag")
"""Names of columns that mark answers as good or bad, or hold classes."""
_LONGEST_WORD = 8
_CONTENTS = ("content", "value", "parts")


class UnknownFlags(DataError):
    """Raised for a row with keys that may be flags. `names` are these keys, and all others that the
    rows have.
    """

    def __init__(self, sentence: str, names: tuple[str, ...]):
        super().__init__(sentence)
        self.names = names

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.names)


_SWITCH, _DIGIT, _OTHER, _YES_OR_NO = 1, 2, 4, 8
_WORDS = {
    **dict.fromkeys(("true", "false"), _SWITCH),
    **dict.fromkeys(("yes", "no"), _YES_OR_NO),
    **dict.fromkeys(("0", "1"), _DIGIT),
}
_MOST_KEYS = 20_000


@dataclass
class KeySurvey:
    """What the keys of rows, of their turns and of their parts hold, in as many rows as were added.
    A key that is 0 or 1, or yes or no, in some rows and something else in others is no flag.
    """

    kinds: dict[tuple[str, str], int] = field(default_factory=dict)
    """For each column and key, with no key for the column itself, the sum of `_SWITCH` (true or
    false), `_DIGIT` (0 or 1), `_YES_OR_NO` and `_OTHER`, as far as they occur.
    """

    def add(self, row: Row) -> None:
        """Adds a row."""
        for column, value in row.items():
            if value is None or not isinstance(column, str):
                continue
            turns = _turns(value)
            for turn in turns:
                for key, inner in _keys_of_turn(turn):
                    self._add(column, key, inner)
            if not turns:
                self._add(column, "", value)

    def joined(self, other: KeySurvey) -> KeySurvey:
        """Returns the survey of both."""
        kinds = dict(self.kinds)
        for key, kind in other.kinds.items():
            kinds[key] = kinds.get(key, 0) | kind
        return KeySurvey(kinds)

    def to_plain(self) -> list[Any]:
        """Returns the survey as values of JSON."""
        return [[*key, kind] for key, kind in self.kinds.items()]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> KeySurvey:
        """Returns the survey of which `to_plain` returned the values."""
        return cls({(column, key): kind for column, key, kind in plain})

    def figures(self) -> list[str]:
        """Returns the keys, as `_path` writes them, that hold numbers or texts and are no flags."""
        return [
            _path(*key)
            for key, kind in self.kinds.items()
            if kind & _OTHER and kind & (_DIGIT | _YES_OR_NO) and not kind & _SWITCH
        ]

    def possible(self, columns: Mapping[str, str], used: Collection[str]) -> list[str]:
        """Returns the names of the keys that may be flags, where `columns` has the column of each
        part and `used` are all columns that are read.
        """
        with_turns = {columns[part] for part in TURN_PARTS if part in columns}
        found = []
        for (column, key), kind in self.kinds.items():
            is_read = column not in with_turns if key else column in used or _is_known(column)
            flags = _SWITCH
            if not kind & _OTHER:
                flags |= _YES_OR_NO if _counts(key or column) else _YES_OR_NO | _DIGIT
            if not is_read and kind & flags:
                found.append(key or column)
        return list(dict.fromkeys(found))

    def _add(self, column: str, key: str, value: Any) -> None:
        at = (column, key)
        known = self.kinds.get(at)
        if known is None and len(self.kinds) >= _MOST_KEYS:
            return
        self.kinds[at] = (known or 0) | _kind(value)


def refuse_unknown_flags(
    row: Row,
    columns: Mapping[str, str],
    used: Collection[str],
    known: Collection[str],
    figures: Collection[str],
    also: Collection[str],
    where: str,
) -> None:
    """Raises UnknownFlags if the row has a key that may be a flag and is neither among the `known`
    ones nor among the `figures` of a survey. It also names `also`, such keys of other rows.
    """
    for column, key, value, place in _keys(row, columns, used, where):
        name = key or column
        kind = _kind(value)
        if kind == _OTHER or name in known or _path(column, key) in figures:
            continue
        if kind == _DIGIT and _counts(name):
            continue
        raise flags_error(tuple(dict.fromkeys([name, *also])), place)


def flags_error(names: tuple[str, ...], place: str) -> UnknownFlags:
    """Returns the error for the keys `names`, of which the first one stands at `place`."""
    more = f" (and so may {listed(names[1:])})" if len(names) > 1 else ""
    return UnknownFlags(
        f"The key {legible(names[0])} in {place} is true or false, 0 or 1, or yes or no, and may "
        f"say what is not to be trained{more}; set data.unused_flags to [{listed(names)}] if it "
        "does not, or call it train, with true for what is trained.",
        names,
    )


def _keys(
    row: Row, columns: Mapping[str, str], used: Collection[str], where: str
) -> Iterator[tuple[str, str, Any, str]]:
    """Yields the column and the key, the value and the place of what nothing reads in a row, its
    turns and their parts.
    """
    for column, value in row.items():
        is_unread = value is not None and isinstance(column, str) and column not in used
        if is_unread and not _is_known(column):
            yield column, "", value, where
    for part in TURN_PARTS:
        column = columns.get(part, "")
        for number, turn in enumerate(_turns(row.get(column)), 1):
            for key, value in _keys_of_turn(turn):
                yield column, key, value, f"turn {number} of {column} in {where}"


def _turns(value: Any) -> list[dict[Any, Any]]:
    """Returns the turns that a value holds, or none."""
    if isinstance(value, str) and value.lstrip()[:1] not in ("[", "{"):
        return []
    if not isinstance(value, list | tuple | dict | str):
        return []
    return [turn for turn in as_turns(value) or () if isinstance(turn, dict)]


def _keys_of_turn(turn: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the keys of a turn and of its parts that nothing reads."""
    if not turn.keys() <= _READ:
        yield from _unread(turn)
    for name in _CONTENTS:
        inner = turn.get(name)
        for part in inner if isinstance(inner, list | tuple) else ():
            if isinstance(part, dict):
                yield from _unread(part)


def _unread(keys: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in keys.items():
        if value is None or not isinstance(key, str) or key in _READ:
            continue
        name = plain_name(key)
        if name not in KNOWN and name not in _READ and name not in MEDIA_COLUMNS:
            yield key, value


@functools.lru_cache(1 << 12)
def _is_known(column: str) -> bool:
    """Whether a column beside the turns is in a table of flags, marks an answer, or belongs to a
    request.
    """
    name = plain_name(column)
    return name in ROW_KNOWN or name in _OF_REQUESTS or name in _MARKS or name in MEDIA_COLUMNS


def _kind(value: Any) -> int:
    """Returns `_SWITCH` for true or false, `_DIGIT` for 0 or 1, `_YES_OR_NO`, and `_OTHER` for
    anything else. Each may be text, as in a table.
    """
    if isinstance(value, bool):
        return _SWITCH
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower(), _OTHER) if len(value) < _LONGEST_WORD else _OTHER
    return _DIGIT if isinstance(value, int | float) and value in (0, 1) else _OTHER


@functools.lru_cache(1 << 12)
def _counts(name: str) -> bool:
    """Whether the numbers under a name count something."""
    return not _COUNTED.isdisjoint(re.split(r"[\W_]+", plain_name(name)))


def _path(column: str, key: str) -> str:
    return f"{column}/{key}" if key else column
