"""The list of runs, with their names and notes, agrees with the complete records and hides no
damaged run.
"""

from __future__ import annotations

import json
import random
import re

import pytest

from engine.errors import RunError
from engine.runs.record.events import (
    ForecastChecked,
    PlanBuilt,
    Record,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
    StepTimeline,
)
from engine.runs.record.following import replay
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run, delete_run, open_run
from engine.runs.summaries import listing as run_list
from engine.runs.summaries.about import NAME_LIMIT, NOTE_LIMIT, About, read_about, write_about
from engine.runs.summaries.listing import list_runs
from tests.support.clocks import Clocks
from tests.support.folded import fold
from tests.support.random_runs import random_run
from tests.support.run_folders import CONFIG, named, record

# ---------------------------------------------------------------------- what it says


def test_the_list_says_what_the_record_says(tmp_path):
    waiting = create_run(tmp_path, named("waiting"))
    done, held = create_run(tmp_path, named("done")), create_run(tmp_path, named("held"))
    record(
        done,
        RunStarted(total_steps=2, device_name="CPU"),
        StateChanged("running"),
        StepFinished(1, loss=2.0),
        ForecastChecked(1, "running", {"step_seconds": {"error": 2.0}}),
        StepFinished(2, loss=1.5),
        ForecastChecked(2, "end", {"step_seconds": {"error": 0.5}}),
        RunEnded("finished", "All steps done."),
    )
    record(held, RunStarted(total_steps=9), StateChanged("running"), StepFinished(1, loss=3.0))
    with held.lock():
        found = {run.name: run for run in list_runs(tmp_path)}
    assert set(found) == {"waiting", "done", "held"}
    assert {name: run.step_times for name, run in found.items()} == {
        "waiting": None,
        "done": 1.5,
        "held": None,
    }
    run = found["done"]
    assert run.device == "CPU"
    assert (run.id, run.state, run.step, run.total_steps, run.loss) == (
        done.id,
        "finished",
        2,
        2,
        1.5,
    )
    assert (run.model, run.data, run.path, run.reason) == (
        "models/m",
        "d.jsonl",
        str(done.path),
        "All steps done.",
    )
    assert (found["held"].state, found["held"].loss) == ("running", 3.0)
    assert (found["waiting"].state, found["waiting"].step, found["waiting"].loss) == (
        "interrupted",
        0,
        None,
    )
    assert {run.name: run.state for run in list_runs(tmp_path)} == {
        "waiting": "interrupted",
        "done": "finished",
        "held": "interrupted",
    }
    assert waiting.path.is_dir()


def test_the_newest_run_comes_first(tmp_path):
    ids = []
    for hour in (3, 1, 2):
        folder = create_run(tmp_path, CONFIG)
        line = Record(folder.id, 1, 1000.0 * hour, RunStarted()).to_json()
        folder.events_path.write_text(json.dumps(line) + "\n")
        ids.append(folder.id)
    assert [run.id for run in list_runs(tmp_path)] == [ids[0], ids[2], ids[1]]
    assert list_runs(tmp_path / "none") == []


