"""The planes of a plan in RAM are listed here, with what passes through RAM on its way to them. The
bytes are those that HostStore and the engine allocate. No torch.
"""

from __future__ import annotations

from engine.fit.buffer_sizes import (
    gradient_ring_bytes,
    settled_in_words,
    spilled_in_words,
    spilled_units,
    state_rings_bytes,
)
from engine.fit.memory_items import Item, MemoryItem
from engine.model.shape import ModelShape
from engine.plan.choices import PlanChoices
from engine.planes.moments import KINDS, MOMENTS

PLANE_NOTES = {
    "weight_high": "weights as the device sees them",
    "weight_low": "the rest of the fp32 masters",
    "exp_avg": "AdamW's first moment",
    "exp_avg_sq": "AdamW's second moment",
    "grad": "gradients",
}


def plane_items(shape: ModelShape, choices: PlanChoices) -> list[Item]:
    """Returns the items of planes in RAM, and of the buffers for parked gradients and for moments
    on the disk.
    """
    items: list[Item] = []
    for plane, size in shape.plane_bytes(choices.settled_units, choices.spilled_units).items():
        if plane == "grad" and choices.parked_gradients:
            ring = gradient_ring_bytes(shape, choices)
            words = "parked gradients on their way to the optimizer"
            items.append(Item(MemoryItem.GRADIENT_RING, ring, words))
            continue
        if size:
            items.append(Item(MemoryItem(plane), size, _note(shape, choices, plane, size)))
    rings = state_rings_bytes(shape, choices)
    if rings:
        words = "moments on the disk, while they are updated"
        items.append(Item(MemoryItem.STATES_RING, rings, words))
    return items


def _note(shape: ModelShape, choices: PlanChoices, plane: str, size: int) -> str:
    """Returns a text on what a plane holds. The bytes a parameter of moments are those of its real
    `size`, since small parameters and embeddings may keep theirs more exactly.
    """
    is_moment = plane in MOMENTS
    kind = f", {KINDS[shape.optimizer]}" if is_moment else ""
    numel = shape.plane_numel - shape.first_numels[choices.settled_units]
    if is_moment:
        numel -= sum(unit.numel for unit in spilled_units(shape, choices))
    text = f"{PLANE_NOTES[plane]}{kind}, {size / numel:.3g} bytes a parameter"
    if choices.settled_units:
        text += f"; without {settled_in_words(shape, choices)}"
    if is_moment and choices.spilled_units:
        text += f"; those of {spilled_in_words(shape, choices)} are on the disk"
    return text
