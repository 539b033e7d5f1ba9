"""The curves in Trackio, on this machine or where its own settings point."""

from __future__ import annotations

import os
from collections.abc import Sequence

import trackio
from trackio.sqlite_storage import SQLiteStorage

from engine.runs.trackers.known_trackers import PROJECT
from engine.runs.trackers.points import Point
from engine.runs.trackers.tracker import TrackedRun


class ToTrackio:
    """A run of Trackio, named like the folder of the run."""

    def __init__(self, run: TrackedRun):
        self._is_local = not (
            os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        )
        self._name = run.id
        self._run = trackio.init(
            project=PROJECT,
            name=run.id,
            config=dict(run.parameters),
            resume="allow",
            private=True,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._last = self.held()
        self.run = str(self._run.id)
        self.where = f"trackio show --project {PROJECT}"

    def held(self) -> dict[str, int]:
        if not self._is_local:
            return {}
        last: dict[str, int] = {}
        for row in SQLiteStorage.get_logs(PROJECT, self._name):
            for name in row:
                last[name] = max(row["step"], last.get(name, -1))
        return last

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.step)
            self._last |= dict.fromkeys(point.values, point.step)

    def close(self, _: str) -> None:
        """Raises OSError if Trackio, which reports no failure to write, has not stored
        everything.
        """
        self._run.finish()
        if not self._is_local:
            return
        held = self.held()
        missing = [name for name, step in self._last.items() if held.get(name, -1) < step]
        if missing:
            raise OSError(f"the last values of {', '.join(missing)} were not stored")
