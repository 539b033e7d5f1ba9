"""The draft: the latest content of the form, or the settings of a run.

The server keeps it in memory and in a file next to the runs, so that it outlives the tab and the
server.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from app.form.settings_form import Setting, settings, shown_values
from engine import safe_files
from engine.errors import ConfigError, RunError
from engine.runs.record.run_folder import CONFIG_FILE, RunFolder, open_run
from engine.runs.summaries.names import shown_name
from engine.training.checkpoints.saved_on_disk import saved_steps

DRAFT_FILE = ".draft.json"


class _Kept(msgspec.Struct):
    """Content of the file."""

    preset: str | None
    shown: dict[str, bool | str | int | float | None]


class Draft:
    """Remembers component values by dotted name, and the preset that they started from."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._path = folder / DRAFT_FILE
        self.problem = ""
        """Why the earlier draft could not be read."""
        self._last: dict[str, Any] | None = None
        self._is_written = False
        self._lock = threading.Lock()

    def remember(self, preset: str | None, shown: dict[str, Any]) -> None:
        """Keeps a draft. If it cannot be written to the disk, it is lost only at a restart."""
        draft = {"preset": preset, "shown": shown}
        with self._lock, contextlib.suppress(OSError):
            if draft == self._last and self._is_written:
                return
            self._last = draft
            self._is_written = False
            self._folder.mkdir(parents=True, exist_ok=True)
            # The write is not followed by fsync: it happens at each pause in typing, and losing a
            # draft in a power cut does little harm.
            content, mode = json.dumps(draft), safe_files.PRIVATE
            safe_files.write_whole(self._path, content, self._folder, durable=False, mode=mode)
            self._is_written = True

    def recall(self) -> tuple[str | None, dict[str, Any]] | None:
        """Returns the preset and the component values.

        It returns None if there is no draft, or if this version cannot show it. A file that cannot
        be read is set aside, which `problem` reports.
        """
        with self._lock:
            last = self._last
            kept = self._read() if last is None else _Kept(last["preset"], last["shown"])
        if kept is None or set(kept.shown) != {setting.dotted for setting in settings()}:
            return None
        if not all(_can_show(setting, kept.shown[setting.dotted]) for setting in settings()):
            return None
        return kept.preset, kept.shown

    def _read(self) -> _Kept | None:
        try:
            return safe_files.read_json(self._path, self._folder, _Kept)
        except FileNotFoundError:
            return None
        except OSError as error:
            aside = self._path
            with contextlib.suppress(OSError):
                aside = safe_files.set_aside(self._path, self._folder)
            self.problem = f"The draft of before cannot be read ({error.strerror}): see {aside}."
            print(f"ramstream: {self.problem}", file=sys.stderr)
            return None


def _can_show(setting: Setting, value: Any) -> bool:
    """Returns whether the component of `setting` can show `value`."""
    if setting.kind == "switch":
        return isinstance(value, bool)
    if setting.kind == "choice":
        return value in setting.choices
    return isinstance(value, str)


def settings_of_run(
    runs_dir: Path, run_id: str, changes: dict[str, Any], trains_on: bool = False
) -> dict[str, Any]:
    """Returns the component values of a run's settings with `changes` (config values by name).

    With `trains_on`, they are those of a new run that starts from this run's newest weights.
    Raises RunError for a run that does not exist, whose settings this version cannot use or which
    has no weights to train on from, and ConfigError for a change of an unknown setting or to a
    value out of range.
    """
    folder = open_run(runs_dir, run_id)
    try:
        config = folder.config
    except ConfigError as error:
        raise RunError(
            f"The settings of this run cannot be used by this version of Ramstream ({error}); mend "
            f"{folder.path / CONFIG_FILE}."
        ) from None
    if trains_on:
        _refuse_without_weights(folder)
        changes = changes | {"model.start_from": str(folder.path.resolve())}
    return shown_values(config.with_values(changes))


def _refuse_without_weights(folder: RunFolder) -> None:
    """Raises RunError if a new run cannot start from this run's newest weights."""
    if folder.is_running():
        raise RunError(
            f"{shown_name(folder)} is still training. Stop it or wait for its end, then continue "
            "training from it."
        )
    if saved_steps(folder.checkpoints_path, folder.best_path).trained_on is None:
        raise RunError(
            f"{shown_name(folder)} has saved no weights to continue from. Duplicate takes its "
            "settings alone."
        )
