"""Names of models and data sets as people say them. All functions are pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from engine.config.tree import read_yaml
from engine.data.sources.kinds import is_data, stem_of
from engine.errors import ConfigError

LONGEST_NAME = 40
SHOWN_OF_A_MIX = 2
"""Number of data sets of a mix that are named."""


def short_name(source: Any) -> str:
    """Returns the last part of a hub id or a path."""
    return named_together([_path(str(source or "").strip()).name])


def run_name(source: Any) -> str:
    """Returns the name of a run on these data, such as "Capitals" for `data/capitals.csv`."""
    return named_together([_in_words(each) for each in _sources(str(source or "").strip())])


def named_together(names: Sequence[str]) -> str:
    """Returns the names of data sets as that of their mix."""
    named = [name for name in names if name]
    joined = " + ".join(named[:SHOWN_OF_A_MIX])
    if more := named[SHOWN_OF_A_MIX:]:
        joined += f" + {len(more)} more"
    return joined if len(joined) <= LONGEST_NAME else f"{joined[: LONGEST_NAME - 1]}…"


def _sources(text: str) -> list[str]:
    """Returns the data sets that a text of the form names: one, or those of a mix."""
    if not text.startswith("["):
        return [text]
    try:
        found = read_yaml(text)
    except (yaml.YAMLError, ConfigError):
        return []
    if not isinstance(found, list):
        return []
    return [str(name) for name in map(_source_of, found) if name]


def _source_of(part: Any) -> Any:
    return part.get("source") if isinstance(part, dict) else part


def _in_words(source: str) -> str:
    path = _path(source)
    plain = stem_of(path) if is_data(path) else path.name
    words = " ".join(re.split(r"[\s_-]+", plain)).strip()
    return words[:1].upper() + words[1:]


def _path(source: str) -> Path:
    return Path(source.replace("\\", "/"))
