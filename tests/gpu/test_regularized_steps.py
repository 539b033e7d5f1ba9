"""Label smoothing and noise on embeddings on lanes that run at once: any plan gives the same bits,
and a GPU draws the noise of a CPU. Tests of lanes also run without a GPU.
"""

from __future__ import annotations

import pytest
import torch

from engine.runtime.step.neftune import RowNoise, StepNoise
from tests.support.regularized import PlainStep
from tests.support.regularized_plans import BASE, BOTH, NOISY, planes_after
from tests.support.same_bits import assert_same_bits
from tests.support.tiny import random_batches

pytestmark = pytest.mark.computing

PLANS = {
    "kept and resident": dict(blocks_without_recompute=1, blocks_kept_in_slots=1),
    "block inputs on the host": dict(offloaded_block_inputs=True, block_input_rings=1),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_plan_gives_the_same_bits(lanes, dtype):
    expected = planes_after(BASE, BOTH, dtype, backend=lanes())
    for changes in PLANS.values():
        choices = BASE.changed(**changes)
        assert_same_bits(planes_after(choices, BOTH, dtype, backend=lanes()), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_noise_has_the_bits_of_numpy_on_any_device(device, dtype):
    batch = random_batches(1, 7, 100)[0]
    of_rows = torch.from_numpy(StepNoise(5.0, 42, 3).of_rows(batch)).to(device)
    noise = RowNoise(of_rows).added_to(torch.zeros(7, 100, 96, dtype=dtype, device=device))
    expected = PlainStep(NOISY, 3, 42).noise(batch, 96)
    assert torch.equal(noise.cpu(), torch.from_numpy(expected).to(dtype))
