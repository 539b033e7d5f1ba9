"""A record read fast is the record read plainly: each line by json, each value looked at."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.pages.compare import Records
from engine.errors import RunError
from engine.paths import PROGRAM_ROOT
from engine.runs import following
from engine.runs import lines as lines_module
from engine.runs.events import PLAIN_KINDS, LineDamaged, LogLine, Record, RunStarted, StepTimeline, UnitNorms, UnreadTimeline
from engine.runs.folder import RunFolder
from engine.runs.following import Follower, catch_up, replay
from engine.runs.lines import parse_line, unread_timeline
from engine.runs.recorder import RunRecorder
from engine.runs.snapshot import RunSnapshot
from engine.runs.timeline_index import SampledSteps
from tests.engine.runs.test_damaged_records import DAMAGE, line_of
from tests.engine.runs.test_recorder import fold
from tests.engine.runs.test_snapshot import random_run
from tests.support.folders import make_config
from tests.support.synthetic_run import cannot_apply_step, run_events, step_finished, timeline


def plain(line: bytes) -> Record:
    """What a line says, by the slow way."""
    values = json.loads(line)
    if b"\\u" in line or not line.isascii():
        values = json.loads(json.dumps(values, ensure_ascii=False).encode("utf-8", "replace"))
    return Record.from_json(values)


def plain_fold(content: bytes) -> RunSnapshot:
    snapshot, before = RunSnapshot(), Record("r", 0, 0.0, LogLine())
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            before = plain(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            text = f"Line {number} of events.jsonl is damaged: what it recorded is not shown."
            before = Record(before.run_id, before.seq + 1, before.time, LineDamaged("warning", text))
        snapshot.apply(before)
    return snapshot


def caught_up(path) -> RunSnapshot:
    snapshot = RunSnapshot()
    catch_up(snapshot, Follower(path))
    return snapshot


def recorded(folder, *sessions) -> bytes:
    """The record of these events, a recorder for each list."""
    folder.mkdir(parents=True, exist_ok=True)
    for events in sessions:
        recorder = RunRecorder(folder, "r")
        for event in events:
            recorder.emit(event)
        recorder.close()
    return (folder / "events.jsonl").read_bytes()


def resumed_run() -> list:
    """Lists of events: of a run that was stopped and resumed from earlier steps twice, with norms and timelines."""
    first = run_events(55, total=90, ended="stopped", blocks=3)
    again = run_events(90, total=90, ended=None, blocks=3)

    def since(step):
        return [RunStarted(total_steps=90, resumed_step=step), *(
            event for event in again if getattr(event, "step", 0) > step)]

    return [first, since(35), since(80), since(40)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A record with resumes, and its lines."""
    return recorded(tmp_path_factory.mktemp("whole") / "r", *resumed_run()).splitlines(keepends=True)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "r").mkdir()
    return tmp_path / "r" / "events.jsonl"


# ---------------------------------------------------------------------- whole records


def ways(path, content: bytes, rng: random.Random, monkeypatch):
    """The snapshot by every way in which a record is read, by name."""
    path.write_bytes(content)
    yield "replayed", fold(replay(path))
    yield "followed", fold(Follower(path).read_new())
    yield "caught up", caught_up(path)
    for size in (1, 3000, 40_000):
        monkeypatch.setattr(following, "_BLOCK_BYTES", size)
        yield f"blocks of {size}", caught_up(path)
    monkeypatch.undo()
    monkeypatch.setattr(lines_module, "_loads", lines_module._loads_ascii)
    yield "without orjson", caught_up(path)
    monkeypatch.undo()
    path.write_bytes(b"")
    follower, snapshot = Follower(path), RunSnapshot()
    at = 0
    while at < len(content):
        at += rng.choice((1, 50, 400, 5000, 60_000))
        path.write_bytes(content[:at])
        catch_up(snapshot, follower)
    yield "followed as it grew", snapshot
    recorder = RunRecorder(path.parent, "r")
    recorder.close()
    yield "resumed", recorder.snapshot


@pytest.mark.parametrize("seed", range(6))
def test_a_run_of_several_sessions(path, seed, monkeypatch):
    content = recorded(path.parent, list(random_run(seed)))
    expected = plain_fold(content)
    for name, snapshot in ways(path, content, random.Random(seed), monkeypatch):
        assert snapshot == expected, name
        assert snapshot.unread == []


def test_a_run_that_was_resumed_from_earlier_steps(path, whole, monkeypatch):
    content = b"".join(whole)
    expected = plain_fold(content)
    assert expected.timeline == timeline(90) and expected.timeline_steps == list(range(10, 91, 10)) and expected.sessions == 4
    for name, snapshot in ways(path, content, random.Random(1), monkeypatch):
        assert snapshot == expected, name
    # Whatever the record ends with, and whichever timeline is the last of it.
    for end in range(0, len(whole), 7):
        path.write_bytes(b"".join(whole[:end]))
        assert caught_up(path) == plain_fold(b"".join(whole[:end])), end


