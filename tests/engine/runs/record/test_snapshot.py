"""Law 7 holds: replaying the record gives the live snapshot. What a snapshot says about a run is
tested as well.
"""

from __future__ import annotations

import random

import pytest

from engine.runs.record.events import (
    BestKept,
    CheckpointWritten,
    DataPrepared,
    EvalFinished,
    ExactMatchMeasured,
    ExportWritten,
    JobProgressed,
    LogLine,
    MemorySampled,
    PlanBuilt,
    Record,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
    StepTimeline,
    Unknown,
)
from engine.runs.record.following import Follower, replay
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.snapshot import Job, RunSnapshot
from tests.support.folded import fold, fold_of
from tests.support.random_runs import random_run

# ---------------------------------------------------------------------- law 7


@pytest.mark.parametrize("seed", range(8))
def test_live_followed_and_replayed_are_equal(tmp_path, seed):
    rng = random.Random(1000 + seed)
    recorder, heard = RunRecorder(tmp_path, "r"), RunSnapshot()
    recorder.subscribe(heard.apply)
    follower, followed = Follower(recorder.path), RunSnapshot()
    for event in random_run(seed):
        if rng.random() < 0.03:
            recorder.close()
            recorder = RunRecorder(tmp_path, "r")
            assert recorder.snapshot == heard
            recorder.subscribe(heard.apply)
        recorder.emit(event)
        if rng.random() < 0.2:
            for record in follower.read_new():
                followed.apply(record)
    recorder.close()
    for record in follower.read_new():
        followed.apply(record)
    assert recorder.snapshot == heard == followed == fold(replay(recorder.path))


@pytest.mark.parametrize("seed", range(8))
def test_the_fold_is_the_run_that_went_on_from_the_resumed_step(seed):
    """The snapshot equals a plain definition, in which a resume removes every row of a later
    step.
    """
    story: list = []
    for event in random_run(seed):
        if isinstance(event, RunStarted):
            # One that begins at the start also measures anew what comes before the first step.
            last = -1 if event.resumed_step is None else event.resumed_step
            story = [old for old in story if getattr(old, "step", -1) <= last]
        story.append(event)
    snapshot = fold_of(*random_run(seed))
    steps = [event for event in story if isinstance(event, StepFinished)]
    assert (
        list(snapshot.steps.step)
        == [event.step for event in steps]
        == sorted(set(snapshot.steps.step))
    )
    for name in (
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens",
        "seconds",
        "tokens_per_second",
        "tflops",
    ):
        assert list(getattr(snapshot.steps, name)) == [getattr(event, name) for event in steps]
    assert {"h2d", "d2h", "optimizer", "other"} <= set(snapshot.steps.exposed)
    for cause, values in snapshot.steps.exposed.items():
        assert list(values) == [event.exposed.get(cause, 0.0) for event in steps]
    assert len(snapshot.steps.time) == len(snapshot.steps) == len(steps)
    for columns, kind in ((snapshot.memory, MemorySampled), (snapshot.evals, EvalFinished)):
        rows = [event for event in story if isinstance(event, kind)]
        fields = vars(columns).keys() - {"preference"}  # a column for each figure
        for name in rows[0].fields().keys() & fields if rows else ():
            assert list(getattr(columns, name)) == [getattr(event, name) for event in rows]
    for events, kind in (
        (snapshot.checkpoints, CheckpointWritten),
        (snapshot.exact_matches, ExactMatchMeasured),
        (snapshot.exports, ExportWritten),
    ):
        assert events == [event for event in story if isinstance(event, kind)]
    assert snapshot.timeline_steps == [
        event.step for event in story if isinstance(event, StepTimeline)
    ]
    evaluated = [e for e in story if isinstance(e, EvalFinished) and e.step]
    best = min(evaluated, key=lambda e: e.loss, default=None)
    kept = [e for e in story if isinstance(e, BestKept)]
    if best is None:
        assert snapshot.best is None
    else:
        assert (snapshot.best.step, snapshot.best.loss) == (best.step, best.loss)
        assert snapshot.validation.since_best == len(evaluated) - 1 - evaluated.index(best)
        # Weights of a later step had taken the place of those before a resume.
        assert not snapshot.best.kept or best.step in {event.step for event in kept}


