"""Steps that are read many at once add up to what they add up to one by one, whatever stands between them."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from engine.runs import series as columns_module
from engine.runs.events import EvalFinished, MemorySampled, RunStarted, StepFinished
from engine.runs.following import Follower
from engine.runs.step_window import LEAST, MOST, Stretch
from tests.engine.runs.test_fast_reading import caught_up, plain_fold, recorded
from tests.support.synthetic_run import step_finished

STEPS = 70
ODD = [None, True, -1, 0, 1.5, 10**9, 2**53, 2**53 + 1, 2**64, -2**63, 1e300, "7", "", [], {}, [1], {"h2d": 1.0}, {"h2d": "1"},
       {"new": 0.25}, {"h2d": 2**60}]


def sample(step: int, watts: float = 300.5) -> MemorySampled:
    return MemorySampled(step=step, host_rss=step * 2**20, gpu_total=2**37, power=watts + step % 7)


def steps(first: int, last: int, samples: bool = True):
    for step in range(first, last + 1):
        yield step_finished(step, STEPS)
        if samples:
            yield sample(step)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "r").mkdir()
    return tmp_path / "r" / "events.jsonl"


@pytest.fixture(scope="module")
def regular(tmp_path_factory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("regular") / "r"
    return recorded(folder, [RunStarted(total_steps=STEPS), *steps(1, STEPS)]).splitlines(keepends=True)


def stretches(path) -> list[Stretch]:
    found = [record.event for block in Follower(path).blocks(in_stretches=True) for record in block]
    return [event for event in found if isinstance(event, Stretch)]


def expect_equal(path, lines) -> None:
    content = b"".join(lines)
    path.write_bytes(content)
    assert caught_up(path) == plain_fold(content)


def test_regular_steps_are_one_record(path, regular):
    path.write_bytes(b"".join(regular))
    stretch, = stretches(path)
    assert len(stretch.rows) == 2 * STEPS and stretch.last_step_line == 2 * STEPS - 1
    expect_equal(path, regular)
    assert caught_up(path).energy > 0


@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize("rows", [8, 32, 64])
def test_columns_are_thinned_as_they_are_one_by_one(path, rows, samples, monkeypatch):
    monkeypatch.setattr(columns_module, "ROWS", rows)
    content = recorded(path.parent, [RunStarted(total_steps=STEPS), *steps(1, STEPS, samples)])
    assert caught_up(path) == plain_fold(content) and len(caught_up(path).steps) <= rows


def test_more_lines_than_are_held_at_a_time(path):
    content = recorded(path.parent, [RunStarted(total_steps=10**6), *steps(1, MOST)])
    found = stretches(path)
    assert [len(stretch.rows) for stretch in found] == [MOST, MOST]
    assert caught_up(path) == plain_fold(content)


def test_a_few_lines_are_read_one_by_one(path):
    recorded(path.parent, [RunStarted(total_steps=STEPS), *steps(1, LEAST - 1, samples=False)])
    assert stretches(path) == []


@pytest.mark.parametrize("first", [1, 20, 41, 42, 43, 60])
def test_a_session_that_goes_on_after_any_step(path, first):
    content = recorded(path.parent, [RunStarted(total_steps=STEPS), *steps(1, 41), EvalFinished(step=41, loss=1.0)],
                       [RunStarted(total_steps=STEPS, resumed_step=first - 1), *steps(first, STEPS)])
    assert len(stretches(path)) == 2 and caught_up(path) == plain_fold(content)


def test_tokens_beyond_what_can_be_counted(path):
    many = [replace(event, tokens=2**53) if isinstance(event, StepFinished) else event for event in steps(1, STEPS)]
    content = recorded(path.parent, [RunStarted(total_steps=STEPS), *many])
    assert len(stretches(path)) == 1 and caught_up(path) == plain_fold(content)


def test_steps_that_are_too_far_ahead(path):
    content = recorded(path.parent, [RunStarted(total_steps=STEPS), *steps(1, 20), EvalFinished(step=20, loss=1.0),
                                     *steps(45, STEPS)])
    assert len(stretches(path)) == 2 and caught_up(path) == plain_fold(content)


def test_a_sample_of_a_later_step_before_the_others(path):
    content = recorded(path.parent, [RunStarted(total_steps=STEPS), *steps(1, 20), EvalFinished(step=20, loss=1.0), sample(22),
                                     EvalFinished(step=20, loss=1.0), *steps(21, STEPS)])
    assert len(stretches(path)) == 2 and caught_up(path) == plain_fold(content)


def test_steps_without_a_beginning(path, regular):
    expect_equal(path, regular[1:])
    expect_equal(path, regular[2:])
    expect_equal(path, regular[40:])


@pytest.mark.parametrize("seed", range(40))
def test_lines_that_were_damaged_lost_doubled_or_moved(path, regular, seed):
    rng, lines = random.Random(seed), list(regular)
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
                lines[place] = lines[place][:at] + bytes([rng.choice(b'0123456789",:{}.e-x\0')]) + lines[place][at + 1:]
            case 4:
                whole = lines[place].endswith(b"}\n") and lines[place].count(b"\n") == 1
                values = json.loads(lines[place]) if whole else {"kind": "step_finished"}
                name = rng.choice(list(values))
                lines[place] = json.dumps({**values, name: rng.choice(ODD)}, separators=(",", ":")).encode() + b"\n"
            case 5:
                lines[place] = lines[place].replace(b'"seq"', b'"time":1.5,"seq"', 1)
    expect_equal(path, lines)


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("kind", [StepFinished, MemorySampled])
def test_each_field_with_an_odd_value(path, regular, kind, odd):
    for place in (1, 2, 60, 61, len(regular) - 2, len(regular) - 1):
        values = json.loads(regular[place])
        if values["kind"] != kind.kind:
            continue
        for name in values:
            line = json.dumps({**values, name: odd}, separators=(",", ":")).encode() + b"\n"
            expect_equal(path, [*regular[:place], line, *regular[place + 1:]])
