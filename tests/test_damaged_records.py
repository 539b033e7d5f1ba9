"""One byte of a run's record changed, anywhere: the list of runs, the replay and the screen of the run go on."""

from __future__ import annotations

import asyncio
import json
import random
import shutil

import pytest

from app.watch import Watch
from engine.job import start_run
from engine.recorder import Follower, replay
from engine.runs import RunFolder
from engine.snapshot import RunSnapshot
from engine.terminal import runs_as_text
from tests.folders import make_config
from tests.test_trainer import execute

SEEDS, CHANGES = range(4), 150
BYTES = b'0123456789eE.-+"{}[],: \n\x00\xffatn'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("damaged")
    run = start_run(make_config(place), place / "runs")
    assert execute(run).state == "finished"
    return run.folder


@pytest.mark.parametrize("seed", SEEDS)
def test_one_damaged_byte_hides_no_run(run, tmp_path, seed):
    generator, whole = random.Random(seed), run.events_path.read_bytes()
    # Long lines (the plan's grid, timelines) would take most of the changes.
    places, start = [], 0
    for line in whole.splitlines(keepends=True):
        places += range(start, start + min(len(line), 500))
        start += len(line)
    folder = RunFolder(tmp_path / "runs" / run.id)
    folder.path.mkdir(parents=True)
    shutil.copy(run.path / "config.yaml", folder.path)
    for _ in range(CHANGES):
        damaged, place = bytearray(whole), generator.choice(places)
        damaged[place] = generator.choice(BYTES) if generator.random() < 0.5 else damaged[place] ^ 1 << generator.randrange(8)
        folder.events_path.write_bytes(damaged)
        where = f"byte {place} of {bytes(whole[max(0, place - 30):place + 20])!r} became {bytes(damaged[place:place + 1])!r}"
        try:
            assert run.id in runs_as_text(tmp_path / "runs", False)
            assert json.loads(runs_as_text(tmp_path / "runs", True))[0]["id"] == run.id
            snapshot = RunSnapshot()
            for record in replay(folder.events_path):
                snapshot.apply(record)
            assert snapshot.progress >= 0.0 and len(list(replay(folder.events_path))) == len(
                Follower(folder.events_path).read_new())
            answer = json.loads(b"{" + asyncio.run(Watch(folder, lambda: False).answer(0, "step")) + b"}")
        except Exception as error:
            raise AssertionError(where) from error
        assert answer["run_id"] == run.id and "loss" in answer["parts"], where
