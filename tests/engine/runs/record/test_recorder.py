"""The record of a run has one valid line for each event, whatever happens. The snapshot built from
it is tested in test_snapshot.py.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading

import pytest

from engine.errors import RunError
from engine.paths import PROGRAM_ROOT
from engine.runs.record import recorder as recorder_module
from engine.runs.record.events import (
    ControlReceived,
    DataPrepared,
    LogLine,
    PlanBuilt,
    Record,
    RunStarted,
    StateChanged,
    StepFinished,
    StepTimeline,
)
from engine.runs.record.following import Follower, replay
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.snapshot import RunSnapshot
from tests.support.folded import fold


def lines(folder) -> list[dict]:
    text = (folder / "events.jsonl").read_bytes()
    assert text.endswith(b"\n") or not text
    return [json.loads(line) for line in text.splitlines()]


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
        ("run_started", "run-1"),
        ("log_line", "run-1"),
        ("state_changed", "run-1"),
    ]
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
        shown = [
            record.event.text.split()[1]
            for record in heard
            if record.event.text.startswith(f"{worker} ")
        ]
        assert shown == [str(step) for step in range(100)]


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


@pytest.mark.parametrize(
    ("event", "named"),
    [
        (StepFinished(loss=math.nan), "step_finished.loss is nan"),
        (StepFinished(exposed={"h2d": math.inf}), "step_finished.exposed.h2d is inf"),
        (
            StepTimeline(spans=[{"start": 0.0}, {"start": -math.inf}]),
            r"step_timeline.spans\[1\].start is -inf",
        ),
        (
            PlanBuilt(choices={"a": ({"b": [math.nan]},)}),
            r"plan_built.choices.a\[0\].b\[0\] is nan",
        ),
    ],
)
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
    with pytest.raises(
        RunError, match="cannot be written .No space left on device.; free at least 16 MiB"
    ):
        recorder.emit(LogLine(text="lost"))
    monkeypatch.setattr(recorder_module.os, "write", write)
    assert recorder.emit(LogLine(text="after")).seq == 2
    recorder.close()
    assert [line["text"] for line in lines(tmp_path)] == ["before", "after"]
    assert fold(replay(recorder.path)) == recorder.snapshot


def test_what_is_given_out_shares_nothing_with_the_caller(tmp_path):
    span = {"unit": "head", "op": "loss", "lane": "COMPUTE", "start": 0.0, "end": 1.0}
    recorder, spans = RunRecorder(tmp_path, "r"), [span | {"micro_batch": 2}]
    record = recorder.emit(StepTimeline(step=1, spans=spans))
    spans[0]["unit"] = "changed"
    assert record.event.spans == [span | {"micro_batch": 2}]
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
        expected = 2 if cut >= len(full) - 1 else 1  # a line without its newline is kept
        assert len(list(replay(folder / "events.jsonl"))) == (2 if cut == len(full) else 1)
        again = RunRecorder(folder, "r")
        assert again.emit(LogLine(text="next")).seq == expected + 1
        again.close()
        content = (folder / "events.jsonl").read_bytes()
        assert content.startswith(full if expected == 2 else kept)
        assert [line["seq"] for line in lines(folder)] == list(range(1, expected + 2))
        torn = folder / "events.torn"
        aside = torn.read_bytes() if torn.exists() else b"\n"
        assert aside == (full[len(kept) : cut] if expected == 1 else b"") + b"\n"


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
    for damage in (
        b"garbage",
        b"[1]",
        b"{}",
        b"null",
        b'{"kind":[],"run_id":"r","seq":1,"time":1}',
        b"",
        whole.replace(b"115", b"1.5"),
        whole.replace(b'"loss":0.0', b'"loss":1e999'),
        re.sub(rb'"time":(\d+)', rb'"time":\g<1>000000', whole),
        whole.replace(b'"seq":', b'"seq":"'),
        whole[:-1],
    ):
        content[at] = damage
        recorder.path.write_bytes(b"\n".join(content))
        records = list(replay(recorder.path))
        assert records == Follower(recorder.path).read_new()
        assert [record.seq for record in records] == [1, 2, 3]
        assert {record.run_id for record in records} == {tmp_path.name}
        assert [record.event.step for k, record in enumerate(records) if k != at] == [
            k for k in (1, 2, 3) if k != at + 1
        ]
        warning = records[at].event
        assert isinstance(warning, LogLine)
        assert warning.level == "warning"
        assert f"Line {at + 1} of" in warning.text
        again = RunRecorder(tmp_path, tmp_path.name)
        assert again.emit(StepFinished(4)).seq == 4
        again.close()
        assert again.snapshot == fold(replay(again.path)) and again.snapshot.started_time > 0
        assert again.path.read_bytes().startswith(b"\n".join(content))


def test_a_killed_process_loses_no_line_that_it_emitted(tmp_path):
    code = (
        "import sys; from engine.runs.record.recorder import RunRecorder; "
        "from engine.runs.record.events import LogLine\nrecorder = RunRecorder(sys.argv[1], 'r')\n"
        "for n in range(10**9):\n    "
        "recorder.emit(LogLine(text='x' * 5000)); print(n, flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], cwd=PROGRAM_ROOT, stdout=subprocess.PIPE
    )
    shown = [int(process.stdout.readline()) for _ in range(50)]
    process.send_signal(signal.SIGKILL)
    shown += [
        int(line)
        for line in process.stdout.read().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]
    process.wait()
    process.stdout.close()
    recorder = RunRecorder(tmp_path, "r")
    assert recorder.snapshot.last_seq >= shown[-1] + 1
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


def test_an_error_midway_costs_no_record_and_repeats_none(tmp_path, monkeypatch):
    recorder = RunRecorder(tmp_path, "r")
    records = [recorder.emit(LogLine(text=str(n))) for n in range(5)]
    recorder.close()
    follower, failing_at = Follower(recorder.path), [2, 0]

    class Failing:
        def __init__(self, path):
            self.file = path.open("rb")
            self.end = failing_at.pop(0) if failing_at else None

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def seek(self, offset):
            self.file.seek(offset)

        def tell(self):
            return self.file.tell()

        def readline(self, size):
            if self.end == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.end = None if self.end is None else self.end - 1
            return self.file.readline(size)

    monkeypatch.setattr("engine.runs.record.following.open_record", Failing)
    assert follower.read_new() == records[:2]
    with pytest.raises(RunError, match="cannot be read"):
        follower.read_new()
    assert follower.read_new() == records[2:] and follower.read_new() == []


def test_an_event_of_wrong_values_is_not_written(tmp_path):
    recorder = RunRecorder(tmp_path, "r")
    with pytest.raises(TypeError, match="state"):
        recorder.emit(StateChanged("on_holiday"))
    assert recorder.emit(LogLine()).seq == 1 and len(lines(tmp_path)) == 1
    recorder.close()
