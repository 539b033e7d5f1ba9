"""Every state before the first step has words, and what has steps has none of them."""

from __future__ import annotations

import pytest

from app.pages.run.stage import stage
from engine.runs.record.events import (
    DataPrepared,
    EvalFinished,
    JobProgressed,
    PlanBuilt,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.record.snapshot import RunSnapshot
from engine.training.checkpoints.saved_on_disk import NOTHING_SAVED, SavedSteps
from tests.support.folded import fold
from tests.support.synthetic_run import records


def snapshot_of(*events) -> RunSnapshot:
    return fold(records(list(events)))


PREPARING = StateChanged("preparing")
STARTED = RunStarted(name="n", parameters=638_000, units=["embed", "block 0", "head"])
JOBS = {
    "download": "Downloading the model",
    "tokenize": "Reading the data",
    "load_model": "Loading the model",
    "allocate": "Reserving host memory",
    "dry_run": "Trying a step",
    "evaluate": "Evaluating on validation rows",
    "sample": "Validation prompts",
    "prompts": "Sample prompts",
}


@pytest.mark.parametrize(("job", "title"), JOBS.items())
def test_a_job_is_named_and_shows_how_far_it_is(job, title):
    progress = JobProgressed(job, 1, 4, "the second file")
    found = stage(snapshot_of(PREPARING, progress), "preparing", NOTHING_SAVED)
    assert found["title"] == title
    assert found["share"] == 0.25
    assert found["tone"] == "busy"
    assert found["text"].endswith("the second file.") and len(found["text"]) > 30
    assert found["actions"] == []


def test_without_a_job_the_state_is_named_and_what_is_done_is_listed():
    before = snapshot_of(PREPARING)
    assert stage(before, "preparing", NOTHING_SAVED)["title"] == "Getting ready"
    ready = snapshot_of(
        PREPARING,
        DataPrepared({"rows": 1200, "trained_tokens": 34567}),
        PlanBuilt({"compiled": True}),
        STARTED,
        EvalFinished(step=0, loss=5.25),
        StateChanged("running"),
    )
    found = stage(ready, "running", NOTHING_SAVED)
    assert found["title"] == "The first step is under way" and "compiled" in found["text"]
    assert found["share"] is None
    assert found["done"] == [
        "The data are read: 1,200 rows, 34.6k tokens to train on.",
        "The model has 638k parameters in 3 units.",
        "Before training the validation loss is 5.25.",
    ]
    paused = stage(ready, "paused", NOTHING_SAVED)
    assert paused["title"] == "Paused before the first step"


@pytest.mark.parametrize("state", ["failed", "stopped", "discarded"])
def test_a_run_that_ended_before_its_first_step_says_why(state):
    ended = snapshot_of(PREPARING, RunEnded(state, "The file is empty; choose another."))
    found = stage(ended, state, NOTHING_SAVED)
    assert found["title"].endswith("before the first step")
    assert found["text"].startswith("The file is empty; choose another.")
    assert found["actions"] == ["draft"] and found["share"] is None
    assert ("Start again" in found["text"]) == (state == "stopped")
    assert ("“New run from this one” opens" in found["text"]) == (state == "failed")


def test_an_interrupted_run_without_a_step_can_begin_anew():
    found = stage(snapshot_of(PREPARING, STARTED), "interrupted", NOTHING_SAVED)
    assert found["title"] == "Interrupted before the first step" and found["tone"] == "warn"
    assert "Start again" in found["text"]
    kept = stage(snapshot_of(PREPARING, STARTED), "interrupted", SavedSteps(40, 40))
    assert "Resume goes on from the checkpoint of step 40." in kept["text"]


def test_a_finished_step_ends_it():
    going = snapshot_of(PREPARING, STARTED, StateChanged("running"), StepFinished(step=1))
    assert stage(going, "running", NOTHING_SAVED) is None
