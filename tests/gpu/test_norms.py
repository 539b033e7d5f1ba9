"""On a GPU, too, the norm of a unit is that of float64 (tests/engine/runtime/test_norms.py)."""

from __future__ import annotations

import math

import pytest
import torch

from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cuda_backend import CudaBackend
from tests.support.norms import CLOSE, gradient_like, norm_in_float64, squares_of
from tests.support.tiny import plain_loss, plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("unit, piece", [("block 0", 0), ("embed", 1_000_000)])
@pytest.mark.parametrize("numel", [4097, 3_500_000, 28_000_001, 400_000_000])
def test_the_norm_of_a_unit_is_that_of_float64(numel, unit, piece):
    values = gradient_like(numel, "cuda")
    found = squares_of(values, unit, piece)
    assert math.sqrt(float(found)) == pytest.approx(norm_in_float64(values), rel=CLOSE, abs=0)
    assert float(squares_of(values, unit, piece)) == float(found), "it has the same bits again"


def test_norm_and_clip_factor_of_a_step_are_those_of_float64():
    """The tied embedding has 2.6 million elements, whose gradient is dense."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = tiny_config("llama", vocab_size=80_000, tie_word_embeddings=True)
    plain = plain_model(config)
    batches = random_batches(2, seed=1, vocabulary=80_000)
    plain_loss(plain, batches).backward()
    squares = [float(p.grad.double().square().sum()) for p in plain.parameters()]
    norm = math.sqrt(math.fsum(squares))
    run = streamed(
        plain, PlanChoices().changed(micro_batches=2), backend=CudaBackend(), max_grad_norm=norm / 3
    )
    applied = []
    run.engine.train_step(1, batches, 1e-3, applied.append)
    run.engine.drain()
    # The products of the two devices are rounded differently.
    assert applied[0].grad_norm == pytest.approx(norm, rel=5e-6)
    own = math.hypot(
        *(norm_in_float64(run.host_states.tensor(unit.name, "grad")) for unit in run.model.units)
    )
    assert applied[0].grad_norm == pytest.approx(own, rel=CLOSE)
    assert math.hypot(*applied[0].unit_norms) == pytest.approx(own, rel=CLOSE)
    assert float(run.engine.state.clip[0]) == pytest.approx(norm / 3 / (own + 1e-6), rel=CLOSE)
    run.close()
