"""Bounds between a run on one rank and one on several, and plans for both."""

from __future__ import annotations

import pytest

from tests.support.trained_ranks import Trained

UNTIED = {"tie_word_embeddings": False}
IN_ORDER = {"max_grad_norm": None, "loss_chunk": 64}
"""The losses of a micro-batch are computed at once, and no gradient is scaled by a norm. Then one
rank adds the gradients of micro-batches in the order in which ranks that have one each are added.
"""
EXACT = ("ernie4_5_moe", "flint", "olmo_hybrid")
"""Routers, gates and other weights of these families stay in fp32 in a bf16 model."""
UPDATED_ON_DEVICE = {
    "some": dict(device_updated_units=("embed", "block 0"), update_buffers=2),
    "all": dict(
        device_updated_units=("embed", "block 0", "block 1", "block 2", "head"), update_buffers=1
    ),
    "all, gradients on the GPU": dict(
        device_updated_units=("embed", "block 0", "block 1", "block 2", "head"),
        update_buffers=3,
        update_chunks=4,
        gradients_on_gpu=True,
    ),
}
BOUNDS = {"weight_high": 2e-6, "exp_avg": 8e-6, "exp_avg_sq": 8e-6, "grad": 1.2e-5}
"""After ten steps the shards may be off by these parts of the norm of their plane. The families
differ by up to 6e-7, 2.3e-6, 1.6e-6 and 4e-6, which is what reassociated sums make of fp32's 6e-8
in so many steps. The bounds leave three times as much, for other processors.
"""
LOSS, NORM = 6e-7, 2e-6
"""Losses differ by up to two units in the last place, and norms by up to 6e-7."""


def assert_near(ours: Trained, theirs: Trained) -> None:
    for (loss, norm), (expected_loss, expected_norm) in zip(ours.steps, theirs.steps):
        assert loss == pytest.approx(expected_loss, rel=LOSS)
        assert norm == pytest.approx(expected_norm, rel=NORM)
    for (unit, plane), expected in theirs.planes.items():
        if not expected.numel():  # nothing of the unit is trained
            continue
        error = (ours.planes[unit, plane] - expected).norm() / expected.norm()
        assert error < BOUNDS[plane], f"{plane} of {unit} is off by {error:.1e}"
