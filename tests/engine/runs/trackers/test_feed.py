"""A feed gives a tracker each value of the record once, whatever happens meanwhile."""

from __future__ import annotations

import json
import threading
import time

import pytest

from engine.runs.record.events import LogLine, Record, StepFinished
from engine.runs.trackers.feed import Ending, Feed, Timing
from engine.runs.trackers.ledger import LEDGER_FILE, Ledger
from engine.runs.trackers.points import (
    CURVES,
    EXACT_MATCH,
    GPU_GIB,
    HOST_GIB,
    LOSS,
    VALIDATION_LOSS,
    points_of,
)
from tests.support.tracked_records import (
    KeptTracker,
    RewoundTracker,
    curve,
    loss_of,
    record_session,
    tracked,
)

QUICK = Timing(poll=0.01, again=0.02, hangs=0.05)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "run-1"
    made.mkdir()
    return made


FINISHED = Ending("finished")


def fed(folder, open_tracker, ending=FINISHED, timing=QUICK):
    """Feeds the record to its end; returns what was told. A session ends before the next one's
    lines are there.
    """
    found: list[str] = []
    feed = Feed(tracked(folder), open_tracker, Ledger(folder).of("mlflow"), found.append, timing)
    if ending.seq is not None:
        feed.end(ending)
    feed.start()
    feed.end(ending)
    deadline = time.monotonic() + 20
    while feed.is_alive and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not feed.is_alive
    return found


def test_a_run_is_given_once_in_the_order_of_its_record(folder):
    record_session(folder, 1, range(1, 9))
    store, opened = [], []

    def open_tracker(run):
        opened.append(KeptTracker(run, store))
        return opened[-1]

    assert fed(folder, open_tracker) == []
    assert curve(store, LOSS) == [(step, loss_of(1, step)) for step in range(1, 9)]
    assert curve(store, VALIDATION_LOSS) == [(0, 20.0), (4, 20.5), (8, 21.0)]
    assert curve(store, EXACT_MATCH) == [(0, 0.25)]
    assert curve(store, HOST_GIB)[0] == (1, 1.0) and curve(store, GPU_GIB)[-1] == (8, 0.5)
    assert {name for point in store for name in point.values} == set(CURVES)
    assert [tracker.closed for tracker in opened] == [["finished"]]


def test_a_resumed_run_has_no_gap_and_no_doubled_step(folder):
    """Steps 7 to 9 were trained again after a crash. Their first values stay."""
    record_session(folder, 1, range(1, 10))
    store = []
    fed(folder, lambda run: KeptTracker(run, store), Ending("interrupted"))
    record_session(folder, 2, range(7, 13), resumed=6)
    fed(folder, lambda run: KeptTracker(run, store))
    expected = [(step, loss_of(1 if step <= 9 else 2, step)) for step in range(1, 13)]
    assert curve(store, LOSS) == expected
    assert [step for step, _ in curve(store, VALIDATION_LOSS)] == [0, 4, 8, 12]


def test_a_tracker_that_can_rewind_has_the_newest_values(folder):
    record_session(folder, 1, range(1, 10))
    store = []
    fed(folder, lambda run: RewoundTracker(run, store), Ending("interrupted"))
    record_session(folder, 2, range(7, 13), resumed=6)
    fed(folder, lambda run: RewoundTracker(run, store))
    expected = [(step, loss_of(1 if step <= 6 else 2, step)) for step in range(1, 13)]
    assert curve(store, LOSS) == expected


def test_a_run_that_begins_anew_is_continued_too(folder):
    record_session(folder, 1, range(1, 4))
    kept, rewound = [], []
    fed(folder, lambda run: KeptTracker(run, kept), Ending("interrupted"))
    record_session(folder, 2, range(1, 6))
    fed(folder, lambda run: KeptTracker(run, kept))
    fed(folder, lambda run: RewoundTracker(run, rewound))
    assert [step for step, _ in curve(kept, LOSS)] == [1, 2, 3, 4, 5]
    assert curve(rewound, LOSS) == [(step, loss_of(2, step)) for step in range(1, 6)]


