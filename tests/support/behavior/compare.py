"""Two trees of JSON values beside each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MISSING = "<missing>"


@dataclass(frozen=True)
class Difference:
    """`path` names the area, the thing and the place in it."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}\n    before: {_short(self.before)}\n    after:  {_short(self.after)}"


def differences(before: Any, after: Any, path: str = "") -> list[Difference]:
    """Where the two differ. Numbers are equal when they are to the bit, and have the same type."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = []
        for key in [*before, *(key for key in after if key not in before)]:
            found += differences(before.get(key, MISSING), after.get(key, MISSING), f"{path}/{key}")
        if not found and list(before) != list(after):
            found.append(Difference(f"{path}/<order of keys>", list(before), list(after)))
        return found
    if isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            first = next(
                (place for place, (one, other) in enumerate(zip(before, after)) if one != other),
                min(len(before), len(after)),
            )
            return [
                Difference(
                    f"{path}/<{len(before)} items, {len(after)} items; first difference>",
                    *(items[first] if first < len(items) else MISSING for items in (before, after)),
                )
            ]
        found = []
        for place, (one, other) in enumerate(zip(before, after)):
            found += differences(one, other, f"{path}/{place}")
        return found
    are_both_nan = before != before and after != after
    if type(before) is not type(after) or (before != after and not are_both_nan):
        return [Difference(path, before, after)]
    return []


def count(value: Any) -> int:
    """How many values a tree holds: its leaves."""
    if isinstance(value, dict):
        return sum(map(count, value.values())) or 1
    if isinstance(value, list):
        return sum(map(count, value)) or 1
    return 1


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 300 else f"{text[:297]}..."
