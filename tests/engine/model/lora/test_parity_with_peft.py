"""Law 1 with adapters: streamed training of them equals PEFT + torch.optim.AdamW, in float32."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from engine.config.adapters import Adapters
from engine.model.build.units import StreamedModel
from engine.planning.schedule.choices import PlanChoices
from engine.training.export.export_adapter import save_adapter
from engine.training.weights.adapter_weights import merged, stacks_of
from tests.support.families import tiny_family_config
from tests.support.family_parity import AMPLIFIES, SUPPORTED, assert_allocated_as_said
from tests.support.library_version import another_version_may_refuse
from tests.support.optimizers import decayed_in, torch_optimizer
from tests.support.sets import FAMILY_SWEEP, slow_but
from tests.support.tiny import Streamed, plain_loss, plain_model, random_batches, streamed

pytestmark = pytest.mark.computing

MISREAD = ("laguna",)
"""PEFT renames layers of these families as it reads an adapter, and finds none of its own files."""
EXPERTS_OF_BOTH_KINDS = ("experts.gate_up_proj", "experts.down_proj")
STEPS = 10
RATE = 1e-3
FIRST_TIER = ("llama", "gpt2", "gemma3_text", "phi3", "mixtral")
"""Linear layers, transposed ones, tied heads, fused layers, and experts that get no adapters."""


ADAPTERS = Adapters(rank=4, alpha=6.0)
PREFIX = "base_model.model."


def adapted_layers(model: StreamedModel) -> list[str]:
    """The full names of the layers that have an adapter."""
    end = ".lora_A.weight"
    specs = [spec for layout in model.layouts for spec in layout.parameters]
    names = [spec.full_name for spec in specs if not spec.experts]
    return [name.removesuffix(end) for name in names if name.endswith(end)]


def in_peft(plain: torch.nn.Module, model: StreamedModel, adapters: Adapters) -> PeftModel:
    """The plain model with the same adapters, none of them zero."""
    config = LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha,
        lora_dropout=adapters.dropout,
        use_rslora=adapters.rslora,
        target_modules=adapted_layers(model),
        target_parameters=list(adapters.target_parameters) or None,
        modules_to_save=list(adapters.save_modules) or None,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = get_peft_model(plain, config)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return found


def trained_of(peft: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that PEFT trains, by the names that a streamed model gives them."""
    found = {}
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad:
            plain = name.removeprefix(PREFIX)
            found[plain.replace(".default", "").replace(".modules_to_save", "")] = parameter
    return found


def take_adapters(run: Streamed, peft: Any) -> None:
    """Makes the streamed adapters equal to those of PEFT."""
    trained = trained_of(peft)
    for unit in run.model.units:
        for spec in unit.layout.parameters:
            if spec.adapter:
                run.host_states.parameters.write(unit.name, spec.name, trained[spec.full_name])


def compare(config, adapters: Adapters, folder: Path, resync: bool = False) -> None:
    """Trains both for ten steps: losses, norms, gradients and adapters agree, and nothing else of
    the streamed model has changed by a bit.
    """
    plain = plain_model(config)
    before = {name: each.detach().clone() for name, each in plain.named_parameters()}
    choices = PlanChoices().changed(
        micro_batches=2, offloaded_block_inputs=True, blocks_kept_in_slots=1
    )
    run = streamed(plain, choices, tokens=20, config=config, parts=adapters)
    try:
        assert_allocated_as_said(run, choices, 20)
        peft = in_peft(plain, run.model, adapters)
        take_adapters(run, peft)
        run.engine.drain()
        trained = trained_of(peft)
        specs = {
            spec.full_name: (unit.name, spec, offset)
            for unit in run.model.units
            for spec, offset in zip(unit.layout.parameters, unit.layout.offsets)
        }
        assert set(trained) == {name for name, (_, spec, _) in specs.items() if not spec.frozen}
        optimizer = torch_optimizer(trained, decayed_in(run.model.layouts), rate=RATE)
        for step in range(1, STEPS + 1):
            batches = random_batches(choices.batching.micro_batches, 2, 10, seed=step)
            device_updates = []
            run.engine.train_step(step, batches, RATE, device_updates.append)
            run.engine.drain()
            loss = plain_loss(peft, batches)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
            assert device_updates[0].loss == pytest.approx(loss.item(), rel=2e-5)
            assert device_updates[0].grad_norm == pytest.approx(float(norm), rel=1e-4)
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in trained.items() if resync or step == STEPS else ():
                unit, spec, _ = specs[name]
                mine = run.host_states.parameters.master(unit, spec.name)
                torch.testing.assert_close(
                    mine, parameter.detach(), rtol=1e-4, atol=2e-5, msg=lambda m: f"{name}: {m}"
                )
                parameter.data.copy_(mine)
        for name, (unit, spec, _) in specs.items():
            if spec.frozen:
                assert torch.equal(
                    run.host_states.parameters.master(unit, spec.name), before[name]
                ), name
        assert_exported(run, peft, adapters, (config, folder))
    finally:
        run.close()


