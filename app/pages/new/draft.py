"""Drafts: the latest content of each tab's form, or the settings of a run.

The server keeps them in memory and in a file next to the runs, so that a draft outlives a reload of
its tab, and the server.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from app.form.settings_form import Setting, settings, shown_values
from app.shared.run_names import name_of_start
from engine import safe_files
from engine.errors import ConfigError, RunError
from engine.runs.record.run_folder import CONFIG_FILE, RunFolder, open_run
from engine.runs.summaries.names import shown_name
from engine.training.checkpoints.saved_on_disk import saved_steps

DRAFT_FILE = ".draft.json"
MOST = 32
"""Number of tabs whose drafts are kept: those that were changed last."""
NO_TAB = ""
"""Name for a draft of no tab. As any draft that is the last one, new tabs begin with it."""
_TAB = re.compile(r"[0-9a-z-]{1,40}", re.ASCII)


class _Kept(msgspec.Struct):
    """One draft."""

    preset: str | None
    shown: dict[str, bool | str | int | float | None]
    continues: bool = False
    """The settings are those that continue a run, as a person asked for on its page."""
    own: _Kept | None = None
    """The person's own draft, whose place these settings took; None where there was none."""

    def own_again(self) -> _Kept | None:
        """Returns this draft, or the own one where it continues a run."""
        return self.own if self.continues else self


class _File(msgspec.Struct):
    """Content of the file: the drafts by tab, the last one at the end."""

    drafts: dict[str, _Kept]


def is_tab(name: str) -> bool:
    """Returns whether a tab may have this name."""
    return name == NO_TAB or _TAB.fullmatch(name) is not None


class Drafts:
    """Remembers component values by dotted name, and the preset that they started from, of each
    tab.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._path = folder / DRAFT_FILE
        self.problem = ""
        """Why earlier drafts could not be read."""
        self._kept: dict[str, _Kept] | None = None
        self._is_written = False
        self._lock = threading.Lock()

    def remember(self, tab: str, preset: str | None, shown: dict[str, Any]) -> None:
        """Keeps the draft of a tab. If it cannot be written to the disk, it is lost only at a
        restart.
        """
        draft = _Kept(preset, shown)
        with self._lock:
            before = self._drafts().get(tab)
            if before is not None and before.continues and _start_of(before) == _start_of(draft):
                draft = _Kept(preset, shown, True, before.own)
            self._remember(tab, draft)

    def remember_continuing(self, tab: str, shown: dict[str, Any]) -> None:
        """Keeps settings that continue a run as the draft of a tab, and its own draft beside."""
        with self._lock:
            before = self._drafts().get(tab)
            own = None if before is None else before.own_again()
            self._remember(tab, _Kept(None, shown, True, own))

    def is_continuing(self, tab: str) -> bool:
        """Returns whether a tab's draft continues a run, as a person asked for on its page."""
        with self._lock:
            found = self._drafts().get(tab)
            return found is not None and found.continues

    def own(self, tab: str) -> tuple[str | None, Any] | None:
        """Returns the preset and the component values of a tab's own draft; None where there is
        none that can be shown.
        """
        with self._lock:
            found = self._drafts().get(tab)
            own = None if found is None else found.own_again()
            return None if own is None or not _can_be_shown(own) else (own.preset, own.shown)

    def _remember(self, tab: str, draft: _Kept) -> None:
        kept = self._drafts()
        # A page sends its form again and again. What is of no tab was sent for the next one.
        if tab != NO_TAB and kept.get(tab) == draft and self._is_written:
            return
        kept.pop(tab, None)
        kept[tab] = draft
        while len(kept) > MOST:
            kept.pop(next(iter(kept)))
        self._is_written = False
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            # The write is not followed by fsync: it happens at each pause in typing, and losing a
            # draft in a power cut does little harm.
            content, mode = json.dumps(msgspec.to_builtins(_File(kept))), safe_files.PRIVATE
            safe_files.write_whole(self._path, content, self._folder, durable=False, mode=mode)
            self._is_written = True

    def recall(self, tab: str = NO_TAB, other: str = NO_TAB) -> tuple[str | None, Any] | None:
        """Returns the preset and the component values of a tab. A tab without a draft begins with a
        copy of that of the tab `other`, or else of the last one, which is its own from then on. A
        draft that continues a run stays in the tab in which a person asked for it.

        It returns None if there is no draft, or if this version cannot show it. A file that cannot
        be read is set aside, which `problem` reports.
        """
        with self._lock:
            kept = self._drafts()
            found = (kept.get(tab) if tab else None) or (kept.get(other) if other else None)
            if found is None and kept:
                name, last = next(reversed(kept.items()))
                found = last if name == NO_TAB else last.own_again()
            if found is None or not _can_be_shown(found):
                return None
            if tab and tab not in kept:
                self._remember(tab, found)
        return found.preset, found.shown

    def _drafts(self) -> dict[str, _Kept]:
        if self._kept is None:
            self._kept = self._read()
        return self._kept

    def _read(self) -> dict[str, _Kept]:
        try:
            return safe_files.read_json(self._path, self._folder, _File).drafts
        except FileNotFoundError:
            return {}
        except OSError as error:
            aside = self._path
            with contextlib.suppress(OSError):
                aside = safe_files.set_aside(self._path, self._folder)
            self.problem = f"The drafts of before cannot be read ({error.strerror}): see {aside}."
            print(f"ramstream: {self.problem}", file=sys.stderr)
            return {}


def _start_of(draft: _Kept) -> str:
    return str(draft.shown["model.start_from"] or "")


def _can_be_shown(draft: _Kept) -> bool:
    """Returns whether the form of this version has exactly the settings of a draft."""
    shown = draft.shown
    if set(shown) != {setting.dotted for setting in settings()}:
        return False
    return all(_can_show(setting, shown[setting.dotted]) for setting in settings())


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


def continues_from(shown: Mapping[str, Any]) -> str:
    """Returns the name of the run whose weights the form starts from, or of a folder that is of no
    run; empty for a form that starts from its model.
    """
    return name_of_start(str(shown["model.start_from"] or ""))


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
