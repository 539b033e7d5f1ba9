"""What trackers get of a run beside its curves."""

from __future__ import annotations

from typing import Any

from engine.runs.record.run_folder import RunFolder
from engine.runs.trackers.tracker import TrackedRun

UNSENT = ("output.webhook", "output.sample_prompts")
"""Settings that trackers do not get: an address that holds a secret, and a person's own texts."""


def tracked_run(folder: RunFolder) -> TrackedRun:
    """Returns the run of a folder. Raises ConfigError if its settings cannot be read."""
    config = folder.config
    parameters = {name: value for name, value in _flat(config.to_dict(), "") if name not in UNSENT}
    return TrackedRun(folder.id, config.name, folder.path.resolve(), parameters)


def _flat(tree: dict[str, Any], prefix: str) -> list[tuple[str, str | int | float | bool]]:
    """Returns the settings of a tree by dotted name; settings without a value are left out."""
    found: list[tuple[str, str | int | float | bool]] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, (str, int, float, bool)):
            found.append((prefix + name, value))
        elif value:
            found.append((prefix + name, str(value)))
    return found