def assert_exported(run: Streamed, peft, adapters: Adapters, where: tuple) -> None:
    """The exported adapter is what PEFT writes; PEFT reads it, with the same logits, and merges to
    the same weights. `where`: the configuration of the base, and a folder that is made.
    """
    config, folder = where
    save_adapter(run.model, run.host_states, adapters, ("tiny", "float32", folder))
    (batch,) = random_batches(1, 2, 10, seed=99)
    ids = torch.from_numpy(batch.input_ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.save_pretrained(folder.with_name("theirs"))
    mine, theirs = (
        load_file(place / "adapter_model.safetensors")
        for place in (folder, folder.with_name("theirs"))
    )
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)  # such as keys that are missing
        if config.model_type in MISREAD:
            folder = folder.with_name("theirs")
            with pytest.raises(UserWarning, match="missing adapter keys"):
                PeftModel.from_pretrained(plain_model(config), folder)
        else:
            read = PeftModel.from_pretrained(plain_model(config), folder).eval()
            expected = peft.eval()(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(read(input_ids=ids, use_cache=False).logits, expected)
    whole = dict(peft.merge_and_unload().named_parameters())
    count = 0
    for unit in run.model.units:
        for spec in unit.layout.parameters:
            found = merged(run.host_states, unit, spec)
            if found is not None:
                count += 1
                torch.testing.assert_close(found, whole[spec.full_name].detach())
    assert count == len(adapted_layers(run.model)) + len(stacks_of(run.model))


def families() -> list:
    sweep = pytest.mark.slow(FAMILY_SWEEP)
    return [
        family if family in FIRST_TIER else pytest.param(family, marks=[sweep])
        for family in SUPPORTED
    ]


@pytest.mark.parametrize("family", families())
def test_adapters_of_all_linear_layers(family, tmp_path):
    with another_version_may_refuse():
        config = tiny_family_config(family)
        compare(config, ADAPTERS, tmp_path / "adapter", family in AMPLIFIES)


@pytest.mark.parametrize(
    "adapters",
    [
        Adapters(rank=4, rslora=True, targets=("q_proj", "model.layers.1*.down_proj")),
        Adapters(rank=4, save_modules=("model.norm", "lm_head")),
    ],
    ids=["some layers, rsLoRA", "modules that are trained whole"],
)
def test_adapters_by_name(adapters, tmp_path):
    config = tiny_family_config("llama", tied=False)
    compare(config, adapters, tmp_path / "adapter")


EXPERTS = Adapters(rank=3, alpha=6.0, target_parameters=EXPERTS_OF_BOTH_KINDS)
STACKED = {
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "gpt_oss": EXPERTS,
    "deepseek_v3": Adapters(
        rank=3, alpha=6.0, targets=(), target_parameters=("experts.down_proj",)
    ),
    "qwen3_next": EXPERTS,
    "glm4_moe": EXPERTS,
}
"""Experts with either order of features, with biases, beside experts that all tokens pass, and one
parameter alone.
"""


@pytest.mark.parametrize("family", slow_but(STACKED, ("mixtral",), FAMILY_SWEEP))
def test_adapters_of_stacked_experts(family, tmp_path):
    with another_version_may_refuse():
        config = tiny_family_config(family)
        compare(config, STACKED[family], tmp_path / "adapter", family in AMPLIFIES)
