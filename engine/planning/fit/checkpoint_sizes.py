"""Checkpoints and the best weights need space on the disk, and RAM for copies while training goes
on. No torch.
"""

from __future__ import annotations

from dataclasses import replace

from engine.config.export_choice import written_dtype
from engine.config.output_settings import CheckpointKind
from engine.config.settings import TrainConfig
from engine.planning.fit.memory_items import Item, MemoryItem
from engine.planning.layout.layout import PLANE_ITEM_BYTES, checkpoint_planes
from engine.planning.shape.model_shape import ModelShape
from engine.text import MIB, in_gib

STAGING_CHUNK_BYTES = 8 * MIB
"""Bytes of a chunk in which planes are copied; the end of a plane takes a whole chunk."""
SMALL_BYTES = 64 * MIB
"""Size below which a checkpoint is written while training stands still, which takes a moment."""
FILLED_SHARE = 0.89
"""Fraction of RAM up to which copies fill it: the verdict on a job remains what it is without
them.
"""
FREE_SHARE = 0.5
"""Largest fraction of the RAM that is left which copies take, so that other programs keep the
rest.
"""


def checkpoints_at_once(config: TrainConfig, before: int = 0) -> int:
    """Returns the most checkpoints that are on the disk at the same time: those that are kept, and
    the next one while it is written. `before` are there already, from earlier sessions of the run.

    A run that writes few checkpoints has fewer: one that writes its first checkpoint at the end has
    no other. A stop or a failure writes that of the end early. Only a person who saves in between
    adds one.
    """
    output, steps = config.output, config.train.steps
    if output.checkpoint == "none":
        return 0
    most = output.keep_checkpoints + 1
    if output.checkpoint_every == 0:
        written = 1
    elif steps is None:
        written = most
    else:
        written = -(-steps // output.checkpoint_every)
    # What is kept beyond the number goes only once the first new one is whole.
    return max(before + 1, min(most, before + written))


def best_at_once(config: TrainConfig) -> int:
    """Returns how many copies of the best weights are on the disk at the same time: those that are
    kept, and better ones while they are written. A run with one evaluation has no others.
    """
    output, steps = config.output, config.train.steps
    if not output.keeps_best or not config.data.eval_fraction:
        return 0
    return 1 if steps is not None and steps <= output.eval_every else 2


def best_bytes(config: TrainConfig, shape: ModelShape) -> int:
    """Returns the space that the best weights take on the disk at most, in bytes."""
    # Checkpoints have the weights that are not trained, and share them with these.
    own = 0 if checkpoints_at_once(config) else shape.states.frozen_bytes
    return best_at_once(config) * shape.states.checkpoint_bytes("weights") + own


def copy_bytes(
    config: TrainConfig, shape: ModelShape, taken: int, limit: int | None, keeps_best: bool
) -> int:
    """Returns the RAM for copies of planes that a checkpoint has yet to write, in bytes.

    They let updates continue before the disk has taken the planes of a step. A run has them if it
    writes checkpoints between its steps, or keeps the best weights (`keeps_best`); both may fall
    due after the same step. They take what is free, but not all of it: at most `FREE_SHARE` of the
    rest, and only up to `FILLED_SHARE` of the whole. `taken` is what the run takes otherwise, and
    `limit` what it may take; where that is not known, there are no copies.
    """
    every, steps = config.output.checkpoint_every, config.train.steps
    kinds: list[CheckpointKind] = []
    if every > 0 and (steps is None or every < steps):
        kinds.append(config.output.checkpoint)
    if keeps_best and best_at_once(config) > 1:
        kinds.append("weights")
    chunks = sum(_in_chunks(shape, kind) for kind in kinds)
    if limit is None:
        return 0
    room = min(FREE_SHARE * (limit - taken), FILLED_SHARE * limit - taken, chunks)
    return max(0, int(room) // STAGING_CHUNK_BYTES * STAGING_CHUNK_BYTES)


def _in_chunks(shape: ModelShape, kind: CheckpointKind) -> int:
    """Returns the bytes of all chunks of one checkpoint that is written while steps continue."""
    if kind == "none" or shape.states.checkpoint_bytes(kind) < SMALL_BYTES:
        return 0
    chunks = 0
    for unit in shape.units:
        sizes = shape.states.unit_bytes(replace(unit, frozen_numel=0))
        for plane in checkpoint_planes(shape.dtype, shape.optimizer, kind):
            chunks += -(-sizes[plane] // STAGING_CHUNK_BYTES)
    return chunks * STAGING_CHUNK_BYTES


# ---------------------------------------------------------------------- disk items

# What a run writes is counted here, item by item. No torch.


RECORD_BYTES = 16 * MIB
"""Bytes of the events, timelines, manifests and tokenizer files of a run."""


def disk_items(config: TrainConfig, shape: ModelShape, checkpoints_before: int) -> tuple[Item, ...]:
    """Returns the items that a run does not do without. `checkpoints_before` are on the disk, from
    earlier sessions of the run.
    """
    items = []
    kind = config.output.checkpoint
    copies = checkpoints_at_once(config, checkpoints_before)
    if copies:
        size = shape.states.checkpoint_bytes(kind)
        each = in_gib(size) if kind == "full" else f"{in_gib(size)}, weights alone"
        last = "one of them being written" if copies > 1 else "written at the end"
        note = f"{copies} of {each}, {last}"
        if shape.states.frozen_bytes:
            note += (
                f", and {in_gib(shape.states.frozen_bytes)} that are not trained, for all of them"
            )
        size = copies * size + shape.states.frozen_bytes
        items.append(Item(MemoryItem.CHECKPOINTS, size, note))
    if config.output.export:
        dtype = written_dtype(config.output.export_dtype, shape.dtype)
        what = "adapters" if config.exports_adapter else "a Hugging Face folder"
        if shape.untouched_numel and not config.exports_adapter:
            what += ", with the parts that are not trained,"
        size = export_bytes(config, shape)
        items.append(Item(MemoryItem.EXPORT, size, f"{what} in {dtype}"))
    return (
        *items,
        Item(MemoryItem.RECORD, RECORD_BYTES, "events, timelines and tokenizer files"),
    )


def export_bytes(config: TrainConfig, shape: ModelShape) -> int:
    """Returns the bytes of the weights in the folder that a run exports."""
    dtype = written_dtype(config.output.export_dtype, shape.dtype)
    item = PLANE_ITEM_BYTES[dtype]["weight_high"]
    if config.exports_adapter:
        return shape.trained_count * item
    merged = 0
    if config.train.method == "lora":
        # Adapters are added to the weights of their layers, and not written beside them. Those of
        # stacks of experts count as if they were.
        features = sum(unit.adapter_features for unit in shape.units)
        merged = min(shape.trained_count, config.train.lora_rank * features)
    return shape.export_bytes(dtype) - merged * item


def best_items(config: TrainConfig, shape: ModelShape) -> tuple[Item, ...]:
    """Returns the item of the best weights, if they are to be kept. A run continues without them
    where the disk has no room.
    """
    size = best_bytes(config, shape)
    if not size:
        return ()
    copies = best_at_once(config)
    each = in_gib(shape.states.checkpoint_bytes("weights"))
    note = f"fp32 masters of the best evaluation, {each}"
    if copies > 1:
        note += ", and once more while better ones are written"
    return (Item(MemoryItem.BEST, size, note),)
