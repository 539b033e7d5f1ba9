"""Law 1 with frozen parameters: streamed training of parts of a model equals plain transformers in
which the same parameters have `requires_grad` False.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch

from engine.config.trained_parts import Parts
from engine.planning.schedule.choices import PlanChoices
from tests.support.families import tiny_family_config
from tests.support.optimizers import decayed_in, torch_optimizer
from tests.support.tiny import plain_loss, plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing

STEPS = 10
RATE = 3e-3
LAST = Parts(last_blocks=1)
MLP = Parts(("*.mlp.*",))


def freeze(plain: torch.nn.Module, parts: Parts) -> list[str]:
    """The names that are trained, found from the plain model alone; the others are frozen."""
    names = dict(plain.named_parameters(remove_duplicate=False))
    layers = "transformer.h" if any(name.startswith("transformer.h") for name in names) else ""
    layers = layers or "model.layers"
    count = plain.config.num_hidden_layers
    last = tuple(f"{layers}.{at}.*" for at in range(count - parts.last_blocks, count))
    fitting = (*parts.names, *last)
    ids = {
        id(parameter)
        for name, parameter in names.items()
        if any(fnmatchcase(name, pattern) for pattern in fitting)
    }
    for parameter in plain.parameters():
        parameter.requires_grad_(id(parameter) in ids)
    return [name for name, parameter in plain.named_parameters() if id(parameter) in ids]


def compare(family: str, tied: bool, parts: Parts, choices: PlanChoices, **changes) -> None:
    config = tiny_config(family, tie_word_embeddings=tied, **changes)
    plain = plain_model(config)
    before = {name: each.detach().clone() for name, each in plain.named_parameters()}
    trained = freeze(plain, parts)
    assert 0 < len(trained) < len(before)
    run = streamed(plain, choices, parts=parts)
    specs = {
        spec.full_name: (unit, spec, offset)
        for unit in run.model.units
        for spec, offset in zip(unit.layout.parameters, unit.layout.offsets)
    }
    assert sorted(trained) == sorted(name for name in specs if not specs[name][1].frozen)
    parameters = dict(plain.named_parameters())
    optimizer = torch_optimizer(
        {name: parameters[name] for name in trained}, decayed_in(run.model.layouts), rate=RATE
    )
    for step in range(1, STEPS + 1):
        batches = random_batches(choices.batching.micro_batches, seed=step)
        applied = []
        run.engine.train_step(step, batches, RATE, applied.append)
        run.engine.drain()
        loss = plain_loss(plain, batches)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([parameters[name] for name in trained], 1.0)
        assert applied[0].loss == pytest.approx(loss.item(), rel=2e-5)
        assert applied[0].grad_norm == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    for name, (unit, spec, _) in specs.items():
        mine = run.host_states.parameters.master(unit.name, spec.name)
        if spec.frozen:
            assert torch.equal(mine, before[name]), name
        else:
            assert not torch.equal(mine, before[name]), name
            torch.testing.assert_close(
                mine, parameters[name].detach(), rtol=1e-4, atol=2e-5, msg=lambda m: f"{name}: {m}"
            )
    run.close()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gemma3_text", "phi3", "gpt2", "mixtral", "olmo2"]
)
@pytest.mark.parametrize("parts", [LAST, MLP], ids=["last block", "inside of blocks"])
def test_training_of_parts_equals_plain_training(family, tied, parts):
    if family == "mixtral" and parts is MLP:
        parts = Parts(("*.experts.*", "*.gate.*"))
    compare(family, tied, parts, PlanChoices().changed(micro_batches=2))


PARTS = {
    "head alone": Parts(("lm_head.weight",)),
    "embed alone": Parts(("model.embed_tokens.weight",)),
    "norms": Parts(("*norm.weight",)),
    "one block in the middle": Parts(("model.layers.1.*",)),
    "first and last": Parts(("model.layers.0.self_attn.q_proj.*", "model.norm.weight"), 1),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_parts_anywhere(parts, tied):
    compare("llama", tied, parts, PlanChoices().changed(micro_batches=2))


ATTENTION = Parts(("*self_attn*",))
"""Of a mixture of experts, the router stays in fp32 and is frozen."""


@pytest.mark.parametrize("family", ["ernie4_5_moe", "flint"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(gpu_resident_units=4),
        dict(device_updated_units=("block 0", "block 1"), update_buffers=2),
        dict(gradients_on_gpu=True),
    ],
    ids=["host", "on the device", "device updates", "gradients on the GPU"],
)
def test_frozen_weights_in_fp32_do_not_change(family, changes):
    """They have planes of moments, and AdamW passes over them without changing a bit, whatever the
    decay.
    """
    config = tiny_family_config(family)
    choices = PlanChoices().changed(micro_batches=2).changed(**changes)
    run = streamed(
        plain_model(config),
        choices,
        dtype="bfloat16",
        config=config,
        parts=ATTENTION,
        weight_decay=0.5,
    )
    specs = [(unit, spec) for unit in run.model.units for spec in unit.layout.parameters]
    assert any(spec.keep_in_fp32 and spec.frozen for _, spec in specs)
    before = [run.host_states.parameters.master(unit.name, spec.name) for unit, spec in specs]
    for step in range(1, 4):
        run.engine.train_step(step, random_batches(2, seed=step), 1e-2)
    run.engine.drain()
    for (unit, spec), master in zip(specs, before):
        same = torch.equal(run.host_states.parameters.master(unit.name, spec.name), master)
        assert same == spec.frozen, spec.full_name
    run.close()
