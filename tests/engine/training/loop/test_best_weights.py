"""The best weights are kept, whatever happens meanwhile; they are what is exported; and a run whose
validation loss no longer falls can end early.
"""

from __future__ import annotations

import errno
import shutil
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

import launch
from engine.config.export_choice import ExportChoice
from engine.data.batches.loader import prepare_data
from engine.errors import RunError
from engine.planning.fit import checkpoint_sizes
from engine.runs.record.events import (
    BestKept,
    EvalFinished,
    ExactMatchMeasured,
    ExportWritten,
    LogLine,
    PromptsAnswered,
    RunEnded,
    StepFinished,
)
from engine.runs.record.following import replay
from engine.runs.record.validation import Best
from engine.tools.chat.chat_engines import load
from engine.tools.chat.conversation import best_of
from engine.training.checkpoints import checkpoint
from engine.training.checkpoints.chunk_files import ChunkFile
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.export.export import export_run
from engine.training.loop import best_weights, planning
from engine.training.loop.run import Run, resume_run, start_run
from tests.support.folded import fold
from tests.support.folders import make_config, make_tokenizer
from tests.support.overfitting import overfitting
from tests.support.plain_losses import plain_loss
from tests.support.trained_runs import events_of, execute, planes_on_disk, weights_in

pytestmark = pytest.mark.slow("a plain run has shorter tests of the same")

BEST = 18


def started(tmp_path, name: str = "runs", **values) -> Run:
    return start_run(overfitting(tmp_path, **values), tmp_path / name)


def kept_steps(run: Run) -> list[str]:
    return sorted(path.name for path in run.folder.best_path.iterdir())


def log_of(run: Run) -> str:
    return "\n".join(line.text for line in events_of(run, LogLine))


@pytest.fixture
def overfitted(tmp_path) -> Run:
    """A finished run that has kept its best weights, with prompts and an export."""
    run = started(
        tmp_path,
        **{
            "output.export": True,
            "output.exact_match_samples": 2,
            "output.sample_prompts": ["say after one"],
        },
    )
    assert execute(run) == RunEnded("finished", "Finished all 36 steps.")
    return run


# ---------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    ("is_beside", "dtype"),
    [(False, "float32"), (True, "bfloat16")],
    ids=["standing still", "beside"],
)
def test_the_best_weights_are_those_of_their_step_to_the_bit(
    tmp_path, monkeypatch, is_beside, dtype
):
    """A checkpoint of the same step is written at the same time, and later steps go on. Beside
    training, both are written slowly and without RAM for copies, so updates wait for both.
    """
    if is_beside:
        write = ChunkFile.write

        def slow(self, *arguments):
            time.sleep(0.02)
            write(self, *arguments)

        monkeypatch.setattr(ChunkFile, "write", slow)
        monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 0)
        monkeypatch.setattr(checkpoint_sizes, "_in_chunks", lambda *_: 0)
    values = {"model.dtype": dtype, "output.checkpoint_every": 6, "output.keep_checkpoints": 9}
    run = started(tmp_path, **values)
    assert execute(run).state == "finished"
    best = run.recorder.snapshot.best
    assert best is not None
    assert best.kept
    assert best.step < 36
    assert kept_steps(run) == [f"step-{best.step}"]
    kept = events_of(run, BestKept)
    assert kept[-1].step == best.step and kept[-1].path == f"best/step-{best.step}"
    own = weights_in(run.folder.best_path / f"step-{best.step}")
    assert own == weights_in(run.folder.checkpoints_path / f"step-{best.step}")
    without = started(tmp_path, "without", **values, **{"output.keep_best": "none"})
    assert execute(without).state == "finished" and not without.folder.best_path.exists()
    assert planes_on_disk(run) == planes_on_disk(without)
    # A run that goes no further has the same weights.
    stopped = started(tmp_path, "stopped", **values)
    assert execute(stopped, {best.step: "stop"}).state == "stopped"
    assert own == weights_in(stopped.folder.checkpoints_path / f"step-{best.step}")


