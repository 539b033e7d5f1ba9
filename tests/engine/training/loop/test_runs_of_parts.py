"""Runs that train parts of a model: they resume to the bit, leave frozen weights as they were, and
what they write is used like that of any run.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import launch
from engine.runs.record.events import DataPrepared, PlanBuilt, RunStarted, StepFinished, UnitNorms
from engine.runs.record.following import replay
from engine.runtime.sampling.generate import Sampler
from engine.training.loop.run import resume_run, start_run
from engine.training.weights.open_for_sampling import open_checkpoint
from tests.support.bad_commands import bad
from tests.support.failing import command
from tests.support.folded import fold
from tests.support.folders import make_config
from tests.support.optimizers import KINDS
from tests.support.start_weights import weights_at_start
from tests.support.trained_runs import events_of, execute, files_of, resumed_to_the_end, trained

pytestmark = pytest.mark.computing

PARTS = {
    "train.method": "parts",
    "train.last_blocks": 1,
    "train.part_names": ["model.norm.weight"],
    "output.checkpoint_every": 2,
    "output.keep_checkpoints": 9,
}


def train(tmp_path, name: str, at_step=None, **values):
    return trained(make_config(tmp_path, **PARTS | values), tmp_path / name, at_step)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", KINDS)
def test_a_stopped_run_goes_on_to_the_bit(tmp_path, dtype, optimizer):
    values = {"model.dtype": dtype, "train.optimizer": optimizer}
    whole = train(tmp_path, "whole", **values)
    stopped = train(tmp_path, "stopped", {3: "stop"}, **values)
    again = resumed_to_the_end(stopped)
    assert files_of(again)[8] == files_of(whole)[8]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_the_source_but_for_what_was_trained(tmp_path, dtype):
    run = train(tmp_path, "runs", **{"model.dtype": dtype, "output.export": True})
    source = run.folder.config.model.source
    exported = load_file(run.folder.export_path / "model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    before = {name: each.detach() for name, each in plain.named_parameters()}
    assert exported.keys() == before.keys()
    last = f"model.layers.{plain.config.num_hidden_layers - 1}."
    for name, weight in exported.items():
        is_trained = name.startswith(last) or name == "model.norm.weight"
        assert torch.equal(weight, before[name]) != is_trained, name


def test_weights_in_fp32_are_rounded_as_transformers_rounds_them(tmp_path):
    """Those that are frozen once, with ties to even; those that are trained keep their masters."""
    run = train(tmp_path, "runs", **{"model.dtype": "bfloat16", "train.steps": 2})
    plain = AutoModelForCausalLM.from_pretrained(
        run.folder.config.model.source, dtype=torch.float32
    )
    with open_checkpoint(tmp_path / "runs", run.folder.id) as opened:
        compared = 0
        for unit in opened.model.units:
            for spec in unit.layout.parameters:
                if spec.frozen:
                    expected = plain.get_parameter(spec.full_name).to(torch.bfloat16)
                    assert torch.equal(
                        opened.host_states.parameters.view(unit.name, spec.name), expected
                    )
                    assert torch.equal(
                        opened.host_states.parameters.master(unit.name, spec.name), expected.float()
                    )
                    compared += 1
        assert compared > 3
        text = Sampler(opened.engine())
        assert text is not None


def test_the_record_says_what_is_trained(tmp_path):
    run = train(tmp_path, "runs", **{"output.eval_every": 2})
    (started,) = events_of(run, RunStarted)
    assert started.trained_parameters is not None
    assert 0 < started.trained_parameters < started.parameters
    assert "those that are trained" in started.flops_formula
    snapshot = fold(replay(run.folder.events_path))
    assert snapshot.trained_parameters == started.trained_parameters
    assert len(snapshot.evals) > 2 and snapshot.best is not None
    assert len(events_of(run, DataPrepared)) == len(events_of(run, PlanBuilt)) == 1
    for norms in events_of(run, UnitNorms):
        zeros = [unit for unit, norm in zip(started.units, norms.norms) if norm == 0]
        assert zeros == started.units[:-2]
    whole = start_run(make_config(tmp_path, **{"train.steps": 1}), tmp_path / "whole")
    execute(whole)
    assert events_of(whole, RunStarted)[0].trained_parameters is None
    (step,) = events_of(whole, StepFinished)
    rate = step.tflops * step.seconds / step.tokens
    less = events_of(run, StepFinished)[0]
    assert less.tflops * less.seconds / less.tokens < rate


@pytest.mark.parametrize(
    "first, second",
    [
        ({}, {"train.method": "full"}),
        ({"train.method": "full"}, {}),
        ({}, {"train.last_blocks": 2}),
    ],
    ids=["parts, then all", "all, then parts", "parts, then more"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_starts_from_weights_of_one_that_trained_others(tmp_path, first, second, dtype):
    run = train(tmp_path, "first", **{"model.dtype": dtype} | first)
    with open_checkpoint(tmp_path / "first", run.folder.id) as opened:
        expected = {
            spec.full_name: opened.host_states.parameters.master(unit.name, spec.name)
            for unit in opened.model.units
            for spec in unit.layout.parameters
        }
    values = {
        "model.start_from": str(run.folder.path),
        "model.dtype": dtype,
        "train.steps": 1,
    }
    then = start_run(make_config(tmp_path, **PARTS | values | second), tmp_path / "second")
    found = weights_at_start(then)
    rounded = 0
    for name, master in expected.items():
        if torch.equal(found[name], master):
            continue
        # A weight that is frozen now and was trained before has lost its rest.
        assert second.get("train.method") != "full"
        assert torch.equal(found[name], master.to(torch.bfloat16).float())
        rounded += 1
    assert (rounded > 0) == (dtype == "bfloat16" and first.get("train.method") == "full")


def test_a_resume_trains_the_same_parts(tmp_path):
    run = train(tmp_path, "runs", {3: "stop"})
    for values, words in (
        (["train.last_blocks=2"], "is to train the last 2 blocks and model.norm.weight now"),
        (["train.method=full"], "is to train the whole model now"),
    ):
        ended = execute(resume_run(tmp_path / "runs", run.folder.id, values))
        assert ended.state == "failed" and words in ended.reason
        assert "trained the last 1 block and model.norm.weight up to step 3" in ended.reason
    again = resume_run(tmp_path / "runs", run.folder.id, ["train.learning_rate=1e-4"])
    assert execute(again).state == "finished"
    whole = start_run(make_config(tmp_path, **{"output.checkpoint_every": 2}), tmp_path / "whole")
    execute(whole, {3: "stop"})
    values = ["train.method=parts", "train.last_blocks=1"]
    ended = execute(resume_run(tmp_path / "whole", whole.folder.id, values))
    assert "trained the whole model up to step 3" in ended.reason


BAD = {
    "train.last_blocks=-1": "train.last_blocks: -1 is too small; the least is 0.",
    "train.last_blocks=9": "train.last_blocks: 9 blocks are to be trained, and this model has",
    "train.part_names=[nothing.*]": "train.part_names: nothing.* fits no parameter of this model; "
    "its parameters have names such as model.embed_tokens.weight",
    "train.part_names=[' ']": "train.part_names: a pattern is empty",
    "engine.activation_checkpointing=offload_pairs": (
        "engine.activation_checkpointing: offload_pairs is for models that are"
    ),
}


@pytest.mark.parametrize("setting", BAD)
@pytest.mark.parametrize("what", ["train", "check"])
def test_bad_settings_are_one_sentence(tmp_path, capsys, what, setting):
    preset = tmp_path / "preset.yaml"
    blocks = {"train.last_blocks": 1, "train.method": "parts", "train.batch_size": 4}
    make_config(tmp_path, **blocks).save(preset)
    arguments = [what, str(preset), "--set", setting]
    assert BAD[setting] in bad(capsys, "--runs-dir", str(tmp_path / "runs"), *arguments)


def test_parts_that_are_not_named_are_refused(tmp_path, capsys):
    preset = tmp_path / "preset.yaml"
    make_config(tmp_path).save(preset)
    code, _, sentence = command(capsys, "check", str(preset), "--set", "train.method=parts")
    assert code == 2 and "train.method: no parts are named; give train.part_names or" in sentence


def test_a_check_says_how_many_parameters_are_trained(tmp_path, capsys):
    preset = tmp_path / "preset.yaml"
    make_config(tmp_path, **PARTS).save(preset)
    assert launch.main(["check", str(preset)]) == 0
    out = capsys.readouterr().out
    assert "of them trained" in out.splitlines()[0] and "a parameter that is trained" in out
