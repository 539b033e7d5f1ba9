"""Plans that keep all planes of some units on the device, and the planes that they leave."""

from __future__ import annotations

import torch

from tests.support.same_bits import DelayedBackend
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

UNITS = 5
"""The model has an embedding, three blocks and a head."""
FRAMES = {
    "plain": {},
    "parked": dict(parked_gradients=True),
    "rounds": dict(micro_batches=4, rounds=2, gradient_sum="device"),
    "in sums": dict(
        micro_batches=4,
        rounds=2,
        gradient_sum="device",
        parked_gradients=True,
        gradients_in_sums=True,
    ),
    "pairs": dict(boundary_blocks=2, slots=2),
    "kept": dict(kept_blocks=2),
    "host boundaries": dict(host_boundaries=True),
}


def planes_after(choices, late=(), steps=2, dtype="bfloat16", tied=False, **how):
    """The planes of weights and moments after some steps. how: `backend` and `optimizer`."""
    plain = plain_model(tiny_config("qwen3", tie_word_embeddings=tied))
    backend = DelayedBackend(late) if late else how.get("backend")
    optimizer = how.get("optimizer", "adamw")
    run = streamed(
        plain, choices, backend=backend, dtype=dtype, max_grad_norm=0.5, optimizer=optimizer
    )
    for step in range(1, steps + 1):
        run.engine.train_step(step, random_batches(choices.micro_batches, seed=step), 1e-2)
    run.engine.drain()
    assert run.store.settled == {unit for unit, _ in run.engine.plan.settled}
    planes = kept_planes(run)
    run.close()
    return planes


def kept_planes(run) -> list[torch.Tensor]:
    """Copies of the planes of weights and moments, wherever they are."""
    store = run.store
    return [
        torch.from_numpy(store.content(unit.name, plane, 0, store.nbytes(unit.name, plane))).clone()
        for unit in run.model.units
        for plane in store.planes
        if plane != "grad"
    ]