def test_the_record_tells_of_evaluations_and_of_the_best(overfitted):
    evaluated = events_of(overfitted, EvalFinished)
    assert [event.step for event in evaluated] == [0, 6, 12, 18, 24, 30, 36]
    assert evaluated[0].loss > 4 and evaluated[-1].loss > 1.3 * evaluated[3].loss
    snapshot = fold(replay(overfitted.folder.events_path))
    assert snapshot == overfitted.recorder.snapshot
    assert snapshot.best == Best(BEST, evaluated[3].loss, kept=True)
    assert [event.step for event in events_of(overfitted, BestKept)] == [6, 12, 18]
    rows = snapshot.eval_rows
    assert list(rows) == [0, 18, 24, 30, 36]
    for step, event in zip((18, 24, 30, 36), evaluated[3:]):
        sums = [loss * count for loss, count in zip(rows[step].losses, rows[step].tokens)]
        assert sum(rows[step].tokens) == event.loss_tokens
        assert sum(sums) / event.loss_tokens == pytest.approx(event.loss, rel=1e-5)
    # What is evaluated before step 1 is no part of its time.
    first, second = events_of(overfitted, StepFinished)[:2]
    assert first.seconds < 20 * second.seconds


def test_nothing_is_kept_of_a_run_that_evaluates_at_the_end_alone(tmp_path):
    run = start_run(make_config(tmp_path, **{"output.eval_every": 0}), tmp_path / "runs")
    assert execute(run).state == "finished"
    assert [event.step for event in events_of(run, EvalFinished)] == [8]
    assert not run.folder.best_path.exists() and not run.recorder.snapshot.best.kept


def test_a_discarded_run_keeps_no_weights(tmp_path):
    run = started(tmp_path)
    assert execute(run, {13: "discard"}).state == "discarded"
    assert events_of(run, BestKept) and not run.folder.best_path.exists()


def test_weights_that_the_disk_refuses_leave_those_before_them(tmp_path, monkeypatch):
    """The second best cannot be written: the run goes on, and says so once."""
    write, calls = checkpoint._write_files, []

    def refused(folder, *arguments):
        if folder.parent.name == "best":
            calls.append(folder.name)
            if len(calls) > 1:
                (folder / "half.planes").write_bytes(b"half")
                raise OSError(errno.EIO, "Input/output error")
        return write(folder, *arguments)

    monkeypatch.setattr(checkpoint, "_write_files", refused)
    run = started(tmp_path, **{"output.export": True, "output.checkpoint_every": 6})
    assert execute(run).state == "finished"
    assert calls[:3] == [".step-6.partial", ".step-12.partial", ".step-18.partial"]
    own = weights_in(run.folder.best_path / "step-6")
    assert kept_steps(run) == ["step-6"] and own
    shown = [line.text for line in events_of(run, LogLine) if line.level == "warning"]
    assert len(shown) == 1 and "step 12 are the best so far and could not be kept" in shown[0]
    snapshot = run.recorder.snapshot
    assert snapshot.best.step == BEST and not snapshot.best.kept
    # Weights that are worse than the last are not exported.
    losses = {event.step: event.loss for event in events_of(run, EvalFinished)}
    assert losses[36] < losses[6] and snapshot.exported_step == 36


def test_a_disk_without_room_costs_the_best_weights_and_not_the_run(tmp_path, monkeypatch):
    """There is room for them, but then none for the checkpoint at the end and the export."""
    monkeypatch.setattr(checkpoint.Contents, "needed_bytes", lambda *_: 1000)
    monkeypatch.setattr(best_weights, "disk_free", lambda _: 1001)
    run = started(tmp_path, **{"output.export": True})
    assert execute(run).state == "finished"
    assert not events_of(run, BestKept) and run.recorder.snapshot.exported_step == 36
    shown = [line.text for line in events_of(run, LogLine) if line.level == "warning"]
    assert len([text for text in shown if "are not kept" in text]) == 1
    assert "Training goes on; free some disk space" in shown[0]
    assert "lower at step 18, whose weights are not kept" in log_of(run)


def test_a_report_without_room_is_obeyed_from_the_start(tmp_path, monkeypatch):
    real = planning.read_machine

    def short(*arguments):
        machine = real(*arguments)
        # The record, a checkpoint and an export fit; no megabyte more.
        return machine.__class__(**{**vars(machine), "disk_free": 17 << 20})

    monkeypatch.setattr(planning, "read_machine", short)
    monkeypatch.setattr(planning, "_machine_for", lambda folder, _: short(folder.path))
    monkeypatch.setattr("engine.planning.fit.requirements.best_items", _large)
    run = started(tmp_path)
    assert execute(run).state == "finished" and not events_of(run, BestKept)
    assert "The best weights are not kept: the disk has no room for them." in log_of(run)
    reasons = run.recorder.snapshot.fit["reasons"]
    assert any("no room for the best weights" in reason for reason in reasons)