def test_without_an_answer_the_ledger_says_what_was_given(folder):
    """Weights & Biases cannot be asked what it has."""

    class Silent(KeptTracker):
        def held(self):
            return {}

    record_session(folder, 1, range(1, 6))
    store = []
    fed(folder, lambda run: Silent(run, store), Ending("stopped"))
    noted = json.loads((folder / LEDGER_FILE).read_text())["mlflow"]
    assert noted["run"] == "kept-run-1" and noted["last"][LOSS] == 5
    record_session(folder, 2, range(6, 8), resumed=5)
    known = []

    def open_again(run):
        known.append(run.known_as)
        return Silent(run, store)

    fed(folder, open_again)
    assert [step for step, _ in curve(store, LOSS)] == [1, 2, 3, 4, 5, 6, 7]
    assert known == ["kept-run-1"]


def test_a_failure_is_told_once_and_leaves_neither_gap_nor_double(folder):
    record_session(folder, 1, range(1, 6))
    store, opened = [], []
    fails = [ConnectionError("no answer"), OSError("No space left on device")]

    def open_tracker(run):
        opened.append(run)
        if len(opened) == 2:
            raise RuntimeError("not yet")
        return KeptTracker(run, store, fails)

    found: list[str] = []
    feed = Feed(tracked(folder), open_tracker, Ledger(folder).of("mlflow"), found.append, QUICK)
    feed.start()
    deadline = time.monotonic() + 20
    while len(opened) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    feed.end(Ending("finished"))
    while feed.is_alive and time.monotonic() < deadline:
        time.sleep(0.005)
    assert found == ["failed (OSError: No space left on device)"]
    assert len(opened) == 4 and curve(store, LOSS) == [(n, loss_of(1, n)) for n in range(1, 6)]


def test_at_the_end_a_tracker_that_fails_is_tried_once_more_and_then_left(folder):
    record_session(folder, 1, range(1, 3))
    tries = []

    def open_tracker(run):
        tries.append(run)
        raise ImportError("no such package")

    found = fed(folder, open_tracker, timing=Timing(poll=0.01, again=3600, hangs=3600))
    assert found == ["failed (ImportError: no such package)"] and 1 <= len(tries) <= 2


def test_a_call_that_does_not_return_is_told_once(folder):
    record_session(folder, 1, range(1, 3))
    answer = threading.Event()

    class Slow(KeptTracker):
        def log(self, points):
            answer.wait(20)
            super().log(points)

    store, found = [], []
    feed = Feed(
        tracked(folder),
        lambda run: Slow(run, store),
        Ledger(folder).of("wandb"),
        found.append,
        QUICK,
    )
    feed.start()
    deadline = time.monotonic() + 20
    while not found and time.monotonic() < deadline:
        feed.check()
        time.sleep(0.01)
    feed.check()
    answer.set()
    feed.end(Ending("finished"))
    while feed.is_alive and time.monotonic() < deadline:
        time.sleep(0.005)
    assert found == ["has not answered for 0 s"] and len(curve(store, LOSS)) == 2


def test_lines_after_the_named_one_are_of_the_next_session(folder):
    end = record_session(folder, 1, range(1, 4))
    record_session(folder, 2, range(4, 6), resumed=3)
    store = []
    fed(folder, lambda run: KeptTracker(run, store), Ending("stopped", end))
    assert [step for step, _ in curve(store, LOSS)] == [1, 2, 3]


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"mlflow": 3}', '{"mlflow": {"last": {"a": "b"}}}']
)
def test_a_damaged_ledger_counts_as_empty(folder, content):
    (folder / LEDGER_FILE).write_text(content)
    noted = Ledger(folder).of("mlflow")
    assert (noted.run, noted.last) == ("", {})
    noted.write("id", "there", {LOSS: 3})
    assert Ledger(folder).of("mlflow").last == {LOSS: 3}


def test_points_are_made_of_figures_alone():
    assert points_of(Record("r", 1, 5.0, LogLine(text="words"))) is None
    point = points_of(Record("r", 1, 5.0, StepFinished(3, 1.5)))
    assert (point.step, point.time, point.values[LOSS]) == (3, 5.0, 1.5)
