"""Typed fields of a request's body, each refused by its name in a sentence."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engine.errors import RamstreamError

LONGEST_QUOTE = 60


class RequestFault(RamstreamError):
    """A request that is refused. `field` is the name of its wrong field, if one is to blame."""

    def __init__(self, sentence: str, field: str | None = None, code: str | None = None):
        super().__init__(sentence)
        self.field = field
        self.code = code


class Fields:
    """The fields of a JSON object. A field that is null counts as left out."""

    def __init__(self, body: dict[str, Any]):
        self._body = body

    def get(self, name: str) -> Any:
        """Returns a value of any type, or None."""
        return self._body.get(name)

    def number(
        self, name: str, default: float, low: float, high: float, is_open: bool = False
    ) -> float:
        """Returns a number from `low` to `high`. is_open: `low` itself is refused, too."""
        value = self.get(name)
        if value is None:
            return default
        # To Python, True and False are numbers too.
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (is_open and value == low):
            bounds = f"above {low:g} and at most {high:g}" if is_open else f"{low:g} to {high:g}"
            raise RequestFault(f"{name}: {quoted(value)} is not a number, {bounds}.", name)
        return float(value)

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        """Returns a whole number from `low` to `high`."""
        value = self.get(name)
        if value is None:
            return default
        if not _is(value, int) or not low <= value <= high:
            raise RequestFault(
                f"{name}: {quoted(value)} is not a whole number, {low} to {high}.", name
            )
        return int(value)

    def switch(self, name: str) -> bool:
        """Returns true or false, which a field that is left out is."""
        value = self.get(name)
        if value is not None and not _is(value, bool):
            raise RequestFault(f"{name}: {quoted(value)} is not true or false.", name)
        return bool(value)

    def text(self, name: str) -> str:
        """Returns a text that has to be there."""
        value = self.get(name)
        if not _is(value, str) or not value:
            raise RequestFault(f"{name} is missing; it is a text.", name)
        return str(value)

    def refuse_unless_neutral(self, name: str, neutral: Collection[Any]) -> None:
        """Refuses a field that would change the answer, unless it has a value that does not."""
        value = self.get(name)
        if value is not None and value not in neutral:
            raise RequestFault(f"{name}: this is not supported here; leave it out.", name)


def list_of(value: Any, kind: type) -> bool:
    """Returns whether a value is a list of texts, or of whole numbers, and not empty."""
    return isinstance(value, list) and bool(value) and all(_is(each, kind) for each in value)


def quoted(value: Any) -> str:
    """Returns a value for a sentence, which it may not make long."""
    shown = repr(value)
    return shown if len(shown) <= LONGEST_QUOTE else f"{shown[: LONGEST_QUOTE - 1]}…"


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
