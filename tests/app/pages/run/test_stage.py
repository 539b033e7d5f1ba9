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
    "download": ("Download model", 0),
    "tokenize": ("Read data", 0),
    "load_model": ("Load model", 1),
    "allocate": ("Load model", 1),
    "dry_run": ("Test step", 2),
    "evaluate": ("Before training", 3),
    "sample": ("Before training", 3),
    "prompts": ("Before training", 3),
}


@pytest.mark.parametrize(("job", "step"), JOBS.items())
def test_a_job_is_a_step_that_shows_how_far_it_is(job, step):
    progress = JobProgressed(job, 1, 4, "the second file")
    found = stage(snapshot_of(PREPARING, progress), "preparing", NOTHING_SAVED)
    label, before = step
    (now,) = [each for each in found["steps"] if each["state"] == "now"]
    assert (now["label"], now["share"], now["note"]) == (label, 0.25, "25 %")
    done = [each for each in found["steps"] if each["state"] == "done"]
    assert len(done) == before
    assert found["tone"] == "busy" and found["actions"] == []
    assert found["text"].startswith("the second file. ") and len(found["text"]) > 30


def test_without_a_job_the_next_step_is_known_and_what_was_found_is_told():
    def now(*events, state="preparing"):
        steps = stage(snapshot_of(*events), state, NOTHING_SAVED)["steps"]
        return [each["label"] for each in steps if each["state"] == "now"]

    data = DataPrepared({"rows": 1200, "trained_tokens": 34567})
    assert now(PREPARING) == ["Read data"]
    assert now(PREPARING, data) == ["Load model"]
    assert now(PREPARING, data, STARTED) == ["Test step"]
    ready = snapshot_of(
        PREPARING,
        data,
        PlanBuilt({"compiled": True}),
        STARTED,
        EvalFinished(step=0, loss=5.25),
        StateChanged("running"),
    )
    found = stage(ready, "running", NOTHING_SAVED)
    assert found["title"] == "First step" and "Compiling" in found["text"]
    assert [(each["label"], each["state"], each["note"]) for each in found["steps"]] == [
        ("Read data", "done", "1,200 rows · 34.6k tokens"),
        ("Load model", "done", "638k parameters"),
        ("Test step", "done", ""),
        ("Before training", "done", "validation loss 5.250"),
    ]
    paused = stage(ready, "paused", NOTHING_SAVED)
    assert paused["text"].startswith("Paused before the first step")


@pytest.mark.parametrize("state", ["failed", "stopped", "discarded"])
def test_a_run_that_ended_before_its_first_step_says_why(state):
    ended = snapshot_of(PREPARING, RunEnded(state, "The file is empty; choose another."))
    found = stage(ended, state, NOTHING_SAVED)
    assert found["title"].endswith("before the first step")
    assert found["text"].startswith("The file is empty; choose another.")
    assert found["actions"] == ["draft"] and not found["steps"]
    assert ("Start again" in found["text"]) == (state == "stopped")
    assert found["text"].endswith("Nothing was saved.") == (state == "failed")


def test_an_interrupted_run_without_a_step_can_begin_anew():
    found = stage(snapshot_of(PREPARING, STARTED), "interrupted", NOTHING_SAVED)
    assert found["title"] == "Interrupted before the first step" and found["tone"] == "warn"
    assert "Start again" in found["text"]
    kept = stage(snapshot_of(PREPARING, STARTED), "interrupted", SavedSteps(40, 40))
    assert "Resume continues from step 40." in kept["text"]


def test_a_finished_step_ends_it():
    going = snapshot_of(PREPARING, STARTED, StateChanged("running"), StepFinished(step=1))
    assert stage(going, "running", NOTHING_SAVED) is None
