"""Event files for TensorBoard, in the folder of the run.

Each session writes one file, from the start of the record, and deletes those before it. So the file
always equals the record, whatever became of an earlier session. Where a run went back to a
checkpoint, the file has a session start, and TensorBoard drops the steps that were trained again.
"""

from __future__ import annotations

import fnmatch
import os
import socket
import time
from collections.abc import Mapping, Sequence

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import text

from engine import safe_files
from engine.runs.trackers.known_trackers import TENSORBOARD_FOLDER
from engine.runs.trackers.points import Point
from engine.runs.trackers.tracker import TrackedRun

FILES = "events.out.tfevents.*"
_VERSION = "brain.Event:2"


class ToTensorBoard:
    """One event file. Raises OSError where it cannot be written."""

    def __init__(self, run: TrackedRun):
        folder = run.folder / TENSORBOARD_FOLDER
        root = run.folder.parent
        safe_files.make_folder(folder, root, exist_ok=True)
        earlier = sorted(fnmatch.filter(safe_files.entries(folder, root), FILES))
        self.run = run.id
        self.where = str(folder)
        now = time.time_ns()
        # TensorBoard reads the files in the order of their names.
        name = f"{FILES[:-1]}{now // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{now}"
        self._writer = RecordWriter(str(folder / name))
        self._event(Event(wall_time=time.time(), file_version=_VERSION))
        self.rewind(-1)
        shown = "\n".join(f"    {name}: {value}" for name, value in run.parameters.items())
        self._event(Event(wall_time=time.time(), step=0, summary=text("settings", shown)))
        self._writer.flush()
        for file in earlier:
            safe_files.remove(folder / file, root)

    def held(self) -> Mapping[str, int]:
        return {}  # the file is new

    def rewind(self, step: int) -> None:
        start = SessionLog(status=SessionLog.START)
        self._event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            values = [
                Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            summary = Summary(value=values)
            self._event(Event(wall_time=point.time, step=point.step, summary=summary))
        self._writer.flush()

    def close(self, _: str) -> None:
        self._writer.close()

    def _event(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
