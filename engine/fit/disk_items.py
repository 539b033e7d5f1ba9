"""What a run writes is counted here, item by item. No torch."""

from __future__ import annotations

from engine.config.export_choice import written_dtype
from engine.config.settings import TrainConfig
from engine.fit.checkpoint_needs import best_at_once, best_bytes, checkpoints_at_once
from engine.fit.memory_items import Item, MemoryItem
from engine.model.shape import ModelShape
from engine.planes.layout import PLANE_ITEM_BYTES
from engine.words import MIB, in_gib

RECORD_BYTES = 16 * MIB
"""Events, timelines, manifests and tokenizer files of a run take this much."""


def disk_items(config: TrainConfig, shape: ModelShape, checkpoints_before: int) -> tuple[Item, ...]:
    """Returns the items that a run does not do without. `checkpoints_before` are on the disk, from
    earlier sessions of the run.
    """
    items = []
    kind = config.output.checkpoint
    copies = checkpoints_at_once(config, checkpoints_before)
    if copies:
        size = shape.checkpoint_bytes(kind)
        each = in_gib(size) if kind == "full" else f"{in_gib(size)}, weights alone"
        last = "one of them being written" if copies > 1 else "written at the end"
        note = f"{copies} of {each}, {last}"
        if shape.frozen_bytes:
            note += f", and {in_gib(shape.frozen_bytes)} that are not trained, for all of them"
        size = copies * size + shape.frozen_bytes
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
    """Returns the item of the best weights, if they are to be kept. A run goes on without them
    where the disk has no room.
    """
    size = best_bytes(config, shape)
    if not size:
        return ()
    copies = best_at_once(config)
    each = in_gib(shape.checkpoint_bytes("weights"))
    note = f"fp32 masters of the best evaluation, {each}"
    if copies > 1:
        note += ", and once more while better ones are written"
    return (Item(MemoryItem.BEST, size, note),)
