"""Trees of plain values, from YAML or a form, as dataclasses. Every error names its field by its
dotted path.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import json
import math
import reprlib
import types
import typing
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Literal

import yaml

from engine import safe_files
from engine.config.limits import check_limits
from engine.errors import ConfigError

MOST_BYTES = 1 << 18
"""Largest number of bytes of the settings of a run, which somebody else may have written."""


def build(cls: type[Any], tree: Any, prefix: str) -> Any:
    """Returns an instance of the dataclass `cls` from a mapping of its fields. Fields that are
    dataclasses are built in the same way. `prefix` is the dotted path of `tree`, with a final dot.
    Raises ConfigError, which names the first unknown or mistyped field.
    """
    if not isinstance(tree, dict):
        raise ConfigError(
            prefix.rstrip(".") or "preset", f"expected a mapping of settings, found {_shown(tree)}."
        )
    hints = _hints(typing.cast(Hashable, cls))
    for key in tree:
        if key not in hints:
            near = _nearest(str(key), sorted(hints))
            raise ConfigError(f"{prefix}{key}", f"there is no such setting{near}.")
    values = {}
    for name, value in tree.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            section = {} if value is None else value
            values[name] = build(hint, section, f"{prefix}{name}.")
        else:
            values[name] = _coerce(hint, value, f"{prefix}{name}")
    return cls(**values)


@functools.cache
def _hints(cls: Hashable) -> dict[str, Any]:
    """Returns the types of a class's fields, with their limits. Python evaluates the hints anew at
    each call, which takes longer than all the rest of building a configuration.
    """
    return typing.get_type_hints(cls, include_extras=True)


class _NoValue:
    """Stands for a value that does not have the wanted type; the class itself is returned. None
    cannot be used for this, because it is a valid value.
    """


def _coerce(hint: Any, value: Any, name: str) -> Any:
    """Returns `value` converted to the type `hint` or, for a union, to the first of its types that
    accepts the value. A number is within the limits of an annotated type. Raises ConfigError, which
    names the field `name`.
    """
    if limits := getattr(hint, "__metadata__", ()):  # of an annotated type
        found = _coerce(hint.__origin__, value, name)
        check_limits(name, found, *limits)
        return found
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    for option in options:
        found = _as_type(option, value, name)
        if found is not _NoValue:
            return found
    raise ConfigError(name, f"{_shown(value)} is not {_describe(options)}.")


def _as_type(option: Any, value: Any, name: str) -> Any:
    """Returns `value` converted to the single type `option`, or _NoValue."""
    if typing.get_origin(option) is Literal:
        is_choice = isinstance(value, str) and value in typing.get_args(option)
        return value if is_choice else _NoValue
    if typing.get_origin(option) is tuple and option != tuple[str, ...]:
        return _sections(typing.get_args(option)[0], value, name)
    return _READERS[option](value)


def _null(value: Any) -> Any:
    return None if value is None else _NoValue


def _switch(value: Any) -> Any:
    return value if isinstance(value, bool) else _NoValue


def _whole(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # unchanged: a float cannot represent every large integer
    number = _real(value)
    return int(number) if number is not _NoValue and number.is_integer() else _NoValue


def _real(value: Any) -> Any:
    """Returns a finite number. Text is converted too, because YAML reads 3e-4 (no dot) as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return _NoValue
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return _NoValue
    return number if math.isfinite(number) else _NoValue


def _text(value: Any) -> Any:
    if isinstance(value, str):
        return value
    # YAML reads 2024 as a number and 2024-05-01 as a date.
    if isinstance(value, (int, float, dt.date)) and not isinstance(value, bool):
        return str(value)
    return _NoValue


def _texts(value: Any) -> Any:
    items = [value] if isinstance(value, str) else value
    if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
        return tuple(items)
    return _NoValue


_READERS: dict[Any, Callable[[Any], Any]] = {
    types.NoneType: _null,
    bool: _switch,
    int: _whole,
    float: _real,
    str: _text,
    tuple[str, ...]: _texts,
}
"""The function that converts a value to each type."""


