"""A run without packing groups its rows by length and resumes to the bit."""

from __future__ import annotations

import json

import pytest

from engine.data.batches.loader import BY_LENGTH, PreparedData
from engine.runs.record.events import EvalFinished, LogLine, StepFinished
from engine.training.loop.run import resume_run, start_run
from tests.support.folders import WORDS, make_config
from tests.support.trained_runs import events_of, execute, planes_on_disk

UNPACKED = {"data.packing": False, "data.max_seq_len": 48, "output.checkpoint_every": 0}


@pytest.fixture
def config(tmp_path):
    """A run whose examples have 9 to 40 tokens."""
    lines = []
    for number in range(40):
        text = " ".join(WORDS[(number + k) % 10] for k in range(1 + (number * 7) % 32))
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": WORDS[0]}]
        lines.append(json.dumps({"messages": turns}))
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return make_config(tmp_path, **UNPACKED)


def finished(config, runs_dir, stop_at=None):
    """Runs to the end, if asked for with a stop and a resume on the way."""
    run = start_run(config, runs_dir)
    if stop_at is None:
        assert execute(run).state == "finished"
        return run
    assert execute(run, {stop_at: "stop"}).state == "stopped"
    return run


def resumed(run, runs_dir):
    again = resume_run(runs_dir, run.id)
    assert execute(again).state == "finished"
    return again


def without_groups(monkeypatch):
    monkeypatch.setattr(PreparedData, "grouped_by_length", lambda data, _: data)


def test_a_resumed_run_takes_the_same_rows(config, tmp_path):
    whole = finished(config, tmp_path / "whole")
    again = resumed(finished(config, tmp_path / "parts", 3), tmp_path / "parts")
    assert planes_on_disk(again) == planes_on_disk(whole)
    assert [step.tokens for step in events_of(again, StepFinished)] == [
        step.tokens for step in events_of(whole, StepFinished)
    ]
    (note,) = [line.text for line in events_of(whole, LogLine) if "padding" in line.text]
    percent = float(note.split("share a step: ")[1].split(" %")[0])
    assert 0 <= percent < 15
    losses = [[event.loss for event in events_of(run, EvalFinished)] for run in (whole, again)]
    assert losses[0] == losses[1] and losses[0]


def test_packed_rows_keep_their_order_and_their_fingerprint(config, tmp_path, monkeypatch):
    packed = config.with_values({"data.packing": True})
    now = finished(packed, tmp_path / "now")
    without_groups(monkeypatch)
    assert planes_on_disk(finished(packed, tmp_path / "before")) == planes_on_disk(now)
    manifests = list((tmp_path / "now").rglob("manifest.json"))
    assert manifests and all(BY_LENGTH not in path.read_text() for path in manifests)
