"""An evaluation for which the GPU's memory does not last is planned with less and repeated: it
finds what an undisturbed run finds, and the steps after it are the same to the bit.
"""

from __future__ import annotations

import shutil
import weakref

import pytest
import torch

from engine.planning.fit import checkpoint_sizes
from engine.runs.record.events import (
    CheckpointWritten,
    EvalFinished,
    ExactMatchMeasured,
    LogLine,
    PlanBuilt,
    PlannedAnew,
    PromptsAnswered,
    StepFinished,
)
from engine.runtime.step.executor import Executor
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.loop.prepare import Prepared
from engine.training.loop.run import resume_run, start_run
from tests.support.folders import make_config
from tests.support.trained_runs import events_of, execute, planes_on_disk

pytestmark = pytest.mark.slow("it tries a fault at many moments of a run")

MEASURED = {
    "evaluation": (EvalFinished, {}),
    "prompts": (PromptsAnswered, {"output.sample_prompts": ["say after one"]}),
    "exact_match": (ExactMatchMeasured, {"output.exact_match_samples": 2}),
}


def full_in_passes(
    monkeypatch, during: str, times: int, after: int = 0, kind: str = "forward"
) -> list[int]:
    """Makes ops of this kind run out of memory in the first `times` passes of an evaluation, or of
    sampling, once step `after` is applied; returns a list to which each such pass adds its step.

    An op fails on its lane, as on a GPU, and what its pass has made is held by the error's frames.
    """
    real, tried, seen = Executor.work, [], set()

    def work(self, op, step):
        inner = real(self, op, step)
        if step.inputs.training or (step.inputs.logits_at is None) != (during == "evaluation"):
            return inner
        now = self.context.host_states.held.step
        if op.kind != kind or now < after or len(tried) >= times or id(step) in seen:
            return inner

        def fail():
            held = step  # a frame that keeps the tensors of the pass, and by the ops the engine
            seen.add(id(held))
            tried.append(now)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

        return fail

    monkeypatch.setattr(Executor, "work", work)
    return tried


@pytest.fixture
def freed(monkeypatch):
    """Notes at each new plan whether the engine of the plan before it still takes memory."""
    build, engines, freed = Prepared.build_engine, [], []

    def watched(self, planned):
        if engines:
            freed.append(engines[-1]() is None)
        built = build(self, planned)
        engines.append(weakref.ref(self.engine))
        return built

    monkeypatch.setattr(Prepared, "build_engine", watched)
    return freed


def without_times(events: list) -> list:
    """Returns what was measured, without how long it took."""
    return [(event.step, getattr(event, "loss", None) or str(event)) for event in events]


@pytest.mark.parametrize("kind", ["prefetch", "forward", "loss"])
def test_an_evaluation_is_repeated_with_less_and_nothing_changes(
    tmp_path, monkeypatch, freed, kind
):
    """On the CPU the first plan keeps every block, the second none."""
    config = make_config(tmp_path)
    whole = start_run(config, tmp_path / "runs")
    execute(whole)
    freed.clear()
    run = start_run(config, tmp_path / "runs")
    with monkeypatch.context() as full:
        tried = full_in_passes(full, "evaluation", times=1, after=4, kind=kind)
        assert execute(run).state == "finished", run.recorder.snapshot.reason
    assert tried == [4] and freed[-1]
    (anew,) = events_of(run, PlannedAnew)
    assert (anew.step, anew.during, anew.attempt) == (4, "evaluation", 1)
    assert not anew.changes_rounding and anew.after["device_bytes"] < anew.before["device_bytes"]
    first, second = events_of(run, PlanBuilt)
    assert (
        second.choices["blocks_without_recompute"] < first.choices["blocks_without_recompute"] == 3
    )
    assert without_times(events_of(run, EvalFinished)) == without_times(
        events_of(whole, EvalFinished)
    )
    assert [event.step for event in events_of(run, EvalFinished)] == [0, 4, 8]
    assert [event.step for event in events_of(run, StepFinished)] == list(range(1, 9))
    assert planes_on_disk(run) == planes_on_disk(whole)
    (found,) = [line for line in events_of(run, LogLine) if "planned anew" in line.text]
    assert found.level == "warning" and "in the evaluation after step 4." in found.text
    assert "this is repeated, and the run goes on. No result changes by that." in found.text


