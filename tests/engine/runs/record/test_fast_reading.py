"""Reading a record fast, with msgspec, gives the same result as reading it plainly, where json
parses each line and each value is checked.
"""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.pages.runs.compare import Records
from engine.errors import RunError
from engine.runs.record.events import (
    EVENT_TYPES,
    LineDamaged,
    LogLine,
    MemorySampled,
    Record,
    RunStarted,
    StepFinished,
    UnitNorms,
)
from engine.runs.record.following import Follower, catch_up, replay
from engine.runs.record.lines import parse_line
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.record.timeline_index import TimelineIndex
from tests.support.damaged_records import DAMAGE, line_of
from tests.support.folded import fold
from tests.support.folders import make_config
from tests.support.random_runs import random_run
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
            before = Record(
                before.run_id, before.seq + 1, before.time, LineDamaged("warning", text)
            )
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
    """Lists of events: of a run that was stopped and resumed from earlier steps twice, with norms
    and timelines.
    """
    first = run_events(55, total=90, ended="stopped", blocks=3)
    again = run_events(90, total=90, ended=None, blocks=3)

    def since(step):
        return [
            RunStarted(total_steps=90, resumed_step=step),
            *(event for event in again if getattr(event, "step", 0) > step),
        ]

    return [first, since(35), since(80), since(40)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a record with resumes, and its lines."""
    return recorded(tmp_path_factory.mktemp("whole") / "r", *resumed_run()).splitlines(
        keepends=True
    )


@pytest.fixture
def path(tmp_path):
    (tmp_path / "r").mkdir()
    return tmp_path / "r" / "events.jsonl"


# ---------------------------------------------------------------------- whole records


def ways(path, content: bytes, rng: random.Random):
    """Yields the name of each way to read a record, with the snapshot that it gives."""
    path.write_bytes(content)
    yield "replayed", fold(replay(path))
    yield "followed", fold(Follower(path).read_new())
    yield "caught up", caught_up(path)
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
def test_a_run_of_several_sessions(path, seed):
    content = recorded(path.parent, list(random_run(seed)))
    expected = plain_fold(content)
    for name, snapshot in ways(path, content, random.Random(seed)):
        assert snapshot == expected, name


def test_a_run_that_was_resumed_from_earlier_steps(path, whole):
    content = b"".join(whole)
    expected = plain_fold(content)
    assert expected.timeline == timeline(90)
    assert expected.timeline_steps == list(range(10, 91, 10))
    assert expected.sessions == 4
    for name, snapshot in ways(path, content, random.Random(1)):
        assert snapshot == expected, name
    # Whatever the record ends with, and whichever timeline is the last of it.
    for end in range(0, len(whole), 7):
        path.write_bytes(b"".join(whole[:end]))
        assert caught_up(path) == plain_fold(b"".join(whole[:end])), end


@pytest.mark.parametrize("seed", range(4))
def test_damaged_lines_between_the_others(path, whole, seed):
    rng = random.Random(seed)
    damage = [line for name, line in DAMAGE.items() if line is not None and len(line) < 200_000] + [
        line_of(3),
        line_of(10**9),
    ]
    lines = list(whole)
    for _ in range(25):
        lines.insert(rng.randrange(len(lines)), rng.choice(damage) + b"\n")
    content = b"".join(lines)
    expected = plain_fold(content)
    assert expected.damaged_lines >= 20
    for name, snapshot in ways(path, content, rng):
        assert snapshot == expected, name


ODD = [
    None,
    True,
    -1,
    0,
    1.5,
    10**9,
    2**53,
    2**53 + 1,
    2**64,
    -(2**63),
    1e300,
    "7",
    "",
    [],
    {},
    [1],
    {"h2d": 1.0},
    {"h2d": "1"},
    {"new": 0.25},
    {"h2d": 2**60},
]


@pytest.mark.parametrize("seed", range(40))
def test_lines_that_were_damaged_lost_doubled_or_moved(path, whole, seed):
    rng, lines = random.Random(seed), list(whole)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(1, len(lines))
        match rng.randrange(6):
            case 0:
                del lines[place]
            case 1:
                lines.insert(place, rng.choice(lines))
            case 2:
                other = rng.randrange(1, len(lines))
                lines[place], lines[other] = lines[other], lines[place]
            case 3:
                at = rng.randrange(len(lines[place]) - 1)
                lines[place] = (
                    lines[place][:at]
                    + bytes([rng.choice(b'0123456789",:{}.e-x\0')])
                    + lines[place][at + 1 :]
                )
            case 4:
                is_whole = lines[place].endswith(b"}\n") and lines[place].count(b"\n") == 1
                values = json.loads(lines[place]) if is_whole else {"kind": "step_finished"}
                name = rng.choice(list(values))
                lines[place] = (
                    json.dumps({**values, name: rng.choice(ODD)}, separators=(",", ":")).encode()
                    + b"\n"
                )
            case 5:
                lines[place] = lines[place].replace(b'"seq"', b'"time":1.5,"seq"', 1)
    content = b"".join(lines)
    path.write_bytes(content)
    assert caught_up(path) == fold(replay(path)) == plain_fold(content)


# ---------------------------------------------------------------------- timelines


def timelines(lines) -> list[int]:
    return [
        place for place, line in enumerate(lines) if line.startswith(b'{"kind":"step_timeline"')
    ]


DAMAGED_INSIDE = [
    (b'"lane":"COMPUTE"', b'"lane":COMPUTE,'),
    (b'"end":', b'"end":"'),
    (b'"spans":[{', b'"spans":[{{'),
]


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


def test_damage_in_a_timeline_costs_that_timeline(path, whole):
    lines = list(whole)
    place = timelines(lines)[-3]
    lines[place] = lines[place].replace(b'"lane":"COMPUTE"', b'"lane":COMPUTE,')
    path.write_bytes(b"".join(lines))
    snapshot = caught_up(path)
    assert snapshot == plain_fold(b"".join(lines))
    assert snapshot.timeline == timeline(90)
    assert snapshot.damaged_lines == 1
    assert 70 not in snapshot.timeline_steps
    with pytest.raises(RunError, match="The timeline of step 70 is damaged in the record"):
        TimelineIndex(path).read(70)


@pytest.mark.parametrize("last, shown", [(b'"step":10,', 80), (b'"step":900000,', 80)])
def test_when_the_last_timeline_cannot_be_of_its_step_the_one_before_is_shown(
    path, whole, last, shown
):
    lines = list(whole)
    place = timelines(lines)[-1]
    lines[place] = lines[place].replace(b'"step":90,', last)
    path.write_bytes(b"".join(lines))
    snapshot = caught_up(path)
    assert snapshot == plain_fold(b"".join(lines))
    assert snapshot.timeline == timeline(shown) and snapshot.damaged_lines == 1


@pytest.mark.parametrize("damaged", [(), (50,), (50, 40)])
@pytest.mark.parametrize("resumed", [55, 50, 45, 40, 30, 0])
def test_a_resume_takes_back_timelines(path, damaged, resumed):
    """A later timeline is damaged, so that the earlier ones matter."""
    lines = recorded(
        path.parent,
        [
            *run_events(55, total=90, ended=None),
            RunStarted(total_steps=90, resumed_step=resumed),
            step_finished(resumed + 1, 90),
            timeline(80),
        ],
    ).splitlines(keepends=True)
    for place in timelines(lines):
        if any(b'"step":%d,' % step in lines[place][:200] for step in damaged):
            lines[place] = lines[place].replace(b'"lane":"COMPUTE"', b'"lane":COMPUTE,')
    path.write_bytes(b"".join(lines))
    snapshot, expected = caught_up(path), plain_fold(b"".join(lines))
    assert snapshot.timeline == expected.timeline
    if not damaged:
        assert snapshot == expected


# ---------------------------------------------------------------------- single lines


def either(read, line: bytes) -> str:
    """Returns the record as text, in which 1 and 1.0 differ, or "" for a line that is not a
    record.
    """
    try:
        return repr(read(line))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""


def same(line: bytes) -> None:
    assert either(parse_line, line) == either(plain, line)


STEP = line_of(3)
NORMS = json.dumps(
    Record("r", 1, 2.0, UnitNorms(3, [0.5, 2.0])).to_json(), separators=(",", ":")
).encode()


@pytest.mark.parametrize("line", [STEP.replace(b": ", b":").replace(b", ", b","), NORMS])
@pytest.mark.parametrize(
    "number",
    [
        "NaN",
        "-Infinity",
        "1e999",
        "1" + "0" * 22,
        "-1" + "0" * 22,
        "1" * 400,
        "9007199254740993",
        "9223372036854775807",
        "18446744073709551616",
        "-0",
        "-0.0",
        "1e22",
        "5e-324",
        "true",
        "null",
        '"1"',
        "[1]",
        "{}",
        "01",
        "1.",
        '"\\ud800"',
        '"\udc80"',
        "1e-400",
        "0.1e1",
    ],
)
def test_numbers_that_parsers_read_differently(line, number):
    values = json.loads(line)
    for name, value in values.items():
        for written in {
            json.dumps(value),
            *(
                json.dumps(inner)
                for inner in (
                    value
                    if isinstance(value, list)
                    else value.values()
                    if isinstance(value, dict)
                    else ()
                )
            ),
        }:
            text = written.replace(" ", "")
            begin = line.index(f'"{name}":'.encode())
            place = line.index(text.encode(), begin)
            same(line[:place] + number.encode("utf-8", "surrogatepass") + line[place + len(text) :])


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_each_field_with_an_odd_value(kind, odd):
    values = Record("r", 1, 2.0, EVENT_TYPES[kind]()).to_json()
    for name in values:
        same(json.dumps({**values, name: odd}, separators=(",", ":")).encode())


def test_values_without_a_type_keep_their_long_numbers_and_lose_what_is_no_text():
    line = (
        b'{"kind":"fit_reported","run_id":"r","seq":1,"time":2.0,'
        b'"report":{"a":[100000000000000000000000,"\xed\xa0\x80"]}}'
    )
    same(line)
    number, text = parse_line(line).event.report["a"]
    assert number == 10**23
    assert type(number) is int
    assert set(text) == {"?"}


PIECES = [
    *(bytes([byte]) for byte in b'0123456789eE.-+"{}[],: \\untrfals/'),
    b"\x00",
    b"\xff",
    b"\xc3\xa9",
    b"\\ud800",
    b"0" * 20,
]
CHANGES = st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(PIECES)), max_size=4)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    which=st.integers(0, 10**6), changes=CHANGES, is_inserted=st.booleans(), is_short=st.booleans()
)
@example(which=0, changes=[], is_inserted=False, is_short=False)
def test_a_line_with_some_bytes_changed(whole, which, changes, is_inserted, is_short):
    line = [line for line in whole if not is_short or len(line) < 1000][
        which % (20 if is_short else len(whole))
    ]
    for place, new in changes:
        at = place % len(line)
        line = line[:at] + new + line[at + (0 if is_inserted else len(new)) :]
    same(line)


@pytest.mark.parametrize("kind", [StepFinished, MemorySampled, UnitNorms])
def test_lines_of_other_versions_and_orders_read_the_same(kind):
    values = Record("r", 1, 2.0, kind()).to_json()
    names = list(values)
    for order in (names, names[::-1], names[:-1], [*names[:5], *names[6:]], [*names[1:], names[0]]):
        for more in ({}, {"newer": 1}, {"event": 2}):
            same(
                json.dumps(
                    {name: values[name] for name in order} | more, separators=(",", ":")
                ).encode()
            )
    line = json.dumps(values, separators=(",", ":"))
    for again in (
        '"kind":"unit_norms"',
        '"kind":[]',
        '"kind":"log_line"',
        '"step":7',
        '"step":"7"',
        '"seq":9',
        '"run_id":3',
    ):
        same((line[:-1] + f",{again}}}").encode())


# ---------------------------------------------------------------------- around it


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
