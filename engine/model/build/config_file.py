"""The config.json of a model may be damaged or written by hand.

The libraries' errors about it have several lines, and the first one does not show what is wrong.
These functions name the field and the file that is wrong, and what it must be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import ModelError, first_line
from engine.model.hub.model_files import read_small
from engine.safe_files import FileFault

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Fields that nearly all models have, and without at least 1 of which none can compute."""
_PARTS = ("text_config",)
"""Names under which a configuration may hold the one of its text part."""
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "dict": "a mapping",
    "PreTrainedConfig": "a mapping",
    "RopeParameters": "a mapping",
    "NoneType": "null",
}
"""The types in the libraries' errors, as text."""
_FIELD = re.compile(r"Field '(?P<field>\w+)' expected (?P<type>\w+)")
_VALUE = re.compile(r"(?:with value |\(value: )(.+?)(?: doesn't match|\)(?:;|$))")
_VALIDATED = re.compile(r"(Class v|V)alidation error for (field|validator) '\w+':\n")
_MOST_SHOWN, _LONGEST_REASON = 60, 200
"""Largest number of characters that are shown of a value, and of a library's reason."""


def refuse_broken(file: Path, known_types: Any) -> None:
    """Raises ModelError if no model can have this configuration: if the file is not a JSON object,
    names no model type, or has sizes below 1.

    `known_types` contains the model types that transformers knows.
    """
    try:
        config = json.loads(read_small(file).decode())
    except FileFault as fault:
        raise ModelError(f"model.source: {str(fault).rstrip('.')}; get the file again.") from None
    except OSError as error:
        raise ModelError(f"model.source: {file} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"model.source: {file} is not valid JSON ({first_line(error)}); get the file again."
        ) from None
    if not isinstance(config, dict):
        raise ModelError(
            f"model.source: {file} must hold an object in braces, with the model's fields; get the "
            "file again."
        )
    _refuse_type(file, config, known_types)
    for place, values in _sections(config):
        for name in _SIZES:
            value = values.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ModelError(
                    f"model.source: {place}{name} in {file} is {value}, and must be at least 1."
                )
        _refuse_heads(file, place, values)


def _refuse_type(file: Path, config: dict[str, Any], known_types: Any) -> None:
    kind = config.get("model_type")
    if kind is None:
        return  # transformers may still know the model by the name of its folder
    if not isinstance(kind, str):
        raise ModelError(
            f"model.source: model_type in {file} must be a text, such as qwen3, and is "
            f"{_shown(kind)}."
        )
    if kind in known_types:
        return
    if config.get("auto_map"):
        raise ModelError(
            f"model.source: a model of the type {_shown(kind)} ({file}) brings code of its own, "
            "which Ramstream never runs; choose a model that transformers knows."
        )
    raise ModelError(
        f"model.source: transformers knows no model of the type {_shown(kind)}, which model_type "
        f"in {file} names; choose another model, or install a newer transformers."
    )


def _refuse_heads(file: Path, place: str, values: dict[str, Any]) -> None:
    heads, shared = values.get("num_attention_heads"), values.get("num_key_value_heads")
    # In a few families, these are lists with a number for each block.
    if not isinstance(heads, int) or not isinstance(shared, int) or shared < 1:
        return
    if heads % shared:
        raise ModelError(
            f"model.source: {place}num_key_value_heads in {file} is {shared}, and must divide "
            f"{place}num_attention_heads, which is {heads}."
        )


def _sections(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the fields of a configuration and those of its text part, each with the part's name as
    it stands before the name of a field.
    """
    yield "", config
    for part in _PARTS:
        if isinstance(config.get(part), dict):
            yield f"{part}.", config[part]


def is_of_a_field(error: Exception) -> bool:
    """Returns whether a library refused a configuration for what one of its fields has."""
    return _VALIDATED.match(str(error)) is not None


def why_refused(file: Path | None, error: Exception) -> str:
    """Returns what is wrong with a configuration, from the error of a library that refused it.

    `file` is the configuration on this machine, if there is one.
    """
    text = str(error)
    if not is_of_a_field(error):
        if text.startswith("Unrecognized model"):
            return 'it has no model_type, such as "qwen3"'
        return first_line(error)
    found = _FIELD.search(text)
    if found is not None:
        names = (match["type"] for match in _FIELD.finditer(text))
        wanted = " or ".join(dict.fromkeys(_TYPES[name] for name in names if name in _TYPES))
        must = f" must be {wanted}, and" if wanted else ""
        name, value = _in_file(file, found["field"], text)
        return f"{name}{must} is {value}"
    # The second line begins with the name of the error's class.
    reason = text.splitlines()[1].partition(": ")[2].rstrip(". ")
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 3]}..."


def _in_file(file: Path | None, field: str, text: str) -> tuple[str, str]:
    """Returns the full name and the value of the field that an error's `text` refuses."""
    config = {} if file is None else json.loads(read_small(file).decode())
    # The error does not name the part that the field is in. It is where the refused value is.
    for place, values in _sections(config):
        if field in values and repr(values[field]) in text:
            return f"{place}{field}", _shown(values[field])
    found = _VALUE.search(text)
    return field, found[1][:_MOST_SHOWN] if found is not None else "of another type"


def _shown(value: Any) -> str:
    """Returns a value as it stands in JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
