"""Weights of single tokens: training equals plain transformers with a weighted mean, any plan and
any ranks give the same bits, and weights of 0 and 1 are what labels that are left out are.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from engine.config.regularization import Regularization
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.compiled import compiled_function
from engine.runtime.step.cross_entropy import IGNORED, weighted
from tests.support.bf16_parity import DENSE, MIXTURE, ROWS, compare_in_bf16
from tests.support.compiled import needs_compiler
from tests.support.parity import compare
from tests.support.rank_parity import IN_ORDER, UNTIED
from tests.support.same_bits import SAME_BITS, assert_same_bits
from tests.support.sets import FAMILY_SWEEP, slow_but
from tests.support.tiny import (
    FAMILIES,
    plain_model,
    random_batches,
    streamed,
    tiny_config,
    weighted_batches,
    weighted_loss,
)
from tests.support.trained_ranks import Job, train

pytestmark = pytest.mark.computing

BASE = PlanChoices().changed(micro_batches=2)
FEW = ("llama", "gemma3_text", "gpt2")


# ------------------------------------------------------------------ beside plain transformers


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", slow_but(FAMILIES, FEW, FAMILY_SWEEP))
def test_training_in_float32_equals_a_weighted_mean(family, tied):
    compare(family, tied, 2, BASE, weighted_batches, loss_of=weighted_loss)


@pytest.mark.parametrize("family", slow_but(FAMILIES, FEW, FAMILY_SWEEP))
def test_training_in_bf16_equals_a_weighted_mean(family):
    bounds = MIXTURE if family == "mixtral" else DENSE
    compare_in_bf16(tiny_config(family), ROWS, BASE, bounds=bounds, made=weighted_batches)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "how",
    [
        "eager",
        pytest.param(
            "compiled",
            marks=[needs_compiler, pytest.mark.slow("torch compiles the loss, for seconds")],
        ),
    ],
)
@pytest.mark.usefixtures("quick_compiler")
def test_the_loss_of_a_chunk_and_its_gradient_are_those_of_torch(how, smoothing):
    """Positions that fill up a compiled chunk are ignored and have the weight 0."""
    loss_of = weighted(smoothing)
    if how == "compiled":
        loss_of = compiled_function(loss_of, "A weighted loss")
    logits = 4 * torch.randn(24, 97, generator=torch.Generator().manual_seed(3))
    labels, weights = torch.arange(24) * 3, torch.linspace(0.1, 5, 24)
    labels[20:], weights[20:] = IGNORED, 0
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    found = loss_of(ours, labels, weights)
    logs = theirs.log_softmax(-1)[:20]
    each = -(1 - smoothing) * logs[torch.arange(20), labels[:20]] - smoothing * logs.mean(-1)
    expected = (each * weights[:20]).sum()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    found.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert not ours.grad[20:].any()


# ------------------------------------------------------------------ weights of 0 and 1


def after(choices, batches_of, dtype="float32", **engine):
    """Returns the planes after two steps, and the loss of each step and of an evaluation."""
    run = streamed(plain_model(tiny_config("qwen3")), choices, dtype=dtype, **engine)
    applied = []
    for step in (1, 2):
        batches = batches_of(choices.batching.micro_batches, seed=step)
        run.engine.train_step(step, batches, 1e-2, applied.append)
    run.engine.drain()
    losses = [step.loss for step in applied]
    losses.append(run.engine.evaluate(batches_of(3, seed=9)))
    planes = run.planes()
    run.close()
    return planes, losses


def with_ones(count: int, seed: int):
    batches = random_batches(count, seed=seed)
    for batch in batches:
        batch.weights = (batch.labels >= 0).astype(np.float32)
    return batches


def with_twos(count: int, seed: int):
    batches = weighted_batches(count, seed=seed)
    for batch in batches:
        batch.weights = 2 * batch.weights
    return batches


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_common_factor_of_all_weights_changes_no_bit(dtype):
    """The mean is divided by the sum of the weights; a factor of 2 rounds nothing."""
    planes, losses = after(BASE, weighted_batches, dtype)
    doubled, same = after(BASE, with_twos, dtype)
    assert_same_bits(doubled, planes)
    assert same == losses


def test_weights_of_one_are_the_mean_over_tokens():
    planes, losses = after(BASE, with_ones)
    plain, expected = after(BASE, random_batches)
    assert losses == pytest.approx(expected, rel=1e-6)
    _, other = after(BASE, weighted_batches)
    assert other != pytest.approx(losses, rel=1e-3)
    for mine, theirs in zip(planes, plain):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_an_evaluation_is_weighted_and_its_documents_are_not():
    run = streamed(plain_model(tiny_config("llama")), BASE)
    batches = weighted_batches(3, seed=5)
    found = run.engine.evaluate_rows(batches)
    bare = [dataclasses.replace(batch, weights=None) for batch in batches]
    plain = run.engine.evaluate_rows(bare)
    each = [losses for _, losses in run.engine.losses_of(batches)]
    weights = [torch.from_numpy(batch.weights[batch.labels >= 0]) for batch in batches]
    total = sum(float((one.double() * own.double()).sum()) for one, own in zip(each, weights))
    assert found.loss == pytest.approx(total / sum(float(own.sum()) for own in weights), rel=1e-6)
    assert found.loss != pytest.approx(plain.loss, rel=1e-4)
    assert np.array_equal(found.sums, plain.sums) and np.array_equal(found.tokens, plain.tokens)
    run.close()


# ------------------------------------------------------------------ any plan


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_plan_gives_the_same_bits(dtype):
    expected, losses = after(BASE, weighted_batches, dtype)
    for name in list(SAME_BITS)[::3]:
        choices = BASE.changed(**SAME_BITS[name])
        planes, found = after(choices, weighted_batches, dtype)
        assert_same_bits(planes, expected)
        assert found[:2] == losses[:2], name


def test_a_smoothed_loss_is_weighted_too():
    smoothed = Regularization(label_smoothing=0.2)
    _, both = after(BASE, weighted_batches, regularization=smoothed)
    _, unweighted = after(BASE, random_batches, regularization=smoothed)
    _, unsmoothed = after(BASE, weighted_batches)
    for other in (unweighted, unsmoothed):
        assert both[0] != pytest.approx(other[0], rel=1e-4)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_in_other_micro_batches_have_the_same_weighted_mean(size):
    """Micro-batches change a loss by rounding alone, since the whole step is divided by one sum."""
    whole = weighted_batches(1, rows=4, seed=3)[0]
    parts = []
    for start in range(0, 4, size):
        part = copy.copy(whole)
        rows = slice(start, start + size)
        for name in ("input_ids", "labels", "places", "lengths", "weights"):
            setattr(part, name, getattr(whole, name)[rows])
        part.loss_tokens = int((part.labels >= 0).sum())
        parts.append(part)
    losses = []
    for batches in ([whole], parts):
        plain = plain_model(tiny_config("llama"))
        run = streamed(plain, PlanChoices().changed(micro_batches=len(batches)), tokens=48)
        run.engine.train_step(1, batches, 0.0, losses.append)
        run.engine.drain()
        run.close()
    assert losses[1].loss == pytest.approx(losses[0].loss, rel=1e-6)
    assert losses[1].grad_norm == pytest.approx(losses[0].grad_norm, rel=1e-5)


@pytest.mark.parametrize("dtype, ranks", [("float32", 2), ("bfloat16", 3)])
def test_ranks_have_the_bits_of_one_rank(dtype, ranks):
    job = Job("llama", dtype, 3, ranks, UNTIED, IN_ORDER, weighted_batches)
    several, one = train(ranks, job), train(1, job)
    several.assert_same_bits(one)
    assert [loss for loss, _ in several.steps] == [loss for loss, _ in one.steps]
    plain = train(1, dataclasses.replace(job, batches=random_batches))
    assert [loss for loss, _ in plain.steps] != [loss for loss, _ in one.steps]