@pytest.mark.parametrize("during", ["prompts", "exact_match"])
@pytest.mark.parametrize("after", [0, 8])
def test_answers_are_written_again_with_less(tmp_path, monkeypatch, freed, during, after):
    """The sampler belongs to the engine of a plan, and goes with it."""
    kind, values = MEASURED[during]
    config = make_config(tmp_path, **values, **{"output.eval_every": 0, "train.steps": 8})
    whole = start_run(config, tmp_path / "runs")
    execute(whole)
    run = start_run(config, tmp_path / "runs")
    with monkeypatch.context() as full:
        tried = full_in_passes(full, during, times=1, after=after)
        assert execute(run).state == "finished", run.recorder.snapshot.reason
    assert tried == [after] and freed[-1]
    (anew,) = events_of(run, PlannedAnew)
    assert (anew.step, anew.during, anew.attempt) == (after, during, 1)
    where = "after step 8" if after else "before training"
    assert [line for line in events_of(run, LogLine) if f"were answered {where}." in line.text]
    assert without_times(events_of(run, kind)) == without_times(events_of(whole, kind))
    assert len(events_of(run, kind)) == 2
    assert not anew.changes_rounding and planes_on_disk(run) == planes_on_disk(whole)


def test_a_smaller_micro_batch_is_recorded_and_holds_for_the_steps_after_it(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    whole = start_run(config, tmp_path / "runs")
    execute(whole)
    run = start_run(config, tmp_path / "runs")
    with monkeypatch.context() as full:
        tried = full_in_passes(full, "evaluation", times=2, after=4)
        assert execute(run).state == "finished", run.recorder.snapshot.reason
    assert tried == [4, 4]
    events = events_of(run, PlannedAnew)
    assert [(event.step, event.attempt) for event in events] == [(4, 1), (4, 2)]
    assert events[-1].changes_rounding
    assert events_of(run, PlanBuilt)[-1].choices["micro_batch_size"] == 1
    ours, theirs = (events_of(one, EvalFinished) for one in (run, whole))
    assert ours[0].loss == theirs[0].loss
    assert ours[1].loss == pytest.approx(theirs[1].loss, rel=1e-6)
    assert ours[2].loss == pytest.approx(theirs[2].loss, rel=1e-4)
    found = [line.text for line in events_of(run, LogLine) if "planned anew" in line.text]
    assert "Sums are rounded in another order from here on." in found[-1]


@pytest.mark.parametrize("is_beside", [False, True], ids=["standing still", "beside"])
def test_the_checkpoint_of_that_step_has_the_rounding_of_the_steps_after_it(
    tmp_path, monkeypatch, is_beside
):
    """A run that is killed after the evaluation goes on to the bit."""
    if is_beside:
        monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 0)
    values = {"output.checkpoint_every": 4, "output.keep_checkpoints": 5}
    run = start_run(make_config(tmp_path, **values), tmp_path / "runs")
    killed = tmp_path / "killed" / run.id

    def copy(record):
        if isinstance(record.event, StepFinished) and record.event.step == 7:
            assert (run.folder.checkpoints_path / "step-4").is_dir()
            shutil.copytree(run.folder.path, killed)

    run.recorder.subscribe(copy)
    with monkeypatch.context() as full:
        full_in_passes(full, "evaluation", times=2, after=4)
        assert execute(run).state == "finished", run.recorder.snapshot.reason
    assert events_of(run, PlannedAnew)[-1].changes_rounding
    info = newest_checkpoint(killed / "checkpoints")
    assert info.step == 4 and info.state["rounding"]["micro_batch_size"] == 1
    again = resume_run(tmp_path / "killed", run.id)
    assert execute(again).state == "finished"
    assert events_of(again, PlanBuilt)[-1].choices["micro_batch_size"] == 1
    assert planes_on_disk(again) == planes_on_disk(run)


@pytest.mark.parametrize(
    ("during", "step"), [("evaluation", 4), ("prompts", 4), ("exact_match", 8)]
)
def test_with_the_minimum_plan_the_run_ends_saved(tmp_path, monkeypatch, during, step):
    _, values = MEASURED[during]
    run = start_run(
        make_config(tmp_path, **values, **{"output.checkpoint_every": 0}), tmp_path / "runs"
    )
    with monkeypatch.context() as full:
        tried = full_in_passes(full, during, times=99, after=4)
        ended = execute(run)
    assert (ended.state, ended.error_type) == ("failed", "GpuMemoryError")
    assert "no plan takes less" in ended.reason and f"step {step} is saved" in ended.reason
    assert [written.step for written in events_of(run, CheckpointWritten)] == [step]
    events = events_of(run, PlannedAnew)
    assert [event.attempt for event in events] == [1, 2, 3][: len(tried) - 1] and events
    again = resume_run(tmp_path / "runs", run.id)
    assert execute(again).state == "finished"
    assert [event.step for event in events_of(again, StepFinished)] == list(range(1, 9))
    assert len(events_of(again, MEASURED[during][0])) > 0
