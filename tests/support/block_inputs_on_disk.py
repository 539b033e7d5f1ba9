"""Plans that keep block inputs on the disk, and the planes that they leave."""

from __future__ import annotations

from pathlib import Path

from engine.planning.schedule.choices import EmbedAndHead
from engine.planning.schedule.ops import MainGrad
from tests.support.same_bits import BASE, DelayedBackend
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

LAYERS = 5
ON_HOST = BASE.changed(offloaded_block_inputs=True)
PLAN_FAMILIES = {
    "plain": {},
    "six micro-batches": dict(micro_batches=6),
    "one ring": dict(micro_batches=3, block_input_rings=1),
    "rounds": dict(micro_batches=4, rounds=2, main_grad=MainGrad.DEVICE),
    "main_grads on the host": dict(micro_batches=4, rounds=2, main_grad=MainGrad.HOST),
    "two kept": dict(blocks_without_recompute=2, blocks_kept_in_slots=2),
    "pairs": dict(blocks_per_saved_input=2, slots=3, micro_batches=3),
    "gradients on the GPU": dict(gradients_on_gpu=True, embed_and_head=EmbedAndHead.SHARED_SLOT),
    "some live on the device": dict(gpu_resident_units=3),
    "updated on the device": dict(device_updated_units=("block 1", "head"), update_buffers=2),
}
BOUNDED = {"two kept": 3, "pairs": 3}
"""So many of the blocks keep their input, where not all do."""


def run_of(choices, folder: Path | None, **how):
    plain = plain_model(tiny_config("qwen3", num_hidden_layers=LAYERS))
    return streamed(plain, choices, max_grad_norm=0.5, disk=folder, **how)


def planes_after(choices, folder: Path | None, late=(), steps=3, **how):
    """The planes of weights and moments after some steps, and a dry run before them."""
    if late:
        how["backend"] = DelayedBackend(late)
    run = run_of(choices, folder, **how)
    run.engine.dry_run(random_batches(choices.batching.micro_batches, seed=9))
    return run.planes_after(choices.batching.micro_batches, steps)


def with_block_inputs_on_disk(base, plan_family: str):
    """Yields the choices with one, some and all block inputs on the disk."""
    most = BOUNDED.get(plan_family, LAYERS) * base.batching.micro_batches
    for count in (1, most // 2 + 1, most):
        yield base.changed(disk_offloaded_block_inputs=count)
