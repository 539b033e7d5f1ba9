"""Rotary embeddings are scaled as transformers scales them, for rows that are longer than those of
the model.
"""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config.optimizers import OptimizerSettings
from engine.config.setting_warnings import setting_warnings
from engine.config.settings import ModelConfig, TrainConfig
from engine.errors import ConfigError
from engine.model.build.build import build_model
from engine.model.build.read_model import read_model
from engine.model.build.rope_scaling import scaled
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.schedule.choices import PlanChoices
from engine.runs.record.events import LogLine
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.host_states import HostStates
from engine.runtime.sampling.generate import longest_row
from engine.runtime.step.engine_settings import EngineSettings
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.loop.run import resume_run, start_run
from engine.training.weights.weights import load_pretrained
from tests.support.failing import command
from tests.support.folders import make_config, make_data, make_model
from tests.support.multimodal import multimodal_config
from tests.support.optimizers import torch_optimizer
from tests.support.plain_steps import step_both
from tests.support.sets import slow_but
from tests.support.tiny import plain_loss, random_batches, tiny_config
from tests.support.trained_runs import events_of, execute, resumed_to_the_end, trained

pytestmark = pytest.mark.computing

OWN = 64
"""The tiny models have this many positions."""


def settings(folder, kind: str, factor: float = 4.0, **values) -> TrainConfig:
    model = {"source": str(folder), "dtype": "float32"}
    return TrainConfig.from_dict(
        {
            "model": model | {"rope_scaling": kind, "rope_factor": factor},
            "data": {"source": "none", "max_seq_len": values.get("max_seq_len", OWN)},
        }
    )


def in_transformers(folder, kind: str, factor: float):
    """Returns the plain model as a user of transformers would scale it."""
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = dict(config.rope_parameters) | {"rope_type": kind, "factor": factor}
    config.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    if kind == "yarn":
        config.rope_parameters["original_max_position_embeddings"] = OWN
        config.max_position_embeddings = int(OWN * factor)
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)


@pytest.mark.parametrize(
    "made",
    slow_but(("llama yarn", "llama linear", "mixtral yarn"), ("llama yarn",), "the same code"),
)
def test_training_equals_plain_training_on_longer_rows(tmp_path, made):
    family, kind = made.split()
    folder = make_model(tmp_path / "model", family, initializer_range=0.2)
    config = settings(folder, kind, max_seq_len=100)
    model = build_model(read_model(config).config, config.model)
    plain = in_transformers(folder, kind, 4.0)
    states, backend = HostStates(model.layouts, "float32", threads=1), CpuBackend()
    states.allocate_weights()
    load_pretrained(model, str(folder), states)
    states.allocate_states()
    adamw = HostAdamW(states, OptimizerSettings(eps=1e-5, weight_decay=0.1), threads=1)
    engine = StreamingEngine(
        model,
        states,
        backend,
        EngineSettings(PlanChoices().changed(micro_batches=2), 200, 50),
        adamw,
    )
    places = {s.full_name: (u.name, s) for u in model.units for s in u.layout.parameters}
    decay = {name for name, (_, spec) in places.items() if spec.decay}
    optimizer = torch_optimizer(dict(plain.train().named_parameters()), decay)
    unscaled = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for step in range(1, 4):
        batches = random_batches(2, 2, 100, seed=step)
        found = step_both(engine, plain, optimizer, batches, step)
        if step == 1:
            other = plain_loss(unscaled, batches).item()
            assert abs(other - found) > 1e-4, "scaling makes a difference"
    for name, parameter in plain.named_parameters():
        unit, spec = places[name]
        mine = states.parameters.master(unit, spec.name)
        torch.testing.assert_close(mine, parameter.detach(), rtol=1e-4, atol=2e-5)
    for part in (engine, adamw, states, backend):
        part.close()


