"""Sums over all elements of a unit, or over all tokens of a step, are those of float64. Torch's own
`clip_grad_norm_` is no reference here: on the CPU its norms of large tensors are too low.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from engine.planning.schedule.choices import PlanChoices
from engine.runtime.step.cross_entropy import LossChunks, LossTargets, TailGradients, chunked_loss
from tests.support.norms import CLOSE, gradient_like, norm_in_float64, squares_of
from tests.support.tiny import plain_loss, plain_model, random_batches, streamed, tiny_config


@pytest.mark.parametrize("unit, embed_chunk", [("block 0", 0), ("embed", 1_000_000)])
def test_the_norm_of_a_unit_is_that_of_float64(unit, embed_chunk):
    for numel in (0, 1, 4095, 4097, 3_500_000, 28_000_001):
        values = gradient_like(numel)
        found = math.sqrt(float(squares_of(values, unit, embed_chunk)))
        assert found == pytest.approx(norm_in_float64(values), rel=CLOSE, abs=0), numel


@pytest.mark.slow("it adds 400 million squares, which takes 1.6 GB")
def test_the_norm_of_400_million_elements_is_that_of_float64():
    values = gradient_like(400_000_000)
    found = math.sqrt(float(squares_of(values)))
    assert found == pytest.approx(norm_in_float64(values), rel=CLOSE, abs=0)


def test_a_norm_does_not_depend_on_the_number_of_threads():
    values, threads = gradient_like(5_000_003), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            found.append(float(squares_of(values)))
    finally:
        torch.set_num_threads(threads)
    assert len(set(found)) == 1


@pytest.mark.computing
def test_norm_and_clip_factor_of_a_step_are_those_of_float64():
    """The tied embedding has 2.6 million elements, whose gradient is dense."""
    config = tiny_config("llama", vocab_size=80_000, tie_word_embeddings=True)
    plain = plain_model(config)
    batches = random_batches(2, seed=1, vocabulary=80_000)
    plain_loss(plain, batches).backward()
    squares = [float(p.grad.double().square().sum()) for p in plain.parameters()]
    norm = math.sqrt(math.fsum(squares))
    limit = norm / 3
    run = streamed(plain, PlanChoices().changed(micro_batches=2), max_grad_norm=limit)
    applied = []
    run.engine.train_step(1, batches, 1e-3, applied.append)
    run.engine.drain()
    (step,) = applied
    assert step.grad_norm == pytest.approx(norm, rel=CLOSE)
    assert math.hypot(*step.unit_norms) == pytest.approx(norm, rel=CLOSE)
    factor = float(run.engine.state.clip[0])
    assert factor == pytest.approx(limit / (norm + 1e-6), rel=CLOSE)
    run.close()


def test_the_loss_of_many_chunks_is_that_of_float64():
    """Each chunk adds nearly as much as any other, so that the rounding of a sum in fp32 would not
    cancel out.
    """
    count, width, vocabulary = 65_536, 4, 16
    generator = torch.Generator().manual_seed(0)
    hidden = 0.1 * torch.randn(1, count, width, generator=generator)
    labels = torch.randint(vocabulary, (count,), generator=generator)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    skeleton = SimpleNamespace(logits=head)
    targets = LossTargets(torch.arange(count), labels, 1.0 / count)
    tail = TailGradients([], lambda _gradients: None, of_hidden=True)
    loss, _ = chunked_loss(skeleton, hidden, targets, LossChunks(16), tail)
    with torch.no_grad():
        logits = head(hidden[0]).double()
        expected = float(torch.nn.functional.cross_entropy(logits, labels))
    assert float(loss) == pytest.approx(expected, rel=1e-7)
