"""Whole runs that several ranks compute, each a process: what they record and save is what a run of
one rank does, and they may be resumed with another number of ranks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from engine.config.changes import Change
from engine.planning.fit import checkpoint_sizes
from engine.runs.record.events import (
    BestKept,
    CheckpointWritten,
    EvalFinished,
    ExactMatchMeasured,
    PlanBuilt,
    PromptsAnswered,
    RunStarted,
    SettingsChanged,
    StateChanged,
    StepFinished,
    StepSkipped,
)
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.checkpoints import staging, unit_files
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.loop.run import Run, start_run
from engine.training.loop.trainer import Trainer
from tests.support.folders import make_config
from tests.support.gpu_resident_runs import figures
from tests.support.optimizers import KINDS
from tests.support.rank_runs import again, assert_close, on, planes, train
from tests.support.trained_runs import events_of, execute, files_of
from tests.support.worker_groups import forked_workers, workers_of  # noqa: F401  a fixture

STEPS = 8
EVERYTHING = {
    "output.checkpoint_every": 3,
    "output.keep_checkpoints": 9,
    "output.eval_every": 4,
    "output.export": True,
    "output.exact_match_samples": 3,
    "output.sample_prompts": ["say after one"],
    "output.sample_tokens": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def one(folder) -> Run:
    return train(folder, "one", on(1, **EVERYTHING))


@pytest.fixture(scope="module")
def two(folder) -> Run:
    return train(folder, "two", on(2, **EVERYTHING))


# --------------------------------------------------------------------- what a run leaves


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_its_record_is_that_of_one_rank(one, two):
    assert [e.choices["ranks"] for e in events_of(two, PlanBuilt)] == [2]
    kinds = [StepFinished, EvalFinished, ExactMatchMeasured, PromptsAnswered, CheckpointWritten]
    for kind in [*kinds, BestKept]:
        steps = [[event.step for event in events_of(run, kind)] for run in (one, two)]
        assert steps[0] == steps[1] and steps[0], kind
    assert len(figures(two)) == len(figures(one))
    for ours, theirs in zip(figures(two), figures(one)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    answers = [[event.answers for event in events_of(run, PromptsAnswered)] for run in (one, two)]
    assert answers[0] == answers[1]
    counts = [[event.correct for event in events_of(run, ExactMatchMeasured)] for run in (one, two)]
    assert counts[0] == counts[1]


def test_its_checkpoints_and_its_export_are_those_of_one_rank(one, two):
    assert files_of(two).keys() == files_of(one).keys() == {3, 6, 8}
    for step in (3, 6, 8):
        assert_close(planes(two, step), planes(one, step))
    (ours,), (theirs,) = (list(r.folder.export_path.glob("*.safetensors")) for r in (two, one))
    assert_close(load_file(ours), load_file(theirs))


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_its_bits_repeat(folder, two):
    repeated = train(folder, "repeated", on(2, **EVERYTHING))
    assert files_of(repeated) == files_of(two)
    assert figures(repeated) == figures(two)


# --------------------------------------------------------------------- requests


def test_it_is_paused_saved_changed_and_goes_on(folder):
    run = start_run(
        make_config(folder, **on(2, **{"output.checkpoint_every": 0})), folder / "asked"
    )
    done = []

    def react(record):
        match record.event:
            case StepFinished(step=2):
                run.request("pause")
            case StateChanged(state="paused") if not done:
                done.append("paused")
                run.request("save")
                run.request(Change({"train.steps": 6, "train.learning_rate": 2e-3}))
                run.request("resume")

    run.recorder.subscribe(react)
    ended = run.execute()
    assert ended.state == "finished", ended.reason
    saved = [event.step for event in events_of(run, CheckpointWritten)]
    assert len(saved) == 2 and saved[-1] == 6
    (changed,) = events_of(run, SettingsChanged)
    assert changed.values["train.steps"] == 6
    rates = {e.step: e.learning_rate for e in events_of(run, StepFinished)}
    assert list(rates) == [1, 2, 3, 4, 5, 6] and rates[changed.step] <= 2e-3


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_stop_during_an_evaluation_saves_and_the_run_goes_on(folder, monkeypatch, two):
    run = start_run(make_config(folder, **on(2, **EVERYTHING)), folder / "stopped")
    plain = StreamingEngine.losses_of

    def losses_of(self, batches, check=None):
        if run.recorder.snapshot.step == 4:
            run.request("stop")
        return plain(self, batches, check)

    monkeypatch.setattr(StreamingEngine, "losses_of", losses_of)
    assert run.execute().reason.startswith("Stopped and saved at step 4")
    assert not workers_of(os.getpid())
    monkeypatch.undo()
    resumed = again(folder / "stopped", run, 2)
    assert files_of(resumed)[8] == files_of(two)[8]


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_run_is_discarded(folder):
    run = start_run(make_config(folder, **on(2)), folder / "discarded")
    assert execute(run, {4: "discard"}).state == "discarded"
    assert files_of(run) == {} and not workers_of(os.getpid())


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_steps_that_are_not_finite_are_skipped(tmp_path, bad_row):
    found = {}
    for ranks in (1, 2):
        values = {"train.nonfinite": "skip", "output.checkpoint_every": 3}
        run = start_run(bad_row(**on(ranks, **values)), tmp_path / f"{ranks}")
        ended = execute(run)
        assert ended.state == "finished", ended.reason
        skipped = [(event.step, event.rows) for event in events_of(run, StepSkipped)]
        assert skipped == [(2, [4, 5, 6, 7]), (4, [12, 13, 14, 15])]
        found[ranks] = planes(run, 8)
    finite = {
        ranks: {name: np.nan_to_num(held, posinf=0.0) for name, held in of.items()}
        for ranks, of in found.items()
    }
    assert_close(finite[2], finite[1])


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_step_that_is_not_finite_saves_the_one_before(tmp_path, bad_row):
    run = start_run(bad_row(**on(2)), tmp_path / "runs")
    ended = execute(run)
    assert (ended.state, ended.error_type) == ("failed", "NonFiniteError")
    assert "step 1 is saved" in ended.reason and set(files_of(run)) == {1}
    assert not workers_of(os.getpid())


# --------------------------------------------------------------------- checkpoints and resumes


@pytest.fixture
def loaded(monkeypatch) -> list[dict[str, bytes]]:
    """Returns the planes that each session begins its steps with, which are added to it."""
    found, run = [], Trainer.run

    def compared(self: Trainer):
        states = self.prepared.host_states
        names = [plane for plane in states.planes if plane != "grad"]
        found.append(
            {
                unit: b"".join(
                    states.content(unit, plane, 0, states.nbytes(unit, plane)).tobytes()
                    for plane in names
                )
                for unit in states.layouts
            }
        )
        return run(self)

    monkeypatch.setattr(Trainer, "run", compared)
    return found


def saved_planes(run: Run) -> dict[str, bytes]:
    """Returns the planes of the newest checkpoint, by unit."""
    info = newest_checkpoint(run.folder.checkpoints_path)
    found = {}
    for unit in json.loads((info.path / "manifest.json").read_text())["units"]:
        held = (info.path / unit["file"]).read_bytes()
        places = unit["planes"].values()
        found[unit["unit"]] = b"".join(
            held[place["offset"] : place["offset"] + place["bytes"]] for place in places
        )
    return found


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("gpu_resident", [(0, 0, 0, 0), (3, 4, 2, 0)], ids=["in RAM", "on devices"])
@pytest.mark.parametrize("optimizer", KINDS)
def test_a_resume_with_other_ranks_begins_with_the_bits_that_were_saved(
    tmp_path,
    loaded,
    keep_on_gpu,
    gpu_resident,
    optimizer,
):
    values = {"train.optimizer": optimizer, "model.dtype": "bfloat16", "output.eval_every": 0}
    runs = tmp_path / "runs"
    if any(gpu_resident):
        keep_on_gpu(gpu_resident[0])
    run = train(tmp_path, "runs", on(2, **values), {2: "stop"})
    for ranks, count, stop in (
        (1, gpu_resident[1], 4),
        (4, gpu_resident[2], 6),
        (2, gpu_resident[3], 0),
    ):
        expected = saved_planes(run)
        if any(gpu_resident):
            keep_on_gpu(count)
        run = again(runs, run, ranks, {stop: "stop"} if stop else None)
        assert loaded[-1] == expected
        choices = events_of(run, PlanBuilt)[-1].choices
        assert choices["gpu_resident_units"] == count
    assert [event.resumed_step for event in events_of(run, RunStarted)] == [None, 2, 4, 6]
    assert [event.step for event in events_of(run, StepFinished)] == list(range(1, STEPS + 1))


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
@pytest.mark.parametrize("count", [1, 4])
def test_units_on_the_devices_of_all_ranks_change_no_bit(folder, keep_on_gpu, two, count):
    keep_on_gpu(count)
    run = train(folder, f"gpu-resident-{count}", on(2, **EVERYTHING))
    assert events_of(run, PlanBuilt)[0].choices["gpu_resident_units"] == count
    assert files_of(run) == files_of(two)
    assert figures(run) == figures(two)


@pytest.mark.parametrize("room", [0, 1 << 30], ids=["waits", "copies"])
@pytest.mark.parametrize("count", [0, 3])
def test_a_checkpoint_beside_training_holds_its_step(
    tmp_path,
    monkeypatch,
    keep_on_gpu,
    room,
    count,
):
    """Other ranks write the planes, too."""
    every = {"output.checkpoint_every": 1, "output.keep_checkpoints": 9, "output.eval_every": 0}
    for place, name in ((checkpoint_sizes, "STAGING_CHUNK_BYTES"), (staging, "CHUNK_BYTES")):
        monkeypatch.setattr(place, name, 4096)
    monkeypatch.setattr(unit_files, "ALIGNED_BYTES", 4096)
    monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 1 << 40)
    expected = files_of(train(tmp_path, "alone", on(2, **every)))
    monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 0)
    whole = checkpoint_sizes._in_chunks
    monkeypatch.setattr(checkpoint_sizes, "_in_chunks", lambda *each: min(room, whole(*each)))
    if count:
        keep_on_gpu(count)
    found = files_of(train(tmp_path, "beside", on(2, **every)))
    assert found.keys() & {1, 8} == {1, 8}
    assert {step: files == expected[step] for step, files in found.items()} == dict.fromkeys(
        found, True
    )