@pytest.mark.slow("it trains several runs")
def test_a_run_says_what_it_does_and_its_export_carries_it(tmp_path):
    make_model(tmp_path / "model")
    rows = make_data(tmp_path / "short.jsonl", 4).read_text().splitlines()
    turns = [turn for row in rows for turn in json.loads(row)["messages"]] * 4
    (tmp_path / "data.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
    values = {"model.rope_scaling": "yarn", "model.rope_factor": 4, "data.max_seq_len": 80}
    quick = {"train.steps": 2, "output.checkpoint_every": 1, "output.export": True}
    quick |= {"data.eval_fraction": 0.0, "train.batch_size": 2}
    config = make_config(tmp_path, **values | quick)
    stopped = trained(config, tmp_path / "runs", {1: "stop"})
    id_ = stopped.folder.id
    for name, asked in (("model.rope_scaling", "none"), ("model.rope_factor", "3")):
        ended = execute(resume_run(tmp_path / "runs", id_, [f"{name}={asked}"]))
        assert ended.reason.startswith(f"{name} of run {id_} was "), ended.reason
        assert "changes what the model computes" in ended.reason
    run = resumed_to_the_end(stopped)
    shown = [event.text for event in events_of(run, LogLine)]
    assert any("(yarn, factor 4): rows may have 256 tokens" in text for text in shown)
    model, info = AutoModelForCausalLM.from_pretrained(
        run.folder.export_path, output_loading_info=True
    )
    assert not any(info.values()) and model.config.max_position_embeddings == 256
    rope = model.config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 4.0)
    assert rope["original_max_position_embeddings"] == OWN
    plain = {"model.rope_scaling": "none", "model.start_from": str(run.folder.path)}
    ended = execute(start_run(make_config(tmp_path, **quick | plain), tmp_path / "runs"))
    assert "were trained with model.rope_scaling yarn" in ended.reason


@pytest.mark.parametrize(
    ("kind", "stays", "rows"), [("yarn", False, 256), ("linear", True, 256), ("dynamic", True, 64)]
)
def test_what_is_written_is_what_transformers_and_vllm_read(kind, stays, rows):
    model = ModelConfig(source="tiny", rope_scaling=kind, rope_factor=4.0)
    config = tiny_config("llama")
    changed = scaled(config, model)
    assert config.rope_parameters["rope_type"] == "default", "the given one stays as it is"
    assert changed.max_position_embeddings == (OWN if stays else 256)
    again = type(changed).from_dict(changed.to_dict())
    assert again.rope_parameters == changed.rope_parameters
    assert longest_row(changed) == rows
    assert scaled(config, ModelConfig(source="tiny")) is config


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (lambda: tiny_config("gpt2"), "the configuration of gpt2 names none"),
        (lambda: tiny_config("gemma3_text"), "others for each kind of its layers"),
        (
            lambda: tiny_config(
                "llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
            ),
            "scaled already .linear.",
        ),
        (lambda: multimodal_config("qwen2_5_vl"), "also reads images or sound"),
        (lambda: tiny_config("phi3"), "phi3 cannot be scaled by yarn .*longrope"),
    ],
    ids=["gpt2", "gemma3", "scaled", "images", "phi3"],
)
def test_models_that_cannot_be_scaled_are_refused_by_name(config, why):
    model = ModelConfig(source="tiny", rope_scaling="yarn")
    with pytest.raises(ConfigError, match=rf"^model.rope_scaling: .*{why}"):
        scaled(config(), model)


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_rows_are_as_long_as_the_factor_says(tmp_path, capsys):
    folder = make_model(tmp_path / "model")
    assert shape_of_run(settings(folder, "linear")).max_position_embeddings == 256
    for kind, length, says in (
        ("yarn", 257, "raise model.rope_factor to 5 or more, or lower this to 256"),
        ("dynamic", 65, "set model.rope_scaling to yarn or linear, or this to 64 or less"),
    ):
        config = settings(folder, kind, max_seq_len=length)
        for read in (read_model, shape_of_run):
            with pytest.raises(ConfigError, match=says):
                read(config)
    config = make_config(tmp_path, **{"model.rope_scaling": "yarn", "data.max_seq_len": 500})
    config.save(tmp_path / "preset.yaml")
    code, _, found = command(capsys, "check", tmp_path / "preset.yaml")
    assert code == 2 and found.startswith("data.max_seq_len: 500 is beyond the 128 positions")


@pytest.mark.parametrize("factor", [1, 0.5, -2, 5000])
def test_a_factor_that_scales_nothing_is_refused(factor):
    with pytest.raises(ConfigError, match=r"^model.rope_factor: .* is not above 1"):
        settings("m", "yarn", factor)


def test_adapters_alone_and_doubts_tell_of_it(tmp_path):
    lora = {"method": "lora"}
    tree = settings("m", "linear").to_dict()
    with pytest.raises(ConfigError, match=r"^output.export_form: adapters alone do not tell"):
        TrainConfig.from_dict(tree | {"train": lora, "output": {"export_form": "adapter"}})
    (warning,) = setting_warnings(settings("m", "linear", 2.0))
    assert warning.field == "model.rope_scaling" and "short ones too" in warning.text
    (warning,) = setting_warnings(settings("m", "none", 3.0))
    assert warning.text == "model.rope_factor changes nothing: model.rope_scaling is none."
    (warning,) = setting_warnings(settings("m", "dynamic"))
    assert "change nothing in training" in warning.text
