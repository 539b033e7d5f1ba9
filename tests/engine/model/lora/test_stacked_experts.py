"""Experts that are stacked in one weight get adapters where a setting names them, and no others do.
Any plan and any number of ranks gives the same, and what such a block takes is counted.
"""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from engine.config.adapters import Adapters
from engine.config.export_choice import ExportChoice
from engine.config.settings import ModelConfig
from engine.errors import ConfigError
from engine.model.build.build import build_model
from engine.model.build.measure_shape import shape_of
from engine.planning.fit.cost_model import Cost, MicroBatch
from engine.planning.fit.device_memory import DeviceMemory, Sizer
from engine.planning.fit.job import Job
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.sampling.answers import AnswerLimits
from engine.runtime.sampling.generate import Sampler
from engine.text import GIB
from engine.training.export.export import export_run
from engine.training.weights.adapter_weights import initialize_adapters, stacks_of
from engine.training.weights.open_for_sampling import open_checkpoint
from tests.support.chosen import FAST_RATES
from tests.support.chosen import config as job_config
from tests.support.failing import command
from tests.support.families import tiny_family_config
from tests.support.folders import make_config, make_model
from tests.support.same_bits import assert_same_bits
from tests.support.tiny import plain_model, streamed, tiny_config
from tests.support.trained_runs import files_of, resumed_to_the_end, trained

pytestmark = pytest.mark.computing

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
BOTH = ("experts.gate_up_proj", "experts.down_proj")


def built(family: str, *targets: str, **settings):
    model = ModelConfig(source=family, dtype="float32")
    adapters = Adapters(targets=targets, **settings)
    return build_model(tiny_family_config(family), model, adapters)


# --------------------------------------------------------------------- which get adapters


@pytest.mark.parametrize("family", FAMILIES)
def test_as_layers_they_are_refused_with_the_setting_that_names_them(family):
    with pytest.raises(ConfigError) as caught:
        built(family, "q_proj" if family != "deepseek_v3" else "o_proj", "gate_up_proj")
    text = str(caught.value)
    assert caught.value.field == "train.lora_targets" and "gate_up_proj fits model.layers." in text
    assert "name it in train.lora_target_parameters instead." in text
    with pytest.raises(ConfigError, match=r"\*\.experts\.\* fits model\.layers\."):
        built(family, "*.experts.*")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_leaves_stacked_experts_as_they_are(family):
    specs = [spec for layout in built(family, "all-linear").layouts for spec in layout.parameters]
    experts = [spec for spec in specs if ".experts." in spec.full_name]
    assert experts and all(spec.frozen and not spec.adapter for spec in experts)


