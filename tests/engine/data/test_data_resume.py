"""A run on a mix of data sets is stopped and resumed: the result is the same bit for bit, whether
its tokens are found in the cache or made again.
"""

from __future__ import annotations

import json
import shutil

import pytest

from engine.runs.record.events import DataPrepared, RunStarted
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.loop.run import resume_run, start_run
from tests.support.folders import WORDS, make_config, make_data
from tests.support.rows import write_rows
from tests.support.trained_runs import events_of, execute, planes_on_disk


@pytest.fixture
def mixed(tmp_path):
    make_data(tmp_path / "turns.jsonl", 30)
    (tmp_path / "texts").mkdir()
    texts = [{"text": " ".join(WORDS[(k + i) % 10] for i in range(5 + k))} for k in range(12)]
    write_rows(tmp_path / "texts" / "part.jsonl", texts)
    return make_config(
        tmp_path,
        **{
            "data.source": [
                {"source": str(tmp_path / "turns.jsonl"), "weight": 0.6},
                {"source": str(tmp_path / "texts"), "weight": 2.5},
            ]
        },
    )


@pytest.mark.parametrize("tokens", ["found", "made again"])
def test_a_run_on_a_mix_is_resumed_to_the_bit(tmp_path, mixed, own_cache, tokens):
    whole = start_run(mixed, tmp_path / "runs")
    assert execute(whole).state == "finished"
    part = start_run(mixed, tmp_path / "runs")
    assert execute(part, {4: "stop"}).state == "stopped"
    reached = newest_checkpoint(part.folder.checkpoints_path).step
    if tokens == "made again":
        shutil.rmtree(own_cache)
    again = resume_run(tmp_path / "runs", part.id)
    assert execute(again).state == "finished"
    assert [event.summary["cached"] for event in events_of(again, DataPrepared)] == [
        True,
        tokens == "found",
    ]
    assert events_of(again, RunStarted)[-1].resumed_step == reached < 8
    assert planes_on_disk(again) == planes_on_disk(whole)
    ours, theirs = again.recorder.snapshot.steps, whole.recorder.snapshot.steps
    assert ours.step == theirs.step
    assert ours.loss == theirs.loss
    assert ours.grad_norm == theirs.grad_norm


def test_a_resume_refuses_a_mix_of_which_one_source_changed(tmp_path, mixed):
    run = start_run(mixed, tmp_path / "runs")
    execute(run, {2: "stop"})
    with (tmp_path / "texts" / "part.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one two"}) + "\n")
    ended = resume_run(tmp_path / "runs", run.id).execute()
    assert ended.state == "failed" and "no longer what it was trained on" in ended.reason
