"""What trackers get of a run beside its curves."""

from __future__ import annotations

from engine.config.tree import by_dotted_name
from engine.runs.record.run_folder import RunFolder
from engine.runs.trackers.tracker import TrackedRun

UNSENT = ("output.webhook", "output.sample_prompts")
"""Settings that trackers do not get: an address that holds a secret, and a person's own texts."""


def tracked_run(folder: RunFolder) -> TrackedRun:
    """Returns the run of a folder. Raises ConfigError if its settings cannot be read."""
    config = folder.config
    parameters: dict[str, str | int | float | bool] = {}
    for name, value in by_dotted_name(config.to_dict()).items():
        if name not in UNSENT and value not in (None, ()):
            is_plain = isinstance(value, (str, int, float, bool))
            parameters[name] = value if is_plain else str(value)
    return TrackedRun(folder.id, config.name, folder.path.resolve(), parameters)
