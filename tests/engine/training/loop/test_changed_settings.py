"""A resume takes what may change, records it, and refuses the rest by name. What is refused can be
trained on from the weights.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config.optimizers import OPTIMIZERS
from engine.config.settings import TrainConfig
from engine.errors import ModelError
from engine.runs.record.events import (
    CheckpointWritten,
    LogLine,
    PlanBuilt,
    RunStarted,
    StepFinished,
)
from engine.runs.record.run_folder import open_run
from engine.runs.summaries.listing import list_runs
from engine.runtime.host.host_states import HostStates
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.loop.resume import kept_rounding, plan_changes
from engine.training.loop.run import resume_run, start_run
from tests.support.failing import command
from tests.support.folders import make_config, make_model
from tests.support.optimizers import RESUMED, ROUNDED
from tests.support.start_weights import weights_at_start
from tests.support.trained_runs import events_of, execute, planes_on_disk

pytestmark = pytest.mark.slow("a plain run has shorter tests of the same")


def resumed(runs, run_id: str, **values):
    """Resumes a run with these settings, and returns the run and how it ended."""
    again = resume_run(runs, run_id, [f"{name}={value}" for name, value in values.items()])
    return again, execute(again)


def told(run) -> list[str]:
    return [line.text for line in events_of(run, LogLine) if line.level == "warning"]


@pytest.mark.parametrize(
    ("changes", "choice", "value"),
    [
        ({"train.micro_batch_size": 4}, "micro_batch_size", 4),
        ({"train.micro_batch_size": 1, "engine.rounds": 2}, "rounds", 2),
        ({"engine.kernels": "compiled"}, "compiled", True),
    ],
    ids=["micro-batch", "rounds", "kernels"],
)
def test_a_changed_plan_is_taken_and_recorded(
    stopped_run, runs, monkeypatch, changes, choice, value
):
    monkeypatch.setattr(torch, "compile", lambda block, **_: block)
    again, ended = resumed(runs, stopped_run.id, **changes)
    assert ended.state == "finished", ended.reason
    assert events_of(again, PlanBuilt)[-1].choices[choice] == value
    for name in changes:
        assert any(text.startswith(f"{name} was ") for text in told(again)), told(again)
    assert any("in another order from step 7 on" in text for text in told(again))


@pytest.mark.parametrize(
    ("changes", "choice", "value"),
    [
        ({"engine.activation_checkpointing": "full"}, "blocks_without_recompute", 0),
        ({"engine.blocks_kept_in_slots": 1}, "blocks_kept_in_slots", 1),
        ({"output.eval_every": 1}, None, None),
    ],
    ids=["activation checkpointing", "blocks kept in slots", "output"],
)
def test_what_changes_no_bit_is_taken_and_recorded(
    stopped_run, runs, whole, changes, choice, value
):
    again, ended = resumed(runs, stopped_run.id, **changes)
    assert ended.state == "finished", ended.reason
    if choice is not None:
        assert events_of(again, PlanBuilt)[-1].choices[choice] == value
    assert any(text.startswith(f"{next(iter(changes))} was ") for text in told(again))
    assert planes_on_disk(again) == planes_on_disk(whole)


@pytest.fixture
def tiny_is_not_small(monkeypatch):
    """The matrices of a tiny model are kept in 8 bits."""
    monkeypatch.setattr("engine.config.optimizers.SMALL", 256)


@pytest.mark.parametrize("gradients", ["auto", "gpu"])
@pytest.mark.parametrize("optimizer", ROUNDED)
def test_rounded_moments_go_on_to_the_bit(tmp_path, runs, tiny_is_not_small, optimizer, gradients):
    values = {"train.optimizer": optimizer, "engine.gradients": gradients}
    config = make_config(tmp_path).with_values(values)
    unbroken = start_run(config, runs)
    assert execute(unbroken).state == "finished"
    run = start_run(config, runs)
    assert execute(run, {3: "stop"}).state == "stopped"
    again, ended = resumed(runs, run.id)
    assert ended.state == "finished" and told(again) == []
    assert planes_on_disk(again) == planes_on_disk(unbroken)


@pytest.mark.parametrize(("kept", "asked"), RESUMED)
def test_moments_become_those_of_another_optimizer_when_asked(
    tmp_path, runs, tiny_is_not_small, kept, asked
):
    config = make_config(tmp_path).with_values({"train.optimizer": kept})
    unbroken = start_run(config, runs)
    assert execute(unbroken).state == "finished"
    run = start_run(config, runs)
    assert execute(run, {3: "stop"}).state == "stopped"
    again, ended = resumed(runs, run.id, **{"train.optimizer": asked})
    assert ended.state == "finished", ended.reason
    shown = told(again)
    assert shown[0] == f"train.optimizer was {kept} up to step 3 and is {asked} from here on."
    assert shown[1].startswith("AdamW's moments are ")
    wanted = {step.step: step.loss for step in events_of(unbroken, StepFinished)}
    found = {step.step: step.loss for step in events_of(again, StepFinished)}
    # The losses would be far off after moments that were read wrongly.
    assert found == pytest.approx(wanted, rel=0.05)
    assert (
        newest_checkpoint(again.folder.checkpoints_path).state["settings"]["train.optimizer"]
        == asked
    )


def test_an_optimizer_whose_states_cannot_be_made_is_refused(stopped_run, runs, monkeypatch):
    alone = replace(OPTIMIZERS["adamw_bf16"], resumes=("adamw_bf16",))
    monkeypatch.setitem(OPTIMIZERS, "adamw_bf16", alone)
    _, ended = resumed(runs, stopped_run.id, **{"train.optimizer": "adamw_bf16"})
    assert ended.state == "failed"
    assert "which changes what is kept of earlier gradients; leave it as it was" in ended.reason


def test_unchanged_settings_say_nothing(stopped_run, runs):
    again, ended = resumed(runs, stopped_run.id)
    assert ended.state == "finished" and told(again) == []


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("data.max_seq_len", 16, "other rows"),
        ("data.packing", "false", "other rows"),
        ("train.batch_size", 8, "the rows that its steps read"),
        ("train.seed", 3, "other rows"),
        ("data.shuffle", "false", "other rows"),
        ("model.dtype", "bfloat16", "the planes"),
    ],
)
def test_another_run_is_refused_by_name_and_offered(stopped_run, runs, name, value, why):
    settings = (stopped_run.folder.path / "config.yaml").read_bytes()
    again, ended = resumed(runs, stopped_run.id, **{name: value})
    assert ended.state == "failed"
    assert name in ended.reason
    assert why in ended.reason
    kept = (stopped_run.folder.path / "config.yaml").read_bytes()
    assert kept == settings, "what was refused is not kept"
    assert f"launch.py train --from {stopped_run.id}" in ended.reason
    assert "Continue training in the app" in ended.reason
    assert not [step for step in events_of(again, StepFinished) if step.step > 6]


def test_a_model_may_be_moved_but_not_replaced(tmp_path, runs):
    config = make_config(tmp_path)
    run = start_run(config, runs)
    assert execute(run, {3: "stop"}).state == "stopped"
    there = Path(config.model.source)
    other = shutil.copytree(there, tmp_path / "another model")
    _, ended = resumed(runs, run.id, **{"model.source": f"'{other}'"})
    assert ended.state == "failed" and "which changes the model" in ended.reason
    moved = shutil.copytree(there, tmp_path / "elsewhere" / there.name)
    _, ended = resumed(runs, run.id, **{"model.source": f"'{moved}'"})
    assert ended.state == "finished", ended.reason


def test_a_wrong_setting_is_refused_before_anything_is_written(capsys, stopped_run, runs):
    before = (stopped_run.folder.path / "config.yaml").read_bytes()
    code, _, sentence = command(
        capsys, "--runs-dir", runs, "train", "--resume", stopped_run.id, "--set", "train.steps=0"
    )
    assert code == 2 and "train.steps" in sentence
    assert (stopped_run.folder.path / "config.yaml").read_bytes() == before


ROUNDING = {
    "micro_batch_size": 1,
    "loss_chunk": 128,
    "main_grad": "vertical",
    "rounds": 1,
    "ranks": 1,
    "replicas": 1,
    "nodes_per_replica": 1,
    "compiled": False,
    "tile_tokens": 0,
}


def config_of(**values) -> TrainConfig:
    plain = TrainConfig.from_dict(
        {"model": {"source": "m"}, "data": {"source": "d"}, "train": {"batch_size": 8}}
    )
    return plain.with_values(values)


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({}, {}, []),
        # The run ran out of memory, and its plan became smaller than its settings.
        ({"train.micro_batch_size": 4}, {"train.micro_batch_size": 4}, []),
        ({"train.micro_batch_size": 4}, {"train.micro_batch_size": 1}, []),
        (
            {"train.micro_batch_size": 4},
            {"train.micro_batch_size": 2},
            ["train.micro_batch_size"],
        ),
        (
            {"train.micro_batch_size": 4},
            {"train.micro_batch_size": "auto"},
            ["train.micro_batch_size"],
        ),
        # An older checkpoint does not know the settings of its session.
        (None, {"train.micro_batch_size": "auto", "engine.kernels": "eager"}, []),
        (None, {"engine.kernels": "compiled"}, ["engine.kernels"]),
        (None, {"engine.rounds": 2}, ["engine.rounds"]),
        (None, {"engine.gpus": 2}, ["engine.gpus"]),
        ({"engine.gpus": 1}, {"engine.gpus": 2}, ["engine.gpus"]),
        ({"engine.gpus": 1}, {"engine.gpus": 1}, []),
    ],
)
def test_which_settings_ask_for_another_plan(before, now, changed):
    state = {"rounding": ROUNDING, "settings": {}}
    if before is not None:
        settings = {"train.micro_batch_size": "auto", "engine.rounds": "auto"}
        state["settings"] = settings | {"engine.kernels": "auto"} | before
    config = config_of(**now)
    assert plan_changes(config, state) == changed
    assert kept_rounding(config, state) == ({} if changed else ROUNDING)


# ---------------------------------------------------------------------- training on


def masters_on_disk(run, model) -> dict[str, torch.Tensor]:
    from engine.training.checkpoints.restore import load_newest_checkpoint

    states = HostStates(model.layouts, model.dtype)
    states.allocate_weights()
    load_newest_checkpoint(
        run.folder.checkpoints_path,
        states,
        model.persistent_buffers(),
        ("weight_high", "weight_low"),
    )
    masters = {
        spec.full_name: states.parameters.master(unit.name, spec.name)
        for unit in model.units
        for spec in unit.layout.parameters
    }
    states.close()
    return masters


@pytest.mark.parametrize(
    ("dtype", "then"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
    ],
)
def test_a_new_run_starts_from_the_masters_of_an_earlier_one(tmp_path, runs, dtype, then):
    from engine.config.settings import ModelConfig
    from engine.model.build.build import build_model
    from engine.model.build.pretrained_files import load_config

    first = start_run(make_config(tmp_path, **{"model.dtype": dtype}), runs)
    assert execute(first, {3: "stop"}).state == "stopped"
    settings = ModelConfig(source=first.folder.config.model.source, dtype=dtype)
    model = build_model(load_config(settings.source), settings)
    expected = masters_on_disk(first, model)
    values = {
        "model.start_from": str(first.folder.path),
        "model.dtype": then,
        "data.max_seq_len": 16,
        "train.steps": 1,
    }
    second = start_run(first.folder.config.with_values(values), runs)
    found = weights_at_start(second)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], master) for name, master in expected.items())
    assert events_of(second, RunStarted)[0].resumed_step is None
    assert [event.step for event in events_of(second, StepFinished)] == [1]


def test_training_on_from_the_command_line(capsys, stopped_run, runs):
    newest = newest_checkpoint(stopped_run.folder.checkpoints_path).path
    arguments = ["train", "--from", stopped_run.id, "--set", "data.max_seq_len=16"]
    code, out, _ = command(capsys, "--runs-dir", runs, *arguments, "--set", "train.steps=2")
    assert code == 0 and f"The weights are those of {newest}." in out
    new = next(run for run in list_runs(runs) if run.id != stopped_run.id)
    config = open_run(runs, new.id).config
    assert config.data.max_seq_len == 16
    assert config.name == "Tiny 2"
    assert new.step == 2
    assert config.model.start_from == str(stopped_run.folder.path.resolve())
    code, _, sentence = command(
        capsys, "--runs-dir", runs, "train", "--from", "a", "--resume", stopped_run.id
    )
    assert code == 2 and "leave one of them out" in sentence


def test_a_start_that_is_not_there_or_of_another_model_is_told(tmp_path, runs, stopped_run):
    nowhere = start_run(make_config(tmp_path, **{"model.start_from": str(tmp_path)}), runs)
    ended = execute(nowhere)
    assert (ended.state, ended.error_type) == ("failed", ModelError.__name__)
    assert "there is no checkpoint in" in ended.reason
    other = make_model(tmp_path / "other", hidden_size=64)
    values = {"model.source": str(other), "model.start_from": str(stopped_run.folder.path)}
    ended = execute(start_run(make_config(tmp_path, **values), runs))
    assert "model.start_from: " in ended.reason and "is of another model" in ended.reason


def test_a_new_run_that_failed_before_its_first_checkpoint_starts_there_again(
    tmp_path, runs, stopped_run, monkeypatch
):
    values = {"model.start_from": str(stopped_run.folder.path), "train.steps": 2}
    run = start_run(make_config(tmp_path, **values), runs)
    with monkeypatch.context() as broken:
        broken.setattr(StreamingEngine, "train_step", lambda *_, **__: 1 / 0)
        assert execute(run).state == "failed"
    again, ended = resumed(runs, run.id)
    assert ended.state == "finished"
    assert (
        len([line for line in events_of(again, LogLine) if "weights are those" in line.text]) == 2
    )
    assert [c.step for c in events_of(again, CheckpointWritten)] == [2]
