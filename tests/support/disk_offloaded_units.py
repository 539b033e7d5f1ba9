"""Plans that keep moments on the disk, and the planes that they leave."""

from __future__ import annotations

from pathlib import Path

from tests.support.same_bits import DelayedBackend
from tests.support.tiny import plain_model, streamed, tiny_config


def run_of(choices, folder: Path, **how):
    plain = plain_model(tiny_config("qwen3", tie_word_embeddings=how.pop("tied", False)))
    return streamed(plain, choices, max_grad_norm=0.5, disk=folder, **how)


def planes_after(choices, folder: Path, late=(), steps=2, dtype="bfloat16", **how):
    """The planes of weights and moments after some steps. how: as for `streamed`, and `tied`."""
    if late:
        how["backend"] = DelayedBackend(late)
    run = run_of(choices, folder, dtype=dtype, **how)
    units = [unit.name for unit in run.model.units]
    assert run.host_states.placement.disk_offloaded == set(
        units[len(units) - choices.placement.disk_offloaded_units :]
    )
    return run.planes_after(choices.batching.micro_batches, steps)