def _large(*_):
    from engine.planning.fit.memory_items import Item, MemoryItem

    return (Item(MemoryItem.BEST, 1 << 40),)


# ---------------------------------------------------------------------- what is exported


def test_the_export_is_of_the_best_and_has_its_loss(overfitted, tmp_path, capsys):
    runs, run_id = tmp_path / "runs", overfitted.id
    (written,) = events_of(overfitted, ExportWritten)
    assert written.step == overfitted.recorder.snapshot.exported_step == BEST
    assert "The weights of step 18 are exported: their validation loss is" in log_of(overfitted)
    # What is said of the run at its end is said of these weights.
    before, after = events_of(overfitted, ExactMatchMeasured)
    assert (before.step, after.step, after.moment) == (0, BEST, "after")
    assert [e.step for e in events_of(overfitted, PromptsAnswered)][-1] == 36
    config = overfitted.folder.config
    rows = prepare_data(config.data, make_tokenizer(), config.train.seed).eval
    losses = {event.step: event.loss for event in events_of(overfitted, EvalFinished)}

    def loss_of(folder) -> float:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return plain_loss(model, rows)[0]

    best = loss_of(overfitted.folder.export_path)
    assert best == pytest.approx(losses[BEST], rel=1e-5)
    for option, step in (([], BEST), (["--weights", "best"], BEST), (["--weights", "last"], 36)):
        home = tmp_path / f"home{'-'.join(option)}"
        assert launch.main(["export", run_id, str(home), "--runs-dir", str(runs), *option]) == 0
        assert f"the model of step {step}" in capsys.readouterr().out
        assert loss_of(home) == pytest.approx(losses[step], rel=1e-5)


def test_the_last_is_exported_where_a_preset_asks_for_it(tmp_path):
    run = started(tmp_path, **{"output.export": True, "output.export_from": "last"})
    assert execute(run).state == "finished"
    assert run.recorder.snapshot.exported_step == 36 and kept_steps(run) == ["step-18"]
    assert "as output.export_from asks" in log_of(run)
    runs = tmp_path / "runs"
    assert export_run(runs, run.id, tmp_path / "last").step == 36
    found = export_run(runs, run.id, tmp_path / "best", ExportChoice(weights="best"))
    assert found.in_words == "step 18 (the best weights)"


def test_without_evaluations_the_last_is_exported_and_the_log_says_so(tmp_path):
    values = {"output.eval_every": 0, "data.eval_fraction": 0.0, "output.export": True}
    run = start_run(make_config(tmp_path, **values), tmp_path / "runs")
    assert execute(run).state == "finished"
    assert run.recorder.snapshot.exported_step == 8
    assert "no validation loss says that others are better" in log_of(run)
    with pytest.raises(RunError, match="has kept no best weights"):
        export_run(tmp_path / "runs", run.id, tmp_path / "out", ExportChoice(weights="best"))


def test_best_weights_that_cannot_be_read_leave_the_last(tmp_path):
    run = started(tmp_path, **{"output.export": True})

    def damage(record):
        if isinstance(record.event, StepFinished) and record.event.step == 30:
            file = next((run.folder.best_path / "step-18").glob("*.planes"))
            content = bytearray(file.read_bytes())
            content[7] ^= 1
            file.write_bytes(content)

    run.recorder.subscribe(damage)
    assert execute(run).state == "finished"
    assert run.recorder.snapshot.exported_step == 36
    assert "The best weights cannot be read: Checkpoint" in log_of(run)
    found = export_run(tmp_path / "runs", run.id, tmp_path / "o", ExportChoice(weights="last"))
    mine, theirs = (
        (folder / "model.safetensors").read_bytes()
        for folder in (run.folder.export_path, tmp_path / "o")
    )
    assert found.step == 36 and mine == theirs


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_the_best_weights_answer_and_are_trained_on_from(overfitted, tmp_path):
    source = best_of(tmp_path / "runs", overfitted.id, overfitted.folder.config, BEST, "Best")
    chat_engine = load(source)
    assert chat_engine.held_bytes > 0
    chat_engine.close()
    place = str(overfitted.folder.best_path)
    again = start_run(
        overfitting(tmp_path, **{"model.start_from": place, "train.steps": 1}), tmp_path / "again"
    )
    assert execute(again).state == "finished"
    assert f"The weights are those of {place}/step-18." in log_of(again)
    losses = {event.step: event.loss for event in events_of(overfitted, EvalFinished)}
    first = events_of(again, EvalFinished)[0]
    assert first.step == 0 and first.loss == losses[BEST]


