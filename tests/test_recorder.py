"""The record of a run: one valid line an event whatever happens, and one snapshot however it is read (law 7)."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading

import pytest

from engine import recorder as recorder_module
from engine.errors import RunError
from engine.events import (CheckpointWritten, ControlReceived, DataPrepared, EvalFinished, ExactMatchMeasured,
                           ExportWritten, FitReported, JobProgressed, LogLine, MemorySampled, PlanBuilt, Record,
                           RunEnded, RunStarted, StateChanged, StepFinished, StepTimeline, Unknown)
from engine.paths import PROGRAM_ROOT
from engine.recorder import Follower, RunRecorder, replay
from engine.snapshot import Job, RunSnapshot


def fold(records) -> RunSnapshot:
    snapshot = RunSnapshot()
    for record in records:
        snapshot.apply(record)
    return snapshot


def lines(folder) -> list[dict]:
    text = (folder / "events.jsonl").read_bytes()
    assert text.endswith(b"\n") or not text
    return [json.loads(line) for line in text.splitlines()]


def fold_of(*events, run_id="r") -> RunSnapshot:
    return fold(Record(run_id, seq, 1000.0 + seq, event) for seq, event in enumerate(events, start=1))


# ---------------------------------------------------------------------- writing


def test_a_line_an_event_and_the_count_goes_on(tmp_path):
    first = RunRecorder(tmp_path, "run-1")
    record = first.emit(RunStarted(name="n"))
    assert (record.seq, record.run_id, record.event) == (1, "run-1", RunStarted(name="n"))
    first.emit(LogLine(text="zwei\nZeilen"))
    assert [line["seq"] for line in lines(tmp_path)] == [1, 2]  # on disk before it is closed
    first.close()
    second = RunRecorder(tmp_path, "run-1")
    assert second.snapshot == first.snapshot
    assert second.emit(StateChanged("running")).seq == 3
    second.close()
    second.close()
    assert [(line["kind"], line["run_id"]) for line in lines(tmp_path)] == [
        ("run_started", "run-1"), ("log_line", "run-1"), ("state_changed", "run-1")]
    with pytest.raises(RuntimeError, match="after the recorder was closed"):
        second.emit(LogLine())


def test_threads_do_not_mix_lines_and_listeners_hear_them_in_order(tmp_path):
    recorder, heard = RunRecorder(tmp_path, "r"), []
    recorder.subscribe(heard.append)

    def work(worker: int) -> None:
        for step in range(100):
            recorder.emit(LogLine(text=f"{worker} {step} " + "x" * 200))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert [record.seq for record in heard] == list(range(1, 601))
    assert heard == list(replay(tmp_path / "events.jsonl"))
    for worker in range(6):
        said = [record.event.text.split()[1] for record in heard if record.event.text.startswith(f"{worker} ")]
        assert said == [str(step) for step in range(100)]


def test_a_slow_listener_does_not_hold_up_the_file(tmp_path):
    recorder, heard = RunRecorder(tmp_path, "r"), []
    entered, go_on = threading.Event(), threading.Event()

    def listen(record: Record) -> None:
        entered.set()
        go_on.wait(20)
        heard.append(record.seq)

    recorder.subscribe(listen)
    slow = threading.Thread(target=recorder.emit, args=(LogLine(text="1"),))
    slow.start()
    assert entered.wait(20)
    recorder.emit(LogLine(text="2"))
    assert len(lines(tmp_path)) == 2 and heard == []
    go_on.set()
    slow.join()
    assert heard == [1, 2]
    recorder.close()


def test_a_listener_may_emit(tmp_path):
    recorder, heard = RunRecorder(tmp_path, "r"), []

    def answer(record: Record) -> None:
        if isinstance(record.event, ControlReceived):
            recorder.emit(StateChanged("stopping"))

    recorder.subscribe(answer)
    recorder.subscribe(lambda record: heard.append(record.event.kind))
    recorder.emit(ControlReceived("stop"))
    assert heard == ["control_received", "state_changed"]
    recorder.close()


def test_a_broken_listener_is_dropped_and_the_record_says_so(tmp_path):
    recorder, heard = RunRecorder(tmp_path, "r"), []

    def broken(record: Record) -> None:
        raise BrokenPipeError("no terminal")

    recorder.subscribe(broken)
    recorder.subscribe(lambda record: heard.append(record.event.kind))
    recorder.emit(StateChanged("running"))
    recorder.emit(StepFinished(step=1))
    recorder.close()
    assert heard == ["state_changed", "log_line", "step_finished"]
    assert "no terminal" in recorder.snapshot.log[0].text


@pytest.mark.parametrize(("event", "named"), [
    (StepFinished(loss=math.nan), "step_finished.loss is nan"),
    (StepFinished(exposed={"h2d": math.inf}), "step_finished.exposed.h2d is inf"),
    (StepTimeline(spans=[{"start": 0.0}, {"start": -math.inf}]), r"step_timeline.spans\[1\].start is -inf"),
    (PlanBuilt(choices={"a": ({"b": [math.nan]},)}), r"plan_built.choices.a\[0\].b\[0\] is nan"),
])
def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path, event, named):
    recorder = RunRecorder(tmp_path, "r")
    with pytest.raises(ValueError, match=named):
        recorder.emit(event)
    with pytest.raises(TypeError):
        recorder.emit(DataPrepared(summary={"path": tmp_path}))
    assert lines(tmp_path) == [] and recorder.snapshot == RunSnapshot()
    assert recorder.emit(LogLine(text="still works")).seq == 1
    recorder.close()


def test_a_full_disk_leaves_whole_lines_and_says_so(tmp_path, monkeypatch):
    recorder = RunRecorder(tmp_path, "r")
    recorder.emit(LogLine(text="before"))
    write, calls = os.write, []

    def full(descriptor: int, data) -> int:
        calls.append(1)
        if len(calls) % 2:
            return write(descriptor, bytes(data)[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recorder_module.os, "write", full)
    with pytest.raises(RunError, match="cannot be written .No space left on device.; free some disk space"):
        recorder.emit(LogLine(text="lost"))
    monkeypatch.setattr(recorder_module.os, "write", write)
    assert recorder.emit(LogLine(text="after")).seq == 2
    recorder.close()
    assert [line["text"] for line in lines(tmp_path)] == ["before", "after"]
    assert fold(replay(recorder.path)) == recorder.snapshot


def test_what_is_given_out_shares_nothing_with_the_caller(tmp_path):
    span = {"unit": "head", "op": "loss", "lane": "COMPUTE", "start": 0.0, "end": 1.0}
    recorder, spans = RunRecorder(tmp_path, "r"), [span | {"pair": (1, 2)}]
    record = recorder.emit(StepTimeline(step=1, spans=spans))
    spans[0]["unit"] = "changed"
    assert record.event.spans == [span | {"pair": [1, 2]}]
    assert recorder.snapshot == fold(replay(recorder.path))
    recorder.close()


# ---------------------------------------------------------------------- torn and damaged files


def test_a_last_line_torn_anywhere_is_set_aside(tmp_path):
    whole = RunRecorder(tmp_path, "r")
    whole.emit(RunStarted(name="n"))
    kept = whole.path.read_bytes()
    whole.emit(LogLine(text="torn é"))
    whole.close()
    full = whole.path.read_bytes()
    for cut in range(len(kept), len(full) + 1):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "events.jsonl").write_bytes(full[:cut])
        expected = 2 if cut >= len(full) - 1 else 1  # without its newline only, the line is whole
        assert len(list(replay(folder / "events.jsonl"))) == (2 if cut == len(full) else 1)
        again = RunRecorder(folder, "r")
        assert again.emit(LogLine(text="next")).seq == expected + 1
        again.close()
        content = (folder / "events.jsonl").read_bytes()
        assert content.startswith(full if expected == 2 else kept) and [
            line["seq"] for line in lines(folder)] == list(range(1, expected + 2))
        torn = folder / "events.torn"
        aside = torn.read_bytes() if torn.exists() else b"\n"
        assert aside == (full[len(kept):cut] if expected == 1 else b"") + b"\n"


def test_zeros_after_a_power_cut_and_long_torn_lines_are_set_aside(tmp_path):
    recorder = RunRecorder(tmp_path, "r")
    recorder.emit(LogLine(text="kept"))
    recorder.close()
    for torn in (b"\0" * 5000, b'{"kind":"step_timeline","spans":[' + b'{"unit":"block"},' * 20000):
        with open(recorder.path, "ab") as file:
            file.write(torn)
        again = RunRecorder(tmp_path, "r")
        again.emit(LogLine(text="next"))
        again.close()
    assert [line["text"] for line in lines(tmp_path)] == ["kept", "next", "next"]
    assert (tmp_path / "events.torn").stat().st_size == 5000 + 1 + len(torn) + 1


def test_a_record_that_is_one_torn_line_starts_again(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'{"kind":"run_st')
    recorder = RunRecorder(tmp_path, "r")
    assert recorder.emit(RunStarted()).seq == 1
    recorder.close()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_damaged_line_costs_what_it_said_and_no_more(tmp_path, at):
    recorder = RunRecorder(tmp_path, tmp_path.name)
    for step in (1, 2, 3):
        recorder.emit(StepFinished(step, tokens=115))
    recorder.close()
    content = recorder.path.read_bytes().split(b"\n")
    whole = content[at]
    for damage in (b"garbage", b"[1]", b"{}", b"null", b'{"kind":[],"run_id":"r","seq":1,"time":1}', b"",
                   whole.replace(b"115", b"1.5"), whole.replace(b'"loss":0.0', b'"loss":1e999'),
                   re.sub(rb'"time":(\d+)', rb'"time":\g<1>000000', whole), whole.replace(b'"seq":', b'"seq":"'), whole[:-1]):
        content[at] = damage
        recorder.path.write_bytes(b"\n".join(content))
        records = list(replay(recorder.path))
        assert records == Follower(recorder.path).read_new()
        assert [record.seq for record in records] == [1, 2, 3] and {record.run_id for record in records} == {tmp_path.name}
        assert [record.event.step for k, record in enumerate(records) if k != at] == [k for k in (1, 2, 3) if k != at + 1]
        warning = records[at].event
        assert isinstance(warning, LogLine) and warning.level == "warning" and f"Line {at + 1} of" in warning.text
        again = RunRecorder(tmp_path, tmp_path.name)
        assert again.emit(StepFinished(4)).seq == 4
        again.close()
        assert again.snapshot == fold(replay(again.path)) and again.snapshot.started_time > 0
        assert again.path.read_bytes().startswith(b"\n".join(content))


def test_a_killed_process_loses_no_line_that_it_emitted(tmp_path):
    code = ("import sys; from engine.recorder import RunRecorder; from engine.events import LogLine\n"
            "recorder = RunRecorder(sys.argv[1], 'r')\n"
            "for n in range(10**9):\n"
            "    recorder.emit(LogLine(text='x' * 5000)); print(n, flush=True)")
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=PROGRAM_ROOT, stdout=subprocess.PIPE)
    said = [int(process.stdout.readline()) for _ in range(50)]
    process.send_signal(signal.SIGKILL)
    said += [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith(b"\n")]
    process.wait()
    process.stdout.close()
    recorder = RunRecorder(tmp_path, "r")
    assert recorder.snapshot.last_seq >= said[-1] + 1
    recorder.close()


def test_a_folder_that_is_not_there_is_a_plain_error(tmp_path):
    with pytest.raises(RunError, match="cannot be opened"):
        RunRecorder(tmp_path / "none", "r")


# ---------------------------------------------------------------------- reading


def test_a_follower_waits_for_the_file_and_for_the_end_of_a_line(tmp_path):
    path = tmp_path / "events.jsonl"
    follower = Follower(path)
    assert follower.read_new() == []
    recorder = RunRecorder(tmp_path, "r")
    assert follower.read_new() == []
    records = [recorder.emit(LogLine(text=f"{n} \u2028 \x85 \r")) for n in range(3)]
    recorder.close()
    content = path.read_bytes()
    path.write_bytes(b"")
    seen = []
    for cut in range(0, len(content) + 1, 7):
        path.write_bytes(content[:cut])
        seen += follower.read_new()
        assert len(seen) == content[:cut].count(b"\n")
    path.write_bytes(content)
    assert seen + follower.read_new() == records and follower.read_new() == []
    assert list(replay(tmp_path / "none.jsonl")) == []


# ---------------------------------------------------------------------- law 7


def random_run(seed: int):
    """Events of a run with several sessions: each resumes at an earlier step, or begins anew."""
    rng = random.Random(seed)
    step = 0
    for session in range(rng.randint(1, 4)):
        resumed = rng.choice([None, rng.randint(0, step)]) if session else None
        step = resumed or 0
        if rng.random() < 0.7:
            yield StateChanged("preparing")
            yield PlanBuilt({"rounds": session}, "grid")
        yield RunStarted(name="n", total_steps=50, units=["embed", "head"], resumed_step=resumed)
        for _ in range(rng.randint(0, 60)):
            kind = rng.randrange(12)
            if kind < 5:
                step += 1
                yield StepFinished(step, rng.random(), rng.random(), 1e-4, 100, 50, rng.random(), 1e3, 0.5,
                                   {cause: rng.random() for cause in rng.sample(["h2d", "d2h", "other", "new"], 2)})
            elif kind == 5:
                yield StepTimeline(step, [{"unit": "block.0", "op": "prefetch", "lane": "H2D", "start": 0.0, "end": rng.random()}])
            elif kind == 6:
                yield MemorySampled(step, *(rng.randrange(10**12) for _ in range(8)))
            elif kind == 7:
                yield EvalFinished(step, rng.random(), 10, 0.1)
            elif kind == 8:
                yield JobProgressed(rng.choice(["export", "checkpoint"]), rng.randint(0, 4), 4, "m")
            elif kind == 9:
                yield rng.choice([StateChanged("running"), LogLine("warning", "w"), ControlReceived("save"),
                                  Unknown("newer", {"a": 1}), DataPrepared({"rows": 5}),
                                  FitReported({"verdict": "fits"}), PlanBuilt({"rounds": 1}, "grid")])
            elif kind == 10:
                yield CheckpointWritten(step, "p", 12, 0.5)
            else:
                yield rng.choice([ExactMatchMeasured(step, "after", 1, 2, [{"prompt": "p"}]),
                                  ExportWritten(step, "e", 9)])
        if rng.random() < 0.5:
            yield RunEnded(rng.choice(["finished", "stopped", "failed"]), "why", "Error")


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
    """Against a plain definition: a resume takes every row of a later step out of the story."""
    story: list = []
    for event in random_run(seed):
        if isinstance(event, RunStarted):
            story = [old for old in story if getattr(old, "step", 0) <= (event.resumed_step or 0)]
        story.append(event)
    snapshot = fold_of(*random_run(seed))
    steps = [event for event in story if isinstance(event, StepFinished)]
    assert list(snapshot.steps.step) == [event.step for event in steps] == sorted(set(snapshot.steps.step))
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "loss_tokens", "seconds", "tokens_per_second",
                 "tflops"):
        assert list(getattr(snapshot.steps, name)) == [getattr(event, name) for event in steps]
    assert {"h2d", "d2h", "optimizer", "other"} <= set(snapshot.steps.exposed)
    for cause, values in snapshot.steps.exposed.items():
        assert list(values) == [event.exposed.get(cause, 0.0) for event in steps]
    assert len(snapshot.steps.time) == len(snapshot.steps) == len(steps)
    for columns, kind in ((snapshot.memory, MemorySampled), (snapshot.evals, EvalFinished)):
        rows = [event for event in story if isinstance(event, kind)]
        for name in rows[0].fields() if rows else ():
            assert list(getattr(columns, name)) == [getattr(event, name) for event in rows]
    for events, kind in ((snapshot.checkpoints, CheckpointWritten), (snapshot.exact_matches, ExactMatchMeasured),
                         (snapshot.exports, ExportWritten)):
        assert events == [event for event in story if isinstance(event, kind)]
    assert snapshot.timeline_steps == [event.step for event in story if isinstance(event, StepTimeline)]


def test_a_run_of_any_length_takes_a_bounded_room(monkeypatch):
    """Against all rows: the newest are whole, the older ones every 2nd, 4th, 8th ... from the first on."""
    monkeypatch.setattr("engine.snapshot.ROWS", 64)
    snapshot, rows = RunSnapshot(), []
    for step in range(1, 1001):
        event = StepFinished(step, loss=1 / step, exposed={"h2d": step / 7} | ({"late": 1.0} if step > 500 else {}))
        rows.append(event)
        snapshot.apply(Record("run", step, 1000.0 + step, event))
        steps = snapshot.steps
        assert len(steps) <= 64 and steps.count == step and len({len(column) for column in steps.columns()}) == 1
        assert list(steps.step[-32:]) == list(range(max(1, step - 31), step + 1))
        kept = [rows[k] for k in steps.number]
        assert list(steps.loss) == [row.loss for row in kept] and list(steps.step) == [row.step for row in kept]
        assert list(steps.exposed["late" if step > 500 else "other"]) == [
            row.exposed.get("late" if step > 500 else "other", 0.0) for row in kept]
        gaps = [b - a for a, b in zip(steps.number[:-32], steps.number[1:-32])]
        assert steps.number[0] == 0 and max(gaps, default=1) <= max(1, step // 8)
    snapshot.apply(Record("run", 1001, 3000.0, RunStarted(resumed_step=900)))
    assert snapshot.steps.step[-1] <= 900 and snapshot.step == 900
    snapshot.apply(Record("run", 1002, 3001.0, StepFinished(901)))
    assert snapshot.steps.step[-1] == 901 and snapshot.steps.number[-1] >= snapshot.steps.number[-2] + 1


# ---------------------------------------------------------------------- what the snapshot says


def test_progress_and_time_left():
    started = RunStarted(total_steps=10)
    steps = [StepFinished(step, loss=step / 2, seconds=took) for step, took in enumerate((60.0, 2.0, 2.0, 4.0), 1)]
    assert fold_of().progress == 0.0 and fold_of().step == 0 and fold_of().loss is None
    assert fold_of(started).seconds_left is None
    snapshot = fold_of(started, StateChanged("running"), *steps)
    assert (snapshot.step, snapshot.loss, snapshot.progress) == (4, 2.0, 0.4)
    assert snapshot.seconds_left == 3.0 * 6  # the median: a slow first step does not count
    assert not snapshot.is_over
    over = fold_of(started, *steps, RunEnded("failed", "why", "NonFiniteError"))
    assert over.is_over and over.seconds_left is None
    assert (over.state, over.reason, over.error_type, over.ended_time) == ("failed", "why", "NonFiniteError", 1006.0)


def test_a_resume_opens_the_run_again():
    ended = [RunStarted(total_steps=10), StepFinished(1), StepFinished(2), StepTimeline(2), RunEnded("stopped", "why")]
    snapshot = fold_of(*ended, RunStarted(total_steps=10, resumed_step=2))
    assert (snapshot.state, snapshot.reason, snapshot.ended_time, snapshot.sessions) == ("preparing", "", None, 2)
    assert list(snapshot.steps.step) == [1, 2] and snapshot.timeline == StepTimeline(2)
    older = fold_of(*ended, RunStarted(total_steps=10, resumed_step=1))
    assert list(older.steps.step) == [1] and older.step == 1 and older.timeline is None and older.timeline_steps == []
    anew = fold_of(*ended, RunStarted(total_steps=10))
    assert len(anew.steps) == 0 and anew.step == 0
    lost = fold_of(RunStarted(total_steps=10), RunStarted(total_steps=10, resumed_step=5))
    assert lost.step == 5 and lost.progress == 0.5


def test_the_time_between_sessions_is_not_counted():
    records = [Record("r", 1, 100.0, RunStarted()), Record("r", 2, 130.0, StepFinished(1)),
               Record("r", 3, 900.0, RunStarted(resumed_step=1)), Record("r", 4, 905.0, RunEnded())]
    snapshot = fold(records)
    assert snapshot.seconds == 35.0 and snapshot.earlier_seconds == 30.0
    assert (snapshot.started_time, snapshot.session_time, snapshot.ended_time) == (100.0, 900.0, 905.0)


def test_a_session_begins_with_its_preparation():
    """A run describes itself once it is prepared; a resume opens the run before that."""
    snapshot, times = RunSnapshot(), {}
    for time, event in ((100.0, StateChanged("preparing")), (110.0, PlanBuilt({}, "grid")), (120.0, RunStarted(name="n")),
                        (130.0, RunEnded("failed", "why", "Error")), (500.0, StateChanged("preparing")),
                        (510.0, LogLine()), (520.0, RunStarted(name="n", resumed_step=4)), (525.0, RunEnded("stopped"))):
        snapshot.apply(Record("r", snapshot.last_seq + 1, time, event))
        times[time] = (snapshot.state, snapshot.sessions, snapshot.seconds, snapshot.is_started, snapshot.error_type)
    assert times == {
        100.0: ("preparing", 1, 0.0, False, ""), 110.0: ("preparing", 1, 10.0, False, ""),
        120.0: ("preparing", 1, 20.0, True, ""), 130.0: ("failed", 1, 30.0, True, "Error"),
        500.0: ("preparing", 2, 30.0, False, ""), 510.0: ("preparing", 2, 40.0, False, ""),
        520.0: ("preparing", 2, 50.0, True, ""), 525.0: ("stopped", 2, 55.0, True, "")}
    assert (snapshot.started_time, snapshot.session_time, snapshot.ended_time) == (100.0, 500.0, 525.0)


def test_the_result_of_a_job_ends_it():
    for job, result in (("tokenise", DataPrepared()), ("evaluate", EvalFinished()), ("sample", ExactMatchMeasured()),
                        ("checkpoint", CheckpointWritten()), ("export", ExportWritten())):
        assert fold_of(JobProgressed(job, 1, 4), result).job is None
        assert fold_of(JobProgressed("load_model", 1, 4), result).job.job == "load_model"


def test_a_job_shows_until_it_is_done_or_the_state_changes():
    loading = [JobProgressed("load_model", done, 4, "m") for done in range(4)]
    assert fold_of(*loading).job == Job("load_model", 3, 4, "m", started=1001.0, time=1004.0)
    assert fold_of(*loading, JobProgressed("load_model", 4, 4)).job is None
    assert fold_of(*loading, StateChanged("running")).job is None
    assert fold_of(*loading, RunEnded()).job is None
    assert fold_of(*loading, JobProgressed("tokenise", 1, 0)).job == Job("tokenise", 1, 0, "", 1005.0, 1005.0)


def test_the_log_keeps_its_last_500_lines():
    snapshot = fold_of(*(LogLine("info", str(n)) for n in range(700)))
    assert [entry.text for entry in snapshot.log] == [str(n) for n in range(200, 700)]


def test_an_event_of_a_newer_version_changes_only_the_envelope():
    snapshot = fold_of(Unknown("newer", {"step": 9}))
    assert (snapshot.run_id, snapshot.last_seq, snapshot.last_time) == ("r", 1, 1001.0)
    assert snapshot.started_time == 1001.0
    snapshot.run_id, snapshot.last_seq, snapshot.last_time, snapshot.started_time = "", 0, None, None
    assert snapshot == RunSnapshot()
