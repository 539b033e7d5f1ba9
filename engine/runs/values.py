"""What the fields of an event may hold: what is read from a record is computed with and drawn unseen. Two ways to tell, with
one answer: `field_rules` for any line, and `PlainForm` for the lines that a record consists of, at a fraction of the time."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

LARGEST_WHOLE = 1 << 53
"""What a page still holds exactly, and sums of which fit into 64 bits."""
_LARGEST = sys.float_info.max


def _is_number(value: Any) -> bool:
    return type(value) in (float, int) and -_LARGEST <= value <= _LARGEST


def _is_whole_or_none(value: Any) -> bool:
    return value is None or -LARGEST_WHOLE <= value <= LARGEST_WHOLE


def _are_numbers(value: list[Any]) -> bool:
    return all(map(_is_number, value))


def _are_numbers_by_name(value: dict[str, Any]) -> bool:
    return all(map(_is_number, value.values()))


def _are_texts(value: Iterable[Any]) -> bool:
    return all(isinstance(text, str) for text in value)


def _are_texts_by_name(value: list[Any]) -> bool:
    return all(isinstance(texts, dict) and _are_texts(texts.values()) for texts in value)


def _are_spans(value: list[Any]) -> bool:
    for span in value:  # a loop, as a timeline has hundreds of these
        if not (isinstance(span, dict) and isinstance(span.get("unit"), str) and isinstance(span.get("op"), str)
                and isinstance(span.get("lane"), str) and _is_number(span.get("start")) and _is_number(span.get("end"))):
            return False
    return True


def _are_waits(value: list[Any]) -> bool:
    return all(isinstance(wait, dict) and isinstance(wait.get("cause", "other"), str)
               and all(_is_number(wait.get(name)) for name in ("start", "end")) for wait in value)


def _are_answers(value: list[Any]) -> bool:
    return all(isinstance(pair, dict) and all(isinstance(pair.get(name), str) for name in ("prompt", "answer"))
               for pair in value)


def _are_comparisons(value: dict[str, Any]) -> bool:
    names = ("predicted", "measured", "error")
    return all(isinstance(pair, dict) and all(pair.get(name) is None or _is_number(pair[name]) for name in names)
               for pair in value.values())


def _are_choices(value: dict[str, Any]) -> bool:
    seconds = value.get("predicted_seconds")
    return seconds is None or _is_number(seconds)


# ------------------------------------------------------------------ any line

Rule = tuple[tuple[type, ...], float | None, float | None]
"""The types that a field's value may have, the least and the greatest number."""
Check = Callable[[Any], bool]
_RULES: dict[str, Rule] = {
    "int": ((int,), -LARGEST_WHOLE, LARGEST_WHOLE), "float": ((float, int), -_LARGEST, _LARGEST), "str": ((str,), None, None),
    "int | None": ((int, NoneType), None, None)}
_CHECKS_BY_TYPE: dict[str, Check] = {
    "int | None": _is_whole_or_none, "list[str]": _are_texts, "list[float]": _are_numbers,
    "list[dict[str, str]]": _are_texts_by_name, "dict[str, float]": _are_numbers_by_name,
    "dict[str, dict[str, float | None]]": _are_comparisons}
_CHECKS_BY_NAME: dict[str, Check] = {
    "spans": _are_spans, "waits": _are_waits, "answers": _are_answers, "choices": _are_choices}


def field_rules(event_type: type, checks_by_name: Mapping[str, Check]) -> tuple[dict[str, Rule], tuple[tuple[str, Check], ...]]:
    """The rule of each field of a dataclass, and what tells whether a value that has an inside is good there; `checks_by_name`
    adds to the checks of this module. Types are compared exactly, as JSON makes no others: it is fastest, and `true` is no
    number."""
    fields = {f.name: f.type for f in dataclasses.fields(event_type)}
    rules = {name: _RULES.get(kind) or ((list if kind.startswith("list") else dict,), None, None)
             for name, kind in fields.items()}
    by_name = {**_CHECKS_BY_NAME, **checks_by_name}
    checks = {name: by_name.get(name) or _CHECKS_BY_TYPE.get(kind) for name, kind in fields.items()}
    return rules, tuple((name, check) for name, check in checks.items() if check is not None)


# ------------------------------------------------------------------ lines in the form that this version writes


def _are_ordinary(numbers: Iterable[Any]) -> bool:
    for number in numbers:  # a loop, as each step has one of these
        if type(number) not in (float, int) or not -LARGEST_WHOLE <= number <= LARGEST_WHOLE:
            return False
    return True


def _are_ordinary_by_name(numbers: dict[str, Any]) -> bool:
    return _are_ordinary(numbers.values())


_PLAIN: dict[str, tuple[tuple[type, ...], float | None, Check | None]] = {
    "int": ((int,), LARGEST_WHOLE, None), "float": ((float, int), float(LARGEST_WHOLE), None),
    "list[float]": ((list,), None, _are_ordinary), "dict[str, float]": ((dict,), None, _are_ordinary_by_name)}


class PlainForm:
    """Tells of the fields of one event type, read from a line, whether they are numbers of ordinary size: what passes here
    passes `field_rules` too, and reads the same whichever JSON parser read it. Only for types that consist of numbers."""

    def __init__(self, event_type: type, envelope: tuple[str, ...]):
        fields = dataclasses.fields(event_type)
        self.names = (*envelope, *(f.name for f in fields))
        """Of a line in this form, in their order."""
        self._plan = tuple(_PLAIN[f.type] for f in fields)

    def holds(self, values: Iterable[Any]) -> bool:
        """`values`: of the event's fields, in their order. A line that is of another form may still be a good one."""
        for value, (types, most, is_good) in zip(values, self._plan):
            if type(value) not in types:
                return False
            if not -most <= value <= most if is_good is None else not is_good(value):
                return False
        return True

    def holds_all(self, columns: Sequence[Sequence[Any]]) -> bool:
        """`holds`, of rows of values by field."""
        for column, (types, most, is_good) in zip(columns, self._plan):
            if not set(map(type, column)).issubset(types):
                return False
            if not (-most <= min(column) and max(column) <= most if is_good is None else all(map(is_good, column))):
                return False
        return True
