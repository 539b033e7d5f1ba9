"""Settings and values of settings that have another name now. No torch is imported.

A preset that has an old name is refused in one sentence with what to write instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError

_LONGEST = 60
"""A value is written into the sentence up to this many characters; of longer ones the setting
alone is named.
"""


@dataclass(frozen=True)
class Renamed:
    """One row of the table: a setting with another name, or with other names of its values."""

    old: str
    """Dotted name of the setting in presets of before."""
    new: str
    """Dotted name of the setting today; `old` where the values alone have other names."""
    values: dict[str, str] = field(default_factory=dict)
    """New names of values by the old ones; other values are written as before."""


RENAMED = (
    Renamed("data.lost_turns", "data.dropped_turns"),
    Renamed("preference.objective", "train.objective"),
    Renamed(
        "engine.save_level",
        "engine.activation_checkpointing",
        {
            "boundary": "full",
            "boundary_host": "offload",
            "boundary_pairs": "offload_pairs",
            "all": "none",
        },
    ),
    Renamed("engine.gradients", "engine.gradients", {"parked": "gpu"}),
    Renamed("engine.residency", "engine.blocks_kept_in_slots"),
    Renamed("engine.across_hosts", "engine.across_nodes", {"copy": "replicate", "divide": "shard"}),
)
"""All renamed settings."""


def refuse_renamed(tree: Any) -> None:
    """Raises ConfigError if a tree of settings has settings or values under their old names. It
    names each of them with what to write instead.
    """
    names: list[str] = []
    written: list[str] = []
    first = ""
    for renamed in RENAMED:
        value = _value(tree, renamed.old)
        if value is _Absent:
            continue
        is_old_value = isinstance(value, str) and value in renamed.values
        if renamed.old == renamed.new:
            if not is_old_value:
                continue
            subject = f"{value} of {renamed.old}" if names else str(value)
            names.append(f"{subject} is called {renamed.values[value]} now")
        else:
            names.append(f"{renamed.old if names else 'this'} is called {renamed.new} now")
        first = first or renamed.old
        written.append(_line(renamed.new, renamed.values[value] if is_old_value else value))
    if names:
        raise ConfigError(first, f"{_listed(names)}; write {_listed(written)}.")


class _Absent:
    """Stands for a setting that a tree does not have, since None is a value."""


def _value(tree: Any, dotted: str) -> Any:
    """Returns the value of a dotted name in a tree, or _Absent."""
    for name in dotted.split("."):
        if not isinstance(tree, dict) or name not in tree:
            return _Absent
        tree = tree[name]
    return tree


def _line(name: str, value: Any) -> str:
    """Returns a setting as a preset has it, or its name alone if the value is no short scalar."""
    if isinstance(value, str):
        text = value
    elif value is None or isinstance(value, (bool, int, float)):
        text = json.dumps(value)
    else:
        return name
    return f"`{name}: {text}`" if len(text) <= _LONGEST and text.isprintable() else name


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
