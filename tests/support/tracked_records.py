"""Records of runs for trackers: sessions with losses that tell where each value came from."""

from __future__ import annotations

from pathlib import Path

from engine.runs.record.events import (
    EvalFinished,
    ExactMatchMeasured,
    MemorySampled,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.record.recorder import RunRecorder
from engine.runs.trackers.points import Point
from engine.runs.trackers.tracker import TrackedRun


def tracked(folder: Path, known_as: str = "") -> TrackedRun:
    return TrackedRun(folder.name, "Tiny", folder, {"train.steps": 9, "name": "Tiny"}, known_as)


def loss_of(session: int, step: int) -> float:
    return 10.0 * session + step / 16  # a float32 holds it exactly


def record_session(folder: Path, session: int, steps: range, resumed: int | None = None) -> int:
    """Adds a session to the record, as training does; returns its last line's number."""
    recorder = RunRecorder(folder, folder.name)
    recorder.emit(StateChanged("preparing"))
    recorder.emit(RunStarted(name="Tiny", total_steps=99, resumed_step=resumed))
    if resumed is None:
        recorder.emit(EvalFinished(0, 20.0))
        recorder.emit(ExactMatchMeasured(0, "before", 1, 4))
    for step in steps:
        recorder.emit(StepFinished(step, loss_of(session, step), 0.5, 1e-3, 64, 32, 0.25, 256.0))
        recorder.emit(MemorySampled(step, host_rss=1 << 30, gpu_driver=1 << 29, gpu_total=1 << 31))
        if step % 4 == 0:
            recorder.emit(EvalFinished(step, 2 * loss_of(session, step)))
    last = recorder.snapshot.last_seq
    recorder.close()
    return last


def curve(points: list[Point], name: str) -> list[tuple[int, float]]:
    return [(point.step, point.values[name]) for point in points if name in point.values]


class KeptTracker:
    """Keeps what it gets in `store`, which outlives it as a server would. It fails as asked."""

    def __init__(self, run: TrackedRun, store: list[Point], fails: list[Exception] | None = None):
        self.run, self.where = f"kept-{run.id}", "here"
        self.store = store
        self.fails = [] if fails is None else fails
        self.closed: list[str] = []

    def held(self):
        return {name: point.step for point in self.store for name in point.values}

    def log(self, points):
        if self.fails:
            self.store += points[: len(points) // 2]
            raise self.fails.pop()
        self.store += points

    def close(self, state):
        self.closed.append(state)


class RewoundTracker(KeptTracker):
    """Takes the whole record at each opening, as TensorBoard does."""

    def __init__(self, run: TrackedRun, store: list[Point]):
        super().__init__(run, store)
        store.clear()

    def rewind(self, step):
        self.store[:] = [point for point in self.store if point.step <= step]