def test_a_run_of_any_length_takes_bounded_memory(monkeypatch):
    """Compared with all rows, the newest are complete, and of the older ones every 2nd, 4th, 8th
    and so on is kept, counted from the first.
    """
    monkeypatch.setattr("engine.runs.record.event_tables.ROWS", 64)
    snapshot, rows = RunSnapshot(), []
    for step in range(1, 1001):
        event = StepFinished(
            step, loss=1 / step, exposed={"h2d": step / 7} | ({"late": 1.0} if step > 500 else {})
        )
        rows.append(event)
        snapshot.apply(Record("run", step, 1000.0 + step, event))
        steps = snapshot.steps
        assert len(steps) <= 64
        assert steps.count == step
        assert len({len(array) for array in steps.arrays()}) == 1
        assert list(steps.step[-32:]) == list(range(max(1, step - 31), step + 1))
        kept = [rows[k] for k in steps.number]
        assert list(steps.loss) == [row.loss for row in kept]
        assert list(steps.step) == [row.step for row in kept]
        assert list(steps.exposed["late" if step > 500 else "other"]) == [
            row.exposed.get("late" if step > 500 else "other", 0.0) for row in kept
        ]
        gaps = [b - a for a, b in zip(steps.number[:-32], steps.number[1:-32])]
        assert steps.number[0] == 0 and max(gaps, default=1) <= max(1, step // 8)
    snapshot.apply(Record("run", 1001, 3000.0, RunStarted(resumed_step=900)))
    assert snapshot.steps.step[-1] <= 900 and snapshot.step == 900
    snapshot.apply(Record("run", 1002, 3001.0, StepFinished(901)))
    assert snapshot.steps.step[-1] == 901
    assert snapshot.steps.number[-1] >= snapshot.steps.number[-2] + 1


# ---------------------------------------------------------------------- what the snapshot says


def test_progress_and_time_left():
    started = RunStarted(total_steps=10)
    steps = [
        StepFinished(step, loss=step / 2, seconds=took)
        for step, took in enumerate((60.0, 2.0, 2.0, 4.0), 1)
    ]
    assert fold_of().progress == 0.0
    assert fold_of().step == 0
    assert fold_of().loss is None
    assert fold_of(started).seconds_left is None
    snapshot = fold_of(started, StateChanged("running"), *steps)
    assert (snapshot.step, snapshot.loss, snapshot.progress) == (4, 2.0, 0.4)
    assert snapshot.seconds_left == 3.0 * 6  # the median ignores a slow first step
    assert not snapshot.is_over
    slow = [StepFinished(step, seconds=3.0 if step % 40 < 21 else 1.0) for step in range(1, 81)]
    swinging = fold_of(RunStarted(total_steps=180), StateChanged("running"), *slow)
    assert swinging.seconds_left == 300.0, "it is not that of the latest steps alone"
    over = fold_of(started, *steps, RunEnded("failed", "why", "NonFiniteError"))
    assert over.is_over and over.seconds_left is None
    assert (over.state, over.reason) == ("failed", "why")


def test_a_resume_opens_the_run_again():
    ended = [
        RunStarted(total_steps=10),
        StepFinished(1),
        StepFinished(2),
        StepTimeline(2),
        RunEnded("stopped", "why"),
    ]
    snapshot = fold_of(*ended, RunStarted(total_steps=10, resumed_step=2))
    assert (snapshot.state, snapshot.reason, snapshot.sessions) == ("preparing", "", 2)
    assert list(snapshot.steps.step) == [1, 2] and snapshot.timeline == StepTimeline(2)
    older = fold_of(*ended, RunStarted(total_steps=10, resumed_step=1))
    assert list(older.steps.step) == [1]
    assert older.step == 1
    assert older.timeline is None
    assert older.timeline_steps == []
    anew = fold_of(*ended, RunStarted(total_steps=10))
    assert len(anew.steps) == 0 and anew.step == 0
    lost = fold_of(RunStarted(total_steps=10), RunStarted(total_steps=10, resumed_step=5))
    assert lost.step == 5 and lost.progress == 0.5


def test_the_time_between_sessions_is_not_counted():
    records = [
        Record("r", 1, 100.0, RunStarted()),
        Record("r", 2, 130.0, StepFinished(1)),
        Record("r", 3, 900.0, RunStarted(resumed_step=1)),
        Record("r", 4, 905.0, RunEnded()),
    ]
    snapshot = fold(records)
    assert snapshot.seconds == 35.0 and snapshot.earlier_seconds == 30.0
    assert (snapshot.started_time, snapshot.session_time) == (100.0, 900.0)


def test_a_session_begins_with_its_preparation():
    """`RunStarted` comes once a run is prepared; a resume begins before that."""
    snapshot, times = RunSnapshot(), {}
    for time, event in (
        (100.0, StateChanged("preparing")),
        (110.0, PlanBuilt({}, "grid")),
        (120.0, RunStarted(name="n")),
        (130.0, RunEnded("failed", "why", "Error")),
        (500.0, StateChanged("preparing")),
        (510.0, LogLine()),
        (520.0, RunStarted(name="n", resumed_step=4)),
        (525.0, RunEnded("stopped")),
    ):
        snapshot.apply(Record("r", snapshot.last_seq + 1, time, event))
        times[time] = (snapshot.state, snapshot.sessions, snapshot.seconds, snapshot.is_started)
    assert times == {
        100.0: ("preparing", 1, 0.0, False),
        110.0: ("preparing", 1, 10.0, False),
        120.0: ("preparing", 1, 20.0, True),
        130.0: ("failed", 1, 30.0, True),
        500.0: ("preparing", 2, 30.0, False),
        510.0: ("preparing", 2, 40.0, False),
        520.0: ("preparing", 2, 50.0, True),
        525.0: ("stopped", 2, 55.0, True),
    }
    assert (snapshot.started_time, snapshot.session_time) == (100.0, 500.0)


def test_the_result_of_a_job_ends_it():
    for job, result in (
        ("tokenize", DataPrepared()),
        ("evaluate", EvalFinished()),
        ("sample", ExactMatchMeasured()),
        ("checkpoint", CheckpointWritten()),
        ("export", ExportWritten()),
    ):
        assert fold_of(JobProgressed(job, 1, 4), result).job is None
        assert fold_of(JobProgressed("load_model", 1, 4), result).job.job == "load_model"


def test_a_job_shows_until_it_is_done_or_the_state_changes():
    loading = [JobProgressed("load_model", done, 4, "m") for done in range(4)]
    assert fold_of(*loading).job == Job("load_model", 3, 4, "m", started=1001.0, time=1004.0)
    assert fold_of(*loading, JobProgressed("load_model", 4, 4)).job is None
    assert fold_of(*loading, StateChanged("running")).job is None
    assert fold_of(*loading, RunEnded()).job is None
    assert fold_of(*loading, JobProgressed("tokenize", 1, 0)).job == Job(
        "tokenize", 1, 0, "", 1005.0, 1005.0
    )


def test_the_log_keeps_its_last_500_lines():
    snapshot = fold_of(*(LogLine("info", str(n)) for n in range(700)))
    assert [entry.text for entry in snapshot.log] == [str(n) for n in range(200, 700)]


def test_an_event_of_a_newer_version_changes_only_the_envelope():
    snapshot = fold_of(Unknown("newer", {"step": 9}))
    assert (snapshot.run_id, snapshot.last_seq, snapshot.last_time) == ("r", 1, 1001.0)
    assert snapshot.started_time == 1001.0
    (
        snapshot.run_id,
        snapshot.last_seq,
        snapshot.last_time,
        snapshot.started_time,
        snapshot.lines,
    ) = "", 0, None, None, 0
    assert snapshot == RunSnapshot()