def _sections(part: type[Any], value: Any, name: str) -> Any:
    """Returns a tuple of instances of the dataclass `part` from a list. An item that is text is
    taken as the `source` of its instance.
    """
    if not isinstance(value, (list, tuple)) or not value:
        return _NoValue
    found = []
    for place, item in enumerate(value):
        tree = {"source": item} if isinstance(item, str) else item
        found.append(build(part, tree, f"{name}[{place}]."))
    return tuple(found)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 3


def _shown(value: Any) -> str:
    """Returns a value as written in a preset, shortened if it is long: with YAML's aliases, a value
    written out in full can exceed any memory.
    """
    is_yaml_word = value is None or isinstance(value, bool)
    text = json.dumps(value) if is_yaml_word else _SHORT.repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
    tuple[str, ...]: "a list of texts",
}


def _describe(options: tuple[Any, ...]) -> str:
    """Returns the types of a setting as text."""
    parts: list[str] = []
    for option in options:
        if typing.get_origin(option) is Literal:
            parts.extend(str(choice) for choice in typing.get_args(option))
        elif option in _TYPE_NAMES:
            parts.append(_TYPE_NAMES[option])
        else:
            parts.append("a list of {source, weight, split, format, columns}")
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " or " + parts[-1]


# The loader in C is ten times as fast, and a list of a thousand runs reads as many configurations.
# PyYAML lacks it where it was built without that library.
_Loader: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class _UniqueKeys(_Loader):
    """A YAML loader that refuses a key given twice. YAML would silently keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ConfigError(str(twice), "this is given twice in one section; keep one of them.")
        values: dict[Any, Any] = super().construct_mapping(node, deep)
        return values


def read_yaml(text: str) -> Any:
    """Returns the value of a YAML text. Raises yaml.YAMLError, or ConfigError for a key that is
    given twice.
    """
    try:
        return yaml.load(text, _UniqueKeys)  # a safe loader, which makes only plain values
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        # PyYAML does not convert these errors, for example for the date 2024-13-45.
        raise yaml.YAMLError(str(error)) from None


def override(tree: dict[str, Any], text: str) -> None:
    """Sets a value in `tree` according to `text`, which is `a.b=value` with the value in YAML
    syntax. Raises ConfigError for text of any other form.
    """
    dotted, equals, raw = text.partition("=")
    if not equals or not dotted.strip():
        raise ConfigError("--set", f"{text!r} is not of the form section.field=value.")
    try:
        value = read_yaml(raw)
    except yaml.YAMLError:
        raise ConfigError(dotted.strip(), f"{raw!r} cannot be read as a value.") from None
    assign(tree, dotted.strip(), value)


def assign(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Sets the field of `tree` that `dotted` names, and creates missing sections. Raises
    ConfigError if a part of the path is not a section.
    """
    *path, last = dotted.split(".")
    for part in path:
        if tree.get(part) is None:
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            raise ConfigError(dotted, "there is no such setting.")
    tree[last] = value


def by_dotted_name(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested settings by dotted name; lists are leaves."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            leaves |= by_dotted_name(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def _nearest(key: str, known: list[str]) -> str:
    """Returns the end of an error: the setting that `key` may have meant, or else all known
    settings.
    """
    import difflib

    match = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {match[0]}" if match else f"; known here are {', '.join(known)}"


def read_preset(path: Path, within: Path | None = None) -> dict[str, Any]:
    """Returns the tree of a YAML preset. Raises ConfigError, which names the file.

    With `within`, the file is in a folder that others may have written (`engine.safe_files`);
    without it, a person has named it.
    """
    try:
        if within is None:
            text = path.read_text(encoding="utf-8")
        else:
            text = safe_files.read_text(path, within, MOST_BYTES)
        tree = read_yaml(text)
    except safe_files.FileFault as error:
        raise ConfigError(str(path), f"{error.strerror}; mend the file.") from None
    except FileNotFoundError:
        raise ConfigError(
            str(path), "there is no such preset file; give the path of a YAML preset."
        ) from None
    except IsADirectoryError:
        raise ConfigError(str(path), "this is a folder; give the path of a YAML preset.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"the preset cannot be read ({error}).") from None
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = f" near line {line + 1}" if line is not None else ""
        raise ConfigError(str(path), f"this is not valid YAML{where}; fix the preset.") from None
    if tree is None:  # an empty file gives no setting
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(str(path), "a preset is a mapping of sections (model, data, train, ...).")
    return tree
