"""Plans that keep all planes of some units on the device, and the planes that they leave."""

from __future__ import annotations

from tests.support.same_bits import DelayedBackend
from tests.support.tiny import plain_model, streamed, tiny_config

UNITS = 5
"""The model has an embedding, three blocks and a head."""
PLAN_FAMILIES = {
    "plain": {},
    "gradients on the GPU": dict(gradients_on_gpu=True),
    "rounds": dict(micro_batches=4, rounds=2, main_grad="device"),
    "rounds, gradients on the GPU": dict(
        micro_batches=4, rounds=2, main_grad="device", gradients_on_gpu=True
    ),
    "pairs": dict(blocks_per_saved_input=2, slots=2),
    "kept": dict(blocks_without_recompute=2),
    "block inputs on the host": dict(offloaded_block_inputs=True),
}


def planes_after(choices, late=(), steps=2, dtype="bfloat16", tied=False, **how):
    """The planes of weights and moments after some steps. how: `backend` and `optimizer`."""
    plain = plain_model(tiny_config("qwen3", tie_word_embeddings=tied))
    backend = DelayedBackend(late) if late else how.get("backend")
    optimizer = how.get("optimizer", "adamw")
    run = streamed(
        plain, choices, backend=backend, dtype=dtype, max_grad_norm=0.5, optimizer=optimizer
    )
    assert run.host_states.placement.gpu_resident == {
        unit for unit, _ in run.engine.plan.gpu_resident
    }
    return run.planes_after(choices.batching.micro_batches, steps)