# ---------------------------------------------------------------------- resumes and patience


@pytest.mark.slow("it tries a fault at many moments of a run")
def test_a_resume_does_not_measure_again_what_is_recorded(tmp_path):
    run = started(tmp_path, **{"output.sample_prompts": ["say after one"]})
    assert execute(run, {21: "stop"}).state == "stopped"
    assert kept_steps(run) == ["step-18"]
    again = resume_run(tmp_path / "runs", run.id)
    assert execute(again).state == "finished"
    for kind in (EvalFinished, PromptsAnswered):
        assert [event.step for event in events_of(again, kind)] == [0, 6, 12, 18, 24, 30, 36]
    whole = started(tmp_path, "whole", **{"output.sample_prompts": ["say after one"]})
    execute(whole)
    ours, theirs = (one.recorder.snapshot for one in (again, whole))
    assert ours.best == theirs.best and ours.eval_rows == theirs.eval_rows
    assert kept_steps(again) == kept_steps(whole) == ["step-18"]


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_weights_that_a_kill_kept_from_the_disk_are_kept_by_the_resume(tmp_path):
    """The process died after the evaluation of step 18, whose checkpoint is whole."""
    run = started(tmp_path, **{"output.checkpoint_every": 18})
    killed = tmp_path / "killed" / run.id

    def copy(record):
        if isinstance(record.event, EvalFinished) and record.event.step == 18:
            shutil.copytree(run.folder.path, killed)

    run.recorder.subscribe(copy)
    assert execute(run).state == "finished"
    assert sorted(path.name for path in (killed / "best").iterdir()) == ["step-12"]
    again = resume_run(tmp_path / "killed", run.id)
    assert execute(again).state == "finished"
    assert kept_steps(again) == ["step-18"] and again.recorder.snapshot.best.kept
    assert weights_in(again.folder.best_path / "step-18") == weights_in(
        run.folder.best_path / "step-18"
    )


def test_a_run_ends_once_its_patience_is_over(tmp_path):
    run = started(tmp_path, **{"train.patience": 2, "output.export": True})
    ended = execute(run)
    assert ended == RunEnded(
        "finished",
        "Ended early, after step 30 of 36: the validation loss was best at step 18, and 2 "
        "evaluations since were not better (train.patience).",
    )
    assert [event.step for event in events_of(run, EvalFinished)] == [0, 6, 12, 18, 24, 30]
    assert newest_checkpoint(run.folder.checkpoints_path).step == 30
    assert run.recorder.snapshot.exported_step == BEST
    with pytest.raises(RunError, match="has finished early, after step 30 of 36"):
        resume_run(tmp_path / "runs", run.id)


@pytest.mark.parametrize("step", [21, 27], ids=["before an evaluation", "between two"])
def test_a_resume_has_the_patience_of_the_whole_run(tmp_path, step):
    run = started(tmp_path, **{"train.patience": 2})
    assert execute(run, {step: "stop"}).state == "stopped"
    again = resume_run(tmp_path / "runs", run.id)
    assert execute(again).reason.startswith("Ended early, after step 30 of 36")
    assert [event.step for event in events_of(again, StepFinished)] == list(range(1, 31))


def test_a_patience_that_was_over_before_a_resume_ends_it_at_once(tmp_path):
    run = started(tmp_path)
    assert execute(run, {27: "stop"}).state == "stopped"
    again = resume_run(tmp_path / "runs", run.id, ["train.patience=1"])
    reached = run.recorder.snapshot.step
    assert execute(again).reason.startswith(f"Ended early, after step {reached} of 36")
    assert events_of(again, StepFinished)[-1].step == reached