@pytest.mark.parametrize("seed", range(4))
def test_damaged_lines_between_the_others(path, whole, seed, monkeypatch):
    rng = random.Random(seed)
    damage = [line for name, line in DAMAGE.items() if line is not None and len(line) < 200_000] + [line_of(3), line_of(10**9)]
    lines = list(whole)
    for _ in range(25):
        lines.insert(rng.randrange(len(lines)), rng.choice(damage) + b"\n")
    content = b"".join(lines)
    expected = plain_fold(content)
    assert expected.damaged_lines >= 20
    for name, snapshot in ways(path, content, rng, monkeypatch):
        assert snapshot == expected, name


# ---------------------------------------------------------------------- timelines that are left unread


def timelines(lines) -> list[int]:
    return [place for place, line in enumerate(lines) if line.startswith(b'{"kind":"step_timeline"')]


def test_of_many_timelines_one_is_read(path, whole):
    path.write_bytes(b"".join(whole))
    events = [record.event for record in Follower(path).read_new()]
    read = [event.step for event in events if isinstance(event, StepTimeline)]
    left = [event.step for event in events if isinstance(event, UnreadTimeline)]
    assert read == [90] and len(left) == len(timelines(whole)) - 1
    assert [record.event for record in replay(path) if isinstance(record.event, (StepTimeline, UnreadTimeline))] == [
        timeline(step) for step in [*left, 90]]


DAMAGED_INSIDE = [(b'"lane":"COMPUTE"', b'"lane":COMPUTE,'), (b'"end":', b'"end":"'), (b'"spans":[{', b'"spans":[{{')]


@pytest.mark.parametrize("old, new", DAMAGED_INSIDE)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_when_the_last_timelines_are_damaged_the_one_before_is_shown(path, whole, old, new, count):
    lines = list(whole)
    for place in timelines(lines)[-count:]:
        lines[place] = lines[place].replace(old, new, 1)
    path.write_bytes(b"".join(lines))
    snapshot = caught_up(path)
    assert snapshot == plain_fold(b"".join(lines))
    assert snapshot.timeline == timeline(90 - 10 * count) and snapshot.damaged_lines == count


def test_damage_in_a_timeline_that_nobody_asks_for_is_told_who_asks(path, whole):
    lines = list(whole)
    place = timelines(lines)[-3]
    lines[place] = lines[place].replace(b'"lane":"COMPUTE"', b'"lane":COMPUTE,')
    path.write_bytes(b"".join(lines))
    snapshot = caught_up(path)
    assert snapshot == plain_fold(b"".join(whole)) and 70 in snapshot.timeline_steps
    with pytest.raises(RunError, match="The timeline of step 70 is damaged in the record"):
        SampledSteps(path).read(70)


@pytest.mark.parametrize("last, shown", [(b'"step":10,', 80), (b'"step":900000,', 80)])
def test_when_the_last_timeline_cannot_be_of_its_step_the_one_before_is_shown(path, whole, last, shown):
    lines = list(whole)
    place = timelines(lines)[-1]
    lines[place] = lines[place].replace(b'"step":90,', last)
    path.write_bytes(b"".join(lines))
    snapshot = caught_up(path)
    assert snapshot == plain_fold(b"".join(lines))
    assert snapshot.timeline == timeline(shown) and snapshot.damaged_lines == 1


@pytest.mark.parametrize("damaged", [(), (50,), (50, 40)])
@pytest.mark.parametrize("resumed", [55, 50, 45, 40, 30, 0])
def test_a_resume_takes_back_timelines_that_were_left_unread(path, damaged, resumed):
    """With a later one that does not count, so that those before it matter."""
    lines = recorded(path.parent, [*run_events(55, total=90, ended=None), RunStarted(total_steps=90, resumed_step=resumed),
                                   step_finished(resumed + 1, 90), timeline(80)]).splitlines(keepends=True)
    for place in timelines(lines):
        if any(b'"step":%d,' % step in lines[place][:200] for step in damaged):
            lines[place] = lines[place].replace(b'"lane":"COMPUTE"', b'"lane":COMPUTE,')
    path.write_bytes(b"".join(lines))
    snapshot, expected = caught_up(path), plain_fold(b"".join(lines))
    assert snapshot.timeline == expected.timeline and snapshot.unread == []
    if not damaged:
        assert snapshot == expected


def test_a_line_is_left_unread_only_as_the_recorder_writes_it(whole):
    line = whole[timelines(whole)[1]]
    record = unread_timeline(line)
    assert record == Record("r", plain(line).seq, plain(line).time, UnreadTimeline(plain(line).event.step, line))
    for other in (line[:-1], line[:-2] + b"\n", line.replace(b'"waits"', b'"wa\0ts"'), line.replace(b'"waits"', b'"wa\xfets"'),
                  line[:-1] + line, line[:3000] + whole[0], line.replace(b'"run_id":"r"', b'"run_id":"\\u0072"'),
                  line.replace(b'"seq":', b'"seq":0'), line.replace(b'"seq":', b'"seq":-'),
                  line.replace(b'"seq":', b'"seq":10000000000000000'), line.replace(b'"time":', b'"time":1000'),
                  line.replace(b'"step":', b'"step":-'), line.replace(b'"step":', b'"step":1e'), b" " + line,
                  line.replace(b'"spans":[', b'"spans":{['), line.replace(b'"seq"', b'"Seq"'), whole[0], b"\n", b""):
        assert unread_timeline(other) is None, other[:200]


