"""What each tracker was given of a run: the file ``trackers.json`` in its folder.

With it, a resumed run continues the same runs of the trackers, without a gap or a doubled step.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import safe_files

LEDGER_FILE = "trackers.json"


class Ledger:
    """The ledger of one run, which its trackers share. A file that cannot be read counts as empty.

    Any thread may use it.
    """

    def __init__(self, folder: Path):
        self._path = folder / LEDGER_FILE
        self._root = folder.parent
        self._lock = threading.Lock()
        self._entries: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError):
            read = safe_files.read_json(self._path, self._root, dict[str, Any])
            self._entries = {name: entry for name, entry in read.items() if _is_entry(entry)}

    def of(self, name: str) -> Noted:
        """Returns the entry of one tracker."""
        return Noted(self, name)

    def entry(self, name: str) -> dict[str, Any]:
        with self._lock:
            return self._entries.get(name, {})

    def write(self, name: str, entry: dict[str, Any]) -> None:
        """Replaces the entry of one tracker. Raises OSError if the file cannot be written."""
        with self._lock:
            self._entries[name] = entry
            text = json.dumps(self._entries, indent=1)
            safe_files.write_whole(self._path, text, self._root, durable=False)


@dataclass(frozen=True)
class Noted:
    """Entry of one tracker in the ledger."""

    ledger: Ledger
    name: str

    @property
    def run(self) -> str:
        """Id by which the tracker knows the run, or an empty text."""
        return str(self.ledger.entry(self.name).get("run", ""))

    @property
    def last(self) -> dict[str, int]:
        """Last step that the tracker was given of each curve."""
        return dict(self.ledger.entry(self.name).get("last", {}))

    def write(self, run: str, where: str, last: Mapping[str, int]) -> None:
        """Writes what the tracker has now. Raises OSError if that is impossible."""
        self.ledger.write(self.name, {"run": run, "where": where, "last": dict(last)})


def _is_entry(entry: Any) -> bool:
    last = entry.get("last") if isinstance(entry, dict) else None
    return isinstance(last, dict) and all(type(step) is int for step in last.values())