@pytest.mark.parametrize("seed", range(12))
def test_the_two_ends_tell_what_the_whole_record_tells(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(run_list, "_TAIL_BYTES", random.Random(seed).choice([50, 300, 5000]))
    folder = create_run(tmp_path, CONFIG)
    recorder = RunRecorder(folder, folder.id)
    for event in random_run(seed):
        if recorder.snapshot.is_over:
            recorder.close()
            recorder = RunRecorder(folder, folder.id)
        recorder.emit(event)
    recorder.close()
    with open(folder.events_path, "ab") as file:
        file.write(b'{"kind":"step_finished","run_id":"r","se')  # being written
    snapshot = fold(replay(folder.events_path))
    with folder.lock():
        (run,) = list_runs(tmp_path)
    assert (run.state, run.reason, run.step, run.loss, run.total_steps) == (
        snapshot.state,
        snapshot.reason,
        snapshot.step,
        snapshot.loss,
        snapshot.total_steps,
    )
    assert run.created == snapshot.started_time
    assert run.seconds == pytest.approx(snapshot.seconds, abs=0.05)


def test_steps_that_two_resumes_took_back_are_not_told(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    steps = [StepFinished(step, loss=10.0 - step) for step in range(1, 6)]
    snapshot = record(
        folder, RunStarted(), *steps, RunStarted(resumed_step=2), RunStarted(resumed_step=4)
    )
    (run,) = list_runs(tmp_path)
    assert (run.step, run.loss) == (snapshot.step, snapshot.loss) == (4, 8.0)


def test_only_the_ends_of_a_long_record_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(run_list, "_END_LIMIT", 200_000)
    folder = create_run(tmp_path, CONFIG)
    middle = [StepFinished(step, loss=1 / step) for step in range(1, 1001)]
    record(
        folder,
        StateChanged("preparing"),
        PlanBuilt(grid="x" * 1000),
        RunStarted(total_steps=5000),
        StateChanged("running"),
        *middle,
        StepTimeline(
            1000,
            [
                {"unit": f"block.{n}", "op": "forward", "lane": "COMPUTE", "start": 0.0, "end": 1.0}
                for n in range(1300)
            ],
        ),
    )
    content = folder.events_path.read_bytes()
    end_of_head = content.index(b'{"kind":"step_finished"')
    folder.events_path.write_bytes(
        content[:end_of_head] + b"#" * 100_000 + b"\n" + content[end_of_head + 100_000 :]
    )
    with folder.lock():
        (run,) = list_runs(tmp_path)
    # The change to `running` is too far from the end to be read; a step at the end implies it.
    assert (run.state, run.step, run.total_steps, run.loss) == ("running", 1000, 5000, 1 / 1000)


def test_broken_folders_are_listed_with_the_reason(tmp_path):
    good = create_run(tmp_path, named("good"))
    record(good, RunStarted(), RunEnded())
    broken = {}
    for name, says in (
        ("empty", "config.yaml cannot be read"),
        ("yaml", "not valid YAML"),
        ("old", "there is no such setting"),
        ("folder", "events.jsonl is a folder, not a file"),
    ):
        folder = broken[name] = create_run(tmp_path, named(name))
        record(folder, RunStarted(), StepFinished(1), StateChanged("running"))
        broken[name] = (folder, says)
    (broken["empty"][0].path / "config.yaml").unlink()
    (broken["yaml"][0].path / "config.yaml").write_text("{")
    (broken["old"][0].path / "config.yaml").write_text(
        "model: {source: m}\ndata: {source: d}\ngone: 1"
    )
    broken["folder"][0].events_path.unlink()
    broken["folder"][0].events_path.mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "notes.txt").write_text("not a run")
    listed = {run.id: run for run in list_runs(tmp_path)}
    assert set(listed) == {good.id, *(folder.id for folder, _ in broken.values())}
    assert listed[good.id].state == "finished"
    for folder, says in broken.values():
        run = listed[folder.id]
        assert run.state == "unreadable"
        assert re.search(says, run.reason)
        assert "\n" not in run.reason
        delete_run(tmp_path, folder.id)
    assert [run.id for run in list_runs(tmp_path)] == [good.id]


@pytest.mark.parametrize("damaged", range(4))
def test_a_damaged_line_takes_no_run_off_the_list(tmp_path, damaged):
    folder = create_run(tmp_path, named("n"))
    record(folder, RunStarted(total_steps=9), StepFinished(1), StepFinished(2), RunEnded("stopped"))
    content = folder.events_path.read_bytes().split(b"\n")
    content[damaged] = b"\xff\xfe"
    folder.events_path.write_bytes(b"\n".join(content))
    (run,) = list_runs(tmp_path)
    assert run.state == ("interrupted" if damaged == 3 else "stopped")
    assert run.step == (1 if damaged == 2 else 2) and run.total_steps == (0 if damaged == 0 else 9)


def test_the_time_between_sessions_is_not_in_the_list_either(tmp_path, monkeypatch):
    clocks = Clocks(monkeypatch, wall=1000.0)
    folder = create_run(tmp_path, CONFIG)
    recorder = RunRecorder(folder, folder.id)
    for seconds, event in ((0, RunStarted()), (30, StepFinished(1))):
        clocks.pass_by(seconds)
        recorder.emit(event)
    recorder.close()
    clocks.pass_by(3970)
    again = RunRecorder(folder, folder.id)
    resumed = [
        (0, StateChanged("preparing")),
        (0, RunStarted(resumed_step=1)),
        (2, StateChanged("paused")),
        (500, StateChanged("running")),
        (2, RunEnded()),
    ]
    for seconds, event in resumed:
        clocks.pass_by(seconds)
        again.emit(event)
    again.close()
    (run,) = list_runs(tmp_path)
    assert run.seconds == again.snapshot.seconds == 34.0 and run.created == 1000.0
    assert again.snapshot.paused_seconds == 500.0


# ---------------------------------------------------------------------- names and notes


def test_a_name_and_a_note_are_kept_beside_the_run_and_change_nothing_else(tmp_path):
    folder = create_run(tmp_path, named("As run"))
    assert write_about(folder, "  Renamed – <b> ", " first line\nsecond \n") == About(
        "Renamed – <b>", "first line\nsecond"
    )
    (run,) = list_runs(tmp_path)
    assert (run.id, run.name, run.note) == (folder.id, "Renamed – <b>", "first line\nsecond")
    assert open_run(tmp_path, folder.id).config.name == "As run"
    assert sorted(path.name for path in folder.path.iterdir()) == ["about.json", "config.yaml"]
    write_about(folder, "As run", "")
    (run,) = list_runs(tmp_path)
    assert (run.name, run.note) == ("As run", "")


@pytest.mark.parametrize(
    ("name", "note", "says"),
    [
        ("two\nlines", "", "in one line"),
        ("a\0b", "", "in one line"),
        ("n" * (NAME_LIMIT + 1), "", "The name has 81 characters; 80 are possible"),
        (" \t", "", "The name is empty"),
        ("n", "x" * (NOTE_LIMIT + 1), "The note has 4,001 characters; 4,000 are possible"),
    ],
)
def test_names_and_notes_that_cannot_be_shown_are_refused(tmp_path, name, note, says):
    folder = create_run(tmp_path, CONFIG)
    write_about(folder, "kept", "as well")
    with pytest.raises(RunError, match=says):
        write_about(folder, name, note)
    assert read_about(folder.path) == About("kept", "as well")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"name": 1, "note": ""}', b'{"name": "x"}', b"\xff", b"[" * 100_000],
)
def test_a_damaged_note_hides_no_run(tmp_path, content):
    folder = create_run(tmp_path, named("n"))
    (folder.path / "about.json").write_bytes(content)
    (run,) = list_runs(tmp_path)
    assert (run.name, run.note, run.state) == ("n", "", "interrupted")


def test_a_run_that_cannot_be_read_keeps_its_name(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    write_about(folder, "Known", "still")
    (folder.path / "config.yaml").write_bytes(b"\0\xff")
    (run,) = list_runs(tmp_path)
    assert (run.state, run.name, run.note) == ("unreadable", "Known", "still")


def test_the_list_on_the_command_line_has_names_and_notes(tmp_path, capsys):
    import launch

    write_about(create_run(tmp_path, CONFIG), "Renamed", "why")
    assert launch.main(["runs", "--json", "--runs-dir", str(tmp_path)]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["note"]) == ("Renamed", "why")