def test_names_and_patterns():
    both = stacks_of(built("mixtral", "all-linear", target_parameters=BOTH))
    assert [name.rpartition(".")[2] for name in both[:2]] == ["gate_up_proj", "down_proj"]
    some = stacks_of(built("mixtral", target_parameters=("model.layers.1.*.down_proj",)))
    assert some == ["model.layers.1.mlp.experts.down_proj"]
    for family, target, words in (
        ("mixtral", "w1", "w1 fits no stacked experts of this model, which are called experts."),
        ("llama", BOTH[0], "this model has no experts that are stacked in one parameter"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            built(family, "all-linear", target_parameters=(target,))
        assert caught.value.field == "train.lora_target_parameters"


def test_they_have_no_dropout():
    with pytest.raises(ConfigError, match="^train.lora_dropout: 0.1 is given, and adapters of"):
        Adapters(dropout=0.1, target_parameters=BOTH).check()
    Adapters(targets=(), target_parameters=BOTH).check()


# --------------------------------------------------------------------- plans

PLANS = {
    "resident": dict(blocks_kept_in_slots=2),
    "kept": dict(blocks_without_recompute=2),
    "all GPU-resident": dict(gpu_resident_units=5),
    "gradients on the GPU, block inputs on the host": dict(
        gradients_on_gpu=True, offloaded_block_inputs=True
    ),
}


def planes_after(choices: PlanChoices) -> list[torch.Tensor]:
    plain = plain_model(tiny_config("mixtral"))
    run = streamed(plain, choices, dtype="bfloat16", parts=Adapters(4, target_parameters=BOTH))
    initialize_adapters(run.model, run.host_states, seed=7)
    return run.planes_after(2)


@pytest.mark.slow("it sweeps over many plans and delays; a plain run has one way to sum gradients")
def test_any_plan_gives_the_same_bits():
    base = PlanChoices().changed(micro_batches=2)
    expected = planes_after(base)
    for changes in PLANS.values():
        assert_same_bits(planes_after(base.changed(**changes)), expected)


# --------------------------------------------------------------------- what is counted


def test_what_they_take_is_counted():
    """A block keeps the weights that it runs with, and makes their gradient."""
    config, how = tiny_config("mixtral"), job_config()
    plain, adapted = (
        shape_of(build_model(config, ModelConfig(source="tiny", dtype="float32"), parts))
        for parts in (Adapters(4), Adapters(4, target_parameters=BOTH))
    )
    one, other = plain.blocks[0], adapted.blocks[0]
    experts = 4 * (2 * config.intermediate_size * 32 + 32 * config.intermediate_size)
    assert (one.adapted_numel, other.adapted_numel) == (0, experts)
    assert other.adapter_features == one.adapter_features
    factors = 4 * 4 * (32 + 2 * config.intermediate_size + config.intermediate_size + 32)
    assert other.trained_count - one.trained_count == factors
    # A token passes two of the four experts.
    assert adapted.active_parameters - plain.active_parameters == 3 * factors // 2
    memory = DeviceMemory("cpu", GIB, GIB, GIB)
    sizers = [Sizer(Job(each, how, 32), memory, compiled=False) for each in (plain, adapted)]
    kept, needed = zip(
        *((b.activations[-1], b.by_backward[1]) for b in (s._blocks(1) for s in sizers))
    )
    assert kept[1] - kept[0] == pytest.approx(4 * experts, rel=0.02)
    assert needed[1] - needed[0] == 4 * (2 * experts + factors)
    costs = [Cost(shape, FAST_RATES, MicroBatch(1, 32), False) for shape in (plain, adapted)]
    assert costs[1].forward(one.name) > costs[0].forward(one.name)
    assert costs[1].backward(one.name) > costs[0].backward(one.name)


# --------------------------------------------------------------------- runs

LORA = {
    "model.dtype": "float32",
    "train.method": "lora",
    "train.lora_rank": 4,
    "train.lora_target_parameters": [*BOTH],
    "train.learning_rate": 1e-2,
    "output.checkpoint_every": 2,
    "output.keep_checkpoints": 9,
}
IDS = torch.tensor([[5, 14, 3, 11, 8, 12, 9]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("experts")
    make_model(made / "model", "mixtral")
    return made


@pytest.fixture(scope="module")
def run(folder):
    values = {"output.export": True, "output.export_form": "adapter"}
    return trained(make_config(folder, **LORA | values), folder / "runs")


@pytest.mark.slow("it sweeps over many cases")
def test_they_are_exported(folder, run):
    """PEFT reads the adapter, with the logits of the merged folder in transformers, which answers
    as the run does.
    """
    source, merged = run.folder.config.model.source, folder / "merged"
    export_run(folder / "runs", run.folder.id, merged, ExportChoice(form="model"))
    base, whole = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        for place in (source, merged)
    )
    with torch.no_grad():
        before = base(input_ids=IDS).logits
        peft = PeftModel.from_pretrained(base, run.folder.export_path).eval()
        found, expected = (model(input_ids=IDS).logits for model in (peft, whole))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (found - before).abs().max() > 1e-3
    settings = json.loads((run.folder.export_path / "adapter_config.json").read_text())
    assert settings["target_parameters"] == [*BOTH] and not settings["fan_in_fan_out"]
    with open_checkpoint(folder / "runs", run.folder.id) as opened:
        (own,) = Sampler(opened.engine()).generate(IDS.tolist(), AnswerLimits(12, set()))
    reported = whole.generate(IDS, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert own == reported[0, IDS.shape[1] :].tolist()


@pytest.mark.slow("it sweeps over many cases")
def test_a_stopped_run_goes_on_to_the_bit(folder, run):
    stopped = trained(make_config(folder, **LORA), folder / "stopped", {3: "stop"})
    assert files_of(resumed_to_the_end(stopped))[8] == files_of(run)[8]


@pytest.mark.slow("it sweeps over many cases")
def test_an_adapter_of_other_experts_is_not_started_from(folder, run, capsys):
    preset = folder / "preset.yaml"
    start = {"model.start_from": str(run.folder.export_path)}
    for names, ends in (([], 2), ([BOTH[1]], 2), ([*BOTH], 0)):
        values = start | {"train.lora_target_parameters": names, "train.steps": 1}
        make_config(folder, **LORA | values).save(preset)
        code, _, shown = command(capsys, "--runs-dir", str(folder / "then"), "train", str(preset))
        assert code == ends, shown
        found = 'set train.lora_target_parameters to ["experts.down_proj", "experts.gate_up_proj"]'
        assert found in shown or not ends