# ---------------------------------------------------------------------- single lines


def either(read, line: bytes) -> str:
    """As text, in which 1 and 1.0 differ; nothing of a line that is no record."""
    try:
        return repr(read(line))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""


def same(line: bytes) -> None:
    expected = either(plain, line)
    assert either(parse_line, line) == expected
    fast = lines_module._loads
    lines_module._loads = lines_module._loads_ascii
    try:
        assert either(parse_line, line) == expected
    finally:
        lines_module._loads = fast


STEP = line_of(3)
NORMS = json.dumps(Record("r", 1, 2.0, UnitNorms(3, [0.5, 2.0])).to_json(), separators=(",", ":")).encode()


@pytest.mark.parametrize("line", [STEP.replace(b": ", b":").replace(b", ", b","), NORMS])
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "1" + "0" * 22, "-1" + "0" * 22, "1" * 400, "9007199254740993",
                                    "9223372036854775807", "18446744073709551616", "-0", "-0.0", "1e22", "5e-324", "true",
                                    "null", '"1"', "[1]", "{}", "01", "1.", '"\\ud800"', '"\udc80"', "1e-400", "0.1e1"])
def test_numbers_that_parsers_read_differently(line, number):
    values = json.loads(line)
    for name, value in values.items():
        for text in {json.dumps(value), *(json.dumps(inner) for inner in (
                value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()))}:
            text = text.replace(" ", "")
            begin = line.index(f'"{name}":'.encode())
            place = line.index(text.encode(), begin)
            same(line[:place] + number.encode("utf-8", "surrogatepass") + line[place + len(text):])


def test_kinds_that_are_not_plain_keep_their_long_numbers_and_lose_what_is_no_text():
    line = b'{"kind":"fit_reported","run_id":"r","seq":1,"time":2.0,"report":{"a":[100000000000000000000000,"\xed\xa0\x80"]}}'
    same(line)
    number, text = parse_line(line).event.report["a"]
    assert number == 10**23 and type(number) is int and set(text) == {"?"}


PIECES = [*(bytes([byte]) for byte in b'0123456789eE.-+"{}[],: \\untrfals/'),
          b"\x00", b"\xff", b"\xc3\xa9", b"\\ud800", b"0" * 20]
CHANGES = st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(PIECES)), max_size=4)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, 10**6), changes=CHANGES, is_inserted=st.booleans(), is_short=st.booleans())
@example(which=0, changes=[], is_inserted=False, is_short=False)
def test_a_line_with_some_bytes_changed(whole, which, changes, is_inserted, is_short):
    line = [line for line in whole if not is_short or len(line) < 1000][which % (20 if is_short else len(whole))]
    for place, new in changes:
        at = place % len(line)
        line = line[:at] + new + line[at + (0 if is_inserted else len(new)):]
    same(line)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_lines_of_other_versions_and_orders_read_the_same(kind):
    values = Record("r", 1, 2.0, kind()).to_json()
    names = list(values)
    for order in (names, names[::-1], names[:-1], [*names[:5], *names[6:]], [*names[1:], names[0]]):
        for more in ({}, {"newer": 1}, {"event": 2}):
            same(json.dumps({name: values[name] for name in order} | more, separators=(",", ":")).encode())
    line = json.dumps(values, separators=(",", ":"))
    for again in ('"kind":"unit_norms"', '"kind":[]', '"kind":"log_line"', '"step":7', '"step":"7"', '"seq":9', '"run_id":3'):
        same((line[:-1] + f",{again}}}").encode())


# ---------------------------------------------------------------------- around it


def test_the_engine_reads_the_same_where_there_is_no_orjson(path, whole):
    path.write_bytes(b"".join(whole))
    code = ("import sys; sys.modules['orjson'] = None\n"
            "from engine.runs import lines; from engine.runs.following import Follower, catch_up\n"
            "from engine.runs.snapshot import RunSnapshot\n"
            "assert lines._loads is lines._loads_ascii\n"
            "snapshot = RunSnapshot(); catch_up(snapshot, Follower(sys.argv[1])); print(repr(snapshot))")
    said = subprocess.run([sys.executable, "-c", code, path], cwd=PROGRAM_ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == repr(caught_up(path))


def test_a_record_that_cannot_be_applied_costs_a_comparison_no_other(tmp_path, monkeypatch, capsys):
    folders = []
    for name in ("one", "two"):
        folder = RunFolder(tmp_path / "runs" / name)
        recorded(folder.path, run_events(30))
        make_config(tmp_path).save(folder.path / "config.yaml")
        folders.append(folder)
    cannot_apply_step(monkeypatch, 7)
    answer = Records().compare(folders, "step", lambda folder: False)
    assert [len(curve["x"]) for curve in answer["figures"]["loss"]["data"]] == [29, 29]
    assert "ZeroDivisionError" in capsys.readouterr().err
