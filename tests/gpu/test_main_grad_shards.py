"""Two GPUs keep shards of their accumulators over the rounds of a step, exchange gradients in bf16,
and update moments after all weights. What they train is what one GPU trains.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import MainGrad
from engine.runtime.device.open_backend import open_backend
from engine.tools.bench.steps import RANDOM, Planes, RunSettings, Trained, random_rows, run_steps
from tests.support.tiny import tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices"),
]

DEVICE = "cuda"
ONE = PlanChoices().changed(micro_batches=8, blocks_without_recompute=2)
SHARDS = PlanChoices().changed(
    micro_batches=4, ranks=2, rounds=4, main_grad=MainGrad.SHARDS, blocks_without_recompute=2
)
STATES = ("weight_high", "weight_low", "exp_avg", "exp_avg_sq")


def states_after(steps: int, choices: PlanChoices) -> dict[tuple[str, str], np.ndarray]:
    """Returns the planes of a tiny model in bf16 after steps on the same eight micro-batches."""
    config = tiny_config("qwen3", tie_word_embeddings=False, hidden_size=128)
    backend = open_backend(DEVICE)
    planes = Planes.open(config, backend, RANDOM, False, Trained(is_shared=True))
    try:
        planes.use("adamw", choices)
        batches = random_rows([2] * 8, 64, config.vocab_size)
        run_steps(planes, batches, RunSettings(choices, steps, 1e-3, loss_chunk=128))
        states = planes.host_states
        keys = [(unit, plane) for unit in states.layouts for plane in STATES]
        return {key: states.array(*key).copy() for key in keys}
    finally:
        planes.close()
        backend.close()


def test_the_sum_is_that_of_one_gpu():
    """If anything were added in bf16, the moment would be off by a part in 500."""
    several, one = states_after(1, SHARDS), states_after(1, ONE)
    for key, expected in one.items():
        if key[1] == "exp_avg":
            error = np.linalg.norm(several[key] - expected) / np.linalg.norm(expected)
            assert error < 1e-4, key


def test_moments_after_all_weights_have_the_same_bits():
    late, usual = (
        states_after(5, SHARDS.changed(moments_after_weights=at)) for at in (True, False)
    )
    for key, expected in usual.items():
        assert late[key].tobytes() == expected.tobytes(), key
