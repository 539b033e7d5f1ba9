"""Places of values in nested arguments. A place is a tuple of keys: names in dicts, numbers
in lists and tuples.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Place = tuple[Any, ...]


def is_container(value: Any) -> bool:
    """Returns whether values inside this one have places."""
    return isinstance(value, (dict, UserDict, list, tuple))


def places_in(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yields every value inside nested containers with its place, enclosing ones first."""
    if not is_container(value):
        return
    items = value.items() if isinstance(value, (dict, UserDict)) else enumerate(value)
    for key, inner in items:
        yield (*place, key), inner
        yield from places_in(inner, (*place, key))


def value_at(value: Any, place: Place) -> Any:
    """Returns the value at a place. Raises LookupError where there is none."""
    for key in place:
        value = value[key]
    return value


def replaced(value: Any, changes: Mapping[Place, Any]) -> Any:
    """Returns a copy of nested containers with other values at some places. Only the containers on
    the way to a change are copied. A dict takes keys that it lacks.
    """
    if () in changes:
        return changes[()]
    inside: dict[Any, dict[Place, Any]] = {}
    for place, new in changes.items():
        inside.setdefault(place[0], {})[place[1:]] = new
    copied = list(value) if isinstance(value, tuple) else copy.copy(value)
    for key, rest in inside.items():
        copied[key] = replaced(None if () in rest else copied[key], rest)
    return type(value)(copied) if isinstance(value, tuple) else copied


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a copy of nested containers with `change` applied to each tensor, of any shape."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (dict, UserDict)):
        return type(value)({key: mapped(inner, change) for key, inner in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(inner, change) for inner in value)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested containers, of any shape, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [inner for _, inner in places_in(value) if isinstance(inner, torch.Tensor)]
