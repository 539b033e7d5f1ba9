"""A step in bf16 beside plain torch with fp32 sums: the bits of its gradients, its norms, its loss,
its evaluation and four steps of AdamW on planes.

Plain transformers runs the same kernels on the same shapes, because every position has a label and
the loss is computed in one chunk. What differs is then a fault and no rounding. Each test also
shows that it would see the fault that it is for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from engine.model.build.attention import KERNELS
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.step.engine_settings import AppliedStep
from tests.support.bf16_parity import (
    RATE,
    Tensors,
    decoupled_adamw,
    distance,
    norm_of,
    streamed_gradients,
)
from tests.support.tiny import VOCAB, Batch, Streamed, plain_model, streamed, tiny_config

pytestmark = pytest.mark.computing

SIZES = ((3, 12), (2, 9), (2, 5), (3, 7), (1, 12), (4, 6))
"""The micro-batches of a step have these rows and tokens. None has as many tokens as the window of
gemma3_text, for which the engine and transformers choose unlike kernels.
"""
TOKENS = 36
STEPS = 4
CHOICES = PlanChoices().changed(micro_batches=len(SIZES))
PLANS = {
    "vertical": CHOICES,
    "rounds": CHOICES.changed(rounds=3, main_grad="device"),
}


def labeled(seed: int) -> list[Batch]:
    """Returns micro-batches of random tokens in which every position has a label."""
    rng, made = np.random.default_rng(seed), []
    for size in SIZES:
        ids, labels = rng.integers(3, VOCAB, size), rng.integers(0, VOCAB, size)
        labels[0, 0] = 0  # the smallest id is a label like any other
        made.append(Batch(ids, labels, None, ids.size, ids.size))
    return made


def start_of(family: str) -> torch.nn.Module:
    """Returns a model in float32 whose weights bf16 holds exactly."""
    model = plain_model(tiny_config(family, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def bf16_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Returns plain transformers in bf16 with the weights of `model`."""
    # Not `.bfloat16()`, which rounds rotary frequencies too.
    copied = plain_model(model.config, torch.bfloat16)
    copied.load_state_dict(model.state_dict())
    return copied


def logits_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Returns plain transformers' logits [positions, vocabulary] in the model's dtype."""
    with sdpa_kernel(KERNELS, set_priority=True):  # the same attention as the engine's
        out = model(input_ids=torch.from_numpy(batch.input_ids), use_cache=False)
    return out.logits.view(-1, VOCAB)


def summed(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns the sum of cross-entropies (scalar) of `logits` [positions, vocabulary]."""
    return F.cross_entropy(logits, torch.from_numpy(batch.labels).reshape(-1), reduction="sum")


@dataclass
class Reference:
    """What plain torch computes in one step."""

    loss: float
    sums: Tensors
    """The gradients of all micro-batches are summed in fp32, by full name."""
    rounded_sums: Tensors
    """The same sums were rounded to bf16 after each micro-batch, which is a fault."""


def reference_step(model: torch.nn.Module, batches: list[Batch]) -> Reference:
    total = sum(batch.loss_tokens for batch in batches)
    named = dict(model.named_parameters())
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in named.items()}
    rounded = {name: torch.zeros_like(p, dtype=torch.bfloat16) for name, p in named.items()}
    losses = []
    for batch in batches:
        loss = summed(logits_of(model, batch).float(), batch) / total
        gradients = torch.autograd.grad(loss, list(named.values()))
        losses.append(loss.item())
        for name, gradient in zip(named, gradients):
            sums[name] += gradient
            rounded[name] += gradient
    return Reference(sum(losses), sums, rounded)


@dataclass
class FirstStep:
    """The first step of a model, streamed and by plain torch."""

    run: Streamed
    applied: AppliedStep
    ours: Tensors
    reference: Reference
    plain: torch.nn.Module
    batches: list[Batch]


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt2", "mixtral"])
def first(request):
    start, batches, applied = start_of(request.param), labeled(1), []
    plain = bf16_copy(start)
    run = streamed(start, CHOICES, dtype="bfloat16", tokens=TOKENS, loss_chunk=TOKENS)
    run.engine.train_step(1, batches, 0.0, applied.append)
    run.engine.drain()
    reference = reference_step(plain, batches)
    yield FirstStep(run, applied[0], streamed_gradients(run), reference, plain, batches)
    run.close()


def test_gradients_are_fp32_sums_that_are_rounded_once(first):
    for name, expected in first.reference.sums.items():
        assert torch.equal(first.ours[name], expected.bfloat16()), name
    assert distance(first.reference.rounded_sums, first.reference.sums) > 2e-3


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_fp32_sums_in_every_plan_that_says_so(name):
    start, batches = start_of("qwen2"), labeled(2)
    plain = bf16_copy(start)
    run = streamed(start, PLANS[name], dtype="bfloat16", tokens=TOKENS, loss_chunk=TOKENS)
    run.engine.train_step(1, batches, 0.0)
    run.engine.drain()
    ours = streamed_gradients(run)
    for full_name, expected in reference_step(plain, batches).sums.items():
        assert torch.equal(ours[full_name], expected.bfloat16()), full_name
    run.close()


