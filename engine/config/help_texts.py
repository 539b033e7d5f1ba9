"""The help text of each setting is the docstring of its field. The app shows it in the form."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import typing
from collections.abc import Iterator

from engine.config.settings import TrainConfig


def field_docs() -> dict[str, str]:
    """Returns the docstring of each setting by its dotted name, such as `train.steps`."""
    docs: dict[str, str] = {}
    sections = _sections()
    for section, cls in {"": TrainConfig, **sections}.items():
        prefix = f"{section}." if section else ""
        for name, text in _docstrings(cls):
            if prefix + name not in sections:
                docs[prefix + name] = " ".join(text.split())
    return docs


def _docstrings(cls: type) -> Iterator[tuple[str, str]]:
    """Yields (field, docstring) for each field of a class. Python does not keep docstrings of
    fields, so they are read from the source.
    """
    definition = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(definition, ast.ClassDef)
    for statement, following in itertools.pairwise(definition.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            yield statement.target.id, str(following.value.value)


def _sections(cls: type = TrainConfig, prefix: str = "") -> dict[str, type]:
    """Returns the dataclass of every section and nested section, by dotted name."""
    hints = typing.get_type_hints(cls)
    found: dict[str, type] = {}
    for field in dataclasses.fields(cls):
        section = hints[field.name]
        if dataclasses.is_dataclass(section) and isinstance(section, type):
            found[prefix + field.name] = section
            found |= _sections(section, f"{prefix}{field.name}.")
    return found
