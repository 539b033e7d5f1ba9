"""Trees of plain values, as YAML and forms give them, into dataclasses, with every mistake named by
its dotted field.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import reprlib
import types
import typing
from dataclasses import fields
from typing import Any, Literal

import yaml

from engine.errors import ConfigError


def build(cls: type, tree: Any, prefix: str) -> Any:
    """An instance of the dataclass `cls` from a mapping of its fields, dataclasses among them built
    alike. `prefix` is the dotted path of `tree`, with its dot. Raises ConfigError naming the first
    unknown or mistyped field.
    """
    if not isinstance(tree, dict):
        raise ConfigError(
            prefix.rstrip(".") or "preset", f"expected a mapping of settings, found {_shown(tree)}."
        )
    hints = typing.get_type_hints(cls)
    known = {f.name for f in fields(cls)}
    for key in tree:
        if key not in known:
            near = _nearest(str(key), known)
            raise ConfigError(f"{prefix}{key}", f"there is no such setting{near}.")
    values = {}
    for name, value in tree.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            values[name] = build(hint, {} if value is None else value, f"{prefix}{name}.")
        else:
            values[name] = _coerce(hint, value, f"{prefix}{name}")
    return cls(**values)


def _coerce(hint: Any, value: Any, name: str) -> Any:
    options = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )
    for option in options:
        if option is type(None):
            if value is None:
                return None
        elif typing.get_origin(option) is Literal:
            if value in typing.get_args(option) and isinstance(value, str):
                return value
        elif option is bool:
            if isinstance(value, bool):
                return value
        elif option is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return value
            number = _number(value)
            if number is not None and number.is_integer():
                return int(number)
        elif option is float:
            number = _number(value)
            if number is not None:
                return number
        elif option is str:
            if isinstance(value, str):
                return value
            if isinstance(value, (int, float, datetime.date)) and not isinstance(value, bool):
                return str(value)
        elif option == tuple[str, ...]:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
                return tuple(items)
        elif typing.get_origin(option) is tuple:
            if isinstance(value, (list, tuple)) and value:
                part = typing.get_args(option)[0]
                return tuple(
                    build(
                        part, {"source": item} if isinstance(item, str) else item, f"{name}[{k}]."
                    )
                    for k, item in enumerate(value)
                )
    raise ConfigError(name, f"{_shown(value)} is not {_describe(options)}.")


def _number(value: Any) -> float | None:
    """A finite number, also from text, since YAML reads 3e-4 (no dot) as text; None for anything
    else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 3


def _shown(value: Any) -> str:
    """A value as a preset writes it, cut where it is long: aliases make values that no memory holds
    when written out.
    """
    text = json.dumps(value) if value is None or isinstance(value, bool) else _SHORT.repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _describe(options: tuple[Any, ...]) -> str:
    words: list[str] = []
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    for option in options:
        if typing.get_origin(option) is Literal:
            words.extend(str(v) for v in typing.get_args(option))
        elif option == tuple[str, ...]:
            words.append("a list of texts")
        elif typing.get_origin(option) is tuple:
            words.append("a list of {source, weight, split, format, columns}")
        else:
            words.append(names[option])
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ConfigError(str(twice), "this is given twice in one section; keep one of them.")
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Raises yaml.YAMLError, and ConfigError for a key given twice."""
    try:
        return yaml.load(text, _UniqueKeys)
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        # PyYAML lets these through for values such as the date 2024-13-45.
        raise yaml.YAMLError(str(error)) from None


def override(tree: dict[str, Any], text: str) -> None:
    """Apply `a.b=value`, the value in YAML syntax. Raises ConfigError."""
    dotted, equals, raw = text.partition("=")
    if not equals or not dotted.strip():
        raise ConfigError("--set", f"{text!r} is not of the form section.field=value.")
    try:
        value = read_yaml(raw)
    except yaml.YAMLError:
        raise ConfigError(dotted.strip(), f"{raw!r} cannot be read as a value.") from None
    assign(tree, dotted.strip(), value)


def assign(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set the field `dotted` names, making sections on the way. Raises ConfigError where there is
    none.
    """
    *path, last = dotted.split(".")
    for part in path:
        if tree.get(part) is None:
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            raise ConfigError(dotted, "there is no such setting.")
    tree[last] = value


def _nearest(key: str, known: set[str]) -> str:
    import difflib

    match = difflib.get_close_matches(key, sorted(known), n=1)
    return f"; did you mean {match[0]}" if match else f"; known here are {', '.join(sorted(known))}"
