"""Models whose blocks take more than a hidden state, or hand results to later blocks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from engine.config.settings import ModelConfig
from engine.config.trained_parts import Parts
from engine.model.blocks.cross_layer_inputs import BEFORE, Source
from engine.model.build.activations import argument_numel, handed_numel
from engine.model.build.build import build_model
from engine.runtime.sampling.answers import AnswerLimits
from tests.support.cross_layer_models import BASE, HANDING, PLANS, planes_after
from tests.support.families import tiny_family_config
from tests.support.family_parity import AMPLIFIES
from tests.support.plain_answers import PROMPTS, plain_answer
from tests.support.same_bits import assert_same_bits
from tests.support.sets import slow_but
from tests.support.tiny import plain_loss, plain_model, random_batches, streamed

pytestmark = pytest.mark.computing

FEW = ("gemma4_text", "zaya")
OTHERS_SAY_AS_MUCH = "two families have both ways of handing on"


def build(family: str, **how):
    return build_model(
        tiny_family_config(family), ModelConfig(source="tiny", dtype="float32"), **how
    )


def test_what_is_handed_on_is_found():
    gemma, zaya = (build(family).cross_layer_flow for family in FEW)
    keys = ("kwargs", "shared_kv_states", "full_attention")
    assert keys in gemma.blocks[1].cross_layer_outputs and not gemma.blocks[2].cross_layer_outputs
    assert keys in [take.place for take in gemma.blocks[3].cross_layer_inputs]
    assert Source(BEFORE, (2, "args", 0)) in [
        take.source for take in gemma.blocks[2].cross_layer_inputs
    ]
    assert [len(block.cross_layer_inputs) for block in zaya.blocks] == [0, 1, 1, 1]
    assert zaya.blocks[2].cross_layer_inputs[0].source == Source(1, ("out", 1))
    assert not zaya.blocks[3].cross_layer_outputs
    assert build("qwen3").cross_layer_flow is None


@pytest.mark.parametrize("family", slow_but(HANDING, FEW[:1], OTHERS_SAY_AS_MUCH))
def test_any_plan_gives_the_same_bits(family):
    """Zaya keeps its hidden states in float32 beside weights in bfloat16."""
    expected = planes_after(family, BASE)
    for name in PLANS if family in FEW else ("pairs",):
        assert_same_bits(planes_after(family, BASE.changed(**PLANS[name])), expected)


@pytest.mark.parametrize("family", slow_but(HANDING, FEW, OTHERS_SAY_AS_MUCH))
def test_greedy_answers_and_evaluations_are_those_of_the_plain_model(family):
    plain = plain_model(tiny_family_config(family)).eval()
    run = streamed(plain, BASE)
    assert run.sampler.generate(PROMPTS, AnswerLimits(8, {2})) == [
        plain_answer(plain, prompt, 8, use_cache=False) for prompt in PROMPTS
    ]
    batches = random_batches(3, seed=5)
    with torch.no_grad():
        assert run.engine.evaluate(batches) == pytest.approx(plain_loss(plain, batches).item())
    run.close()


@pytest.mark.parametrize("last", [1, 3], ids=["behind all givers", "between them"])
@pytest.mark.parametrize("family", FEW)
def test_the_last_blocks_alone_get_the_gradients_of_plain_training(family, last):
    config = tiny_family_config(family)
    plain = plain_model(config)
    run = streamed(plain, BASE, parts=Parts(last_blocks=last))
    batches = random_batches(2, seed=1)
    run.engine.train_step(1, batches, 1e-3)
    run.engine.drain()
    plain_loss(plain, batches).backward()
    for unit in run.model.units:
        for spec, offset in zip(unit.layout.parameters, unit.layout.offsets):
            if not spec.frozen:
                ours = run.host_states.tensor(unit.name, "grad")[offset : offset + spec.numel]
                theirs = plain.get_parameter(spec.full_name).grad
                torch.testing.assert_close(ours.view(spec.shape), theirs, rtol=1e-3, atol=1e-6)
    run.close()


def test_memory_counts_what_waits_on_the_device():
    """Gemma 4 keeps an input for each block, keys and values of two blocks, and all gradients."""
    config = tiny_family_config("gemma4_text")
    own = config.num_hidden_layers * config.hidden_size_per_layer_input
    model = build("gemma4_text")
    givers = [unit.layout.parameters for unit in model.blocks[:2]]
    shapes = [{spec.name: spec.shape for spec in specs} for specs in givers]
    keys = sum(2 * shape["self_attn.k_proj.weight"][0] for shape in shapes)
    rotary = sum(2 * shape["self_attn.k_norm.weight"][0] for shape in shapes)
    assert argument_numel(model) == rotary
    assert handed_numel(model) == 2 * (own + keys)


@pytest.mark.parametrize("family", AMPLIFIES)
@pytest.mark.slow("two families have inputs for each block, the third none: some seconds each")
def test_gradients_are_no_further_from_float64_than_those_of_plain_training(family):
    """Attention that is not scaled turns rounding into more than other families have."""
    config = tiny_family_config(family)
    plain = plain_model(config)
    exact = copy.deepcopy(plain).double()
    for module in exact.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.double()
    batches = random_batches(2, seed=1)
    run = streamed(plain, BASE)
    run.engine.train_step(1, batches, 1e-3)
    run.engine.drain()
    plain_loss(plain, batches).backward()
    exact_loss(exact, batches).backward()
    true = {name: p.grad for name, p in exact.named_parameters()}
    norm = torch.stack([grad.norm() for grad in true.values() if grad is not None]).norm()
    errors, plain_errors = [], []
    for unit in run.model.units:
        for spec, offset in zip(unit.layout.parameters, unit.layout.offsets):
            ours = run.host_states.tensor(unit.name, "grad")[offset : offset + spec.numel]
            grad = true[spec.full_name]
            errors.append((ours.view(spec.shape).double() - grad).norm() / norm)
            plain_errors.append((plain.get_parameter(spec.full_name).grad - grad).norm() / norm)
    assert max(errors) < 1.5 * max(plain_errors) and max(plain_errors) > 1e-6
    run.close()


def exact_loss(model: torch.nn.Module, batches: list) -> torch.Tensor:
    """Returns `plain_loss` in float64, with masks and positions that are as exact."""
    total, loss = sum(batch.loss_tokens for batch in batches), torch.zeros((), dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        for batch in batches:
            logits = model(input_ids=torch.from_numpy(batch.input_ids), use_cache=False).logits
            labels = torch.from_numpy(batch.labels).reshape(-1)
            flat = logits.double().view(-1, logits.shape[-1])
            loss = loss + F.cross_entropy(flat, labels, reduction="sum") / total
    finally:
        torch.set_default_dtype(torch.float32)
    return loss