def test_the_norm_is_taken_of_the_sums_before_they_are_rounded(first):
    sums, off = first.reference.sums, []
    for unit, norm in zip(first.run.model.units, first.applied.unit_norms):
        own = {spec.full_name: sums[spec.full_name] for spec in unit.layout.parameters}
        assert norm == pytest.approx(norm_of(own), rel=2e-6)
        rounded = {name: gradient.bfloat16().float() for name, gradient in own.items()}
        off.append(abs(norm_of(rounded) / norm_of(own) - 1))
    assert first.applied.grad_norm == pytest.approx(norm_of(sums), rel=2e-6)
    assert max(off) > 2e-5, "the norm of rounded gradients could not be told from theirs"


def test_the_loss_is_that_of_float32_logits(first):
    assert first.applied.loss == pytest.approx(first.reference.loss, rel=1e-6)
    with torch.no_grad():
        parts = [summed(logits_of(first.plain, batch), batch).item() for batch in first.batches]
    total = sum(batch.loss_tokens for batch in first.batches)
    assert abs(sum(parts) / total / first.reference.loss - 1) > 1e-4, "bf16 could not be told"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_evaluation_is_the_mean_over_tokens(dtype):
    """Micro-batches have unlike numbers of tokens with a loss, from none to all of them, and most
    have more than a chunk of the loss.
    """
    start, batches = start_of("llama"), labeled(3)
    for number, batch in enumerate(batches):
        batch.labels[np.random.default_rng(number).random(batch.labels.shape) < number / 5] = -100
        batch.loss_tokens = int((batch.labels >= 0).sum())
    counts = [batch.loss_tokens for batch in batches]
    assert counts[0] == batches[0].labels.size and counts[-1] == 0
    plain = start if dtype == "float32" else bf16_copy(start)
    run = streamed(start, CHOICES, dtype=dtype, tokens=TOKENS, loss_chunk=7)
    found = run.engine.evaluate(iter(batches))
    run.close()
    with torch.no_grad():
        parts = [summed(logits_of(plain, batch).float(), batch).item() for batch in batches]
    expected = sum(parts) / sum(counts)
    assert found == pytest.approx(expected, rel=1e-6)
    means = [part / count for part, count in zip(parts, counts) if count]
    assert abs(sum(means) / len(means) / expected - 1) > 1e-3, "means could not be told"


def test_steps_of_adamw_on_planes_equal_torch_on_fp32_masters():
    """The reference clips by the norm of its fp32 sums, rounds them once and updates fp32 masters
    of its own with torch's AdamW. It computes with the bf16 weights that the engine has made of
    its masters, so that a rounding that fell the other way does not hide a fault.
    """
    masters = start_of("llama")
    before = {name: p.detach().clone() for name, p in masters.named_parameters()}
    plain = bf16_copy(masters)
    run = streamed(masters, CHOICES, dtype="bfloat16", tokens=TOKENS, loss_chunk=TOKENS)
    optimizer = decoupled_adamw(masters, run)
    for step in range(1, STEPS + 1):
        batches, applied = labeled(10 + step), []
        run.engine.train_step(step, batches, RATE, applied.append)
        run.engine.drain()
        reference = reference_step(plain, batches)
        norm = norm_of(reference.sums)
        assert applied[0].loss == pytest.approx(reference.loss, rel=1e-6)
        assert applied[0].grad_norm == pytest.approx(norm, rel=2e-6)
        for name, parameter in masters.named_parameters():
            rounded = reference.sums[name].bfloat16().float()
            parameter.grad = rounded * min(1.0, 1.0 / (norm + 1e-6))
        optimizer.step()
        weights = dict(plain.named_parameters())
        for unit in run.model.units:
            for spec in unit.layout.parameters:
                weights[spec.full_name].data.copy_(
                    run.host_states.parameters.view(unit.name, spec.name)
                )
    theirs = {name: p.detach() - before[name] for name, p in masters.named_parameters()}
    ours, seen = {}, {}
    for unit in run.model.units:
        for spec in unit.layout.parameters:
            name, master = spec.full_name, run.host_states.parameters.master(unit.name, spec.name)
            ours[name], seen[name] = master - before[name], weights[name] - master
    run.close()
    assert distance(ours, theirs) < 1e-5
    # bf16 keeps eight bits: the rounding of a master is off by half a unit of the last one at most.
    for name, off in seen.items():
        assert (off.abs() <= 2**-8 * (before[name] + theirs[name]).abs() * 1.001).all(), name
