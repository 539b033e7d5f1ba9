"""The bytes of the planes and buffers that a plan keeps throughout a run, on the device and on the
host, are computed here, to the byte. Pure arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.planning.fit.memory_items import Item, MemoryItem
from engine.planning.layout.layout import EXACT_ITEM_BYTES
from engine.planning.layout.moments import KINDS, MOMENTS
from engine.planning.layout.spilled import PAGE, SPILL_NUMEL, state_ring_bytes, whole_pages
from engine.planning.layout.update_buffers import UpdateBuffer, small_pieces
from engine.planning.schedule.arena import Arena, lay_out_arena
from engine.planning.schedule.choices import (
    PlanChoices,
    seconds_of_pairs,
    settled_blocks,
    settled_of,
    summed_apart,
)
from engine.planning.schedule.offloaded_activations import DISK_RINGS
from engine.planning.schedule.offloaded_updates import STATE_RINGS
from engine.planning.schedule.ops import GradientSum
from engine.planning.schedule.step_buffers import GRADIENT_RINGS
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.saved_attention_sizes import with_room
from engine.planning.shape.unit_shape import UnitShape
from engine.words import counted

PLANE_NOTES = {
    "weight_high": "weights as the device sees them",
    "weight_low": "the rest of the fp32 masters",
    "exp_avg": "AdamW's first moment",
    "exp_avg_sq": "AdamW's second moment",
    "grad": "gradients",
}


def buffers_in_words(buffers: int, spare: int) -> str:
    """Returns the number of pieces of states that are on the device at once, in words."""
    words = f"{buffers - spare} at a time"
    if spare:
        words += f" and {spare} more in the place of activations"
    return words


def fixed_items(
    shape: ModelShape, choices: PlanChoices, block_input_numel: int
) -> tuple[Item, ...]:
    """Returns the buffers that are kept throughout the run, with the bytes of `fixed_bytes`."""
    sizes = fixed_bytes(shape, choices, block_input_numel)
    notes = _fixed_notes(shape, choices)
    return tuple(Item(kind, size, notes[kind]) for kind, size in sizes.items())


def fixed_bytes(
    shape: ModelShape, choices: PlanChoices, block_input_numel: int
) -> dict[MemoryItem, int]:
    """Returns the bytes of the buffers that are kept throughout the run: what DeviceState
    allocates, to the byte. With several ranks they are those of each.

    boundary_numel: the number of elements in the hidden state of the largest micro-batch.
    """
    slots, resident = block_slot_bytes(shape, choices)
    settled = shape.settled_on(choices.ranks)[choices.settled_units]
    shape = shape.padded(choices.ranks)
    sums = 4 * (_sum_numel(shape, choices) + _shard_numel(shape, choices))
    norms = 8 * (len(shape.units) + 1)  # in fp64, with the loss
    clip = 8
    of_token = choices.attention_bytes if choices.attention_blocks else 0
    tokens = block_input_numel // shape.hidden_width
    ring_bytes = with_room(block_input_numel * shape.item_bytes, of_token, tokens)
    return {
        MemoryItem.BLOCK_SLOTS: slots,
        MemoryItem.OUTER_SLOTS: _outer_slot_bytes(shape, choices),
        MemoryItem.RESIDENT_BLOCKS: resident,
        MemoryItem.SETTLED_UNITS: settled,
        MemoryItem.GRADIENT_SUMS: sums + norms + clip,
        _staging(choices): _staging_bytes(shape, choices),
        MemoryItem.OPTIMIZER_STATES: _update_buffer_bytes(shape, choices),
        MemoryItem.BOUNDARY_RINGS: _rings(choices) * ring_bytes,
    }


def block_slot_bytes(shape: ModelShape, choices: PlanChoices) -> tuple[int, int]:
    """Returns the bytes of the slots that blocks share, and of those of resident blocks."""
    shape = shape.padded(choices.ranks)
    blocks, sizes = len(shape.blocks), shape.block_sizes
    first, stop = settled_blocks(blocks, choices), blocks - choices.resident_blocks
    slots = min(choices.slots, stop - first)
    shared = slots * sizes.slot_bytes(first, stop)
    return shared, sizes.resident_bytes(choices.resident_blocks)


def _fixed_notes(shape: ModelShape, choices: PlanChoices) -> dict[MemoryItem, str]:
    """Returns a description of each item of `fixed_bytes`."""
    resident = choices.resident_blocks
    streamed = len(shape.blocks) - resident - settled_blocks(len(shape.blocks), choices)
    return {
        MemoryItem.BLOCK_SLOTS: f"{min(choices.slots, streamed)} for the blocks that are streamed",
        MemoryItem.OUTER_SLOTS: (
            "beyond the parked gradient of embed" if choices.outer_in_parked else ""
        ),
        MemoryItem.RESIDENT_BLOCKS: f"the last {resident} blocks",
        MemoryItem.SETTLED_UNITS: f"weights and moments of {settled_in_words(shape, choices)}",
        MemoryItem.GRADIENT_SUMS: f"fp32: {_sums_in_words(shape, choices)}",
        _staging(choices): _staging_note(shape, choices),
        MemoryItem.OPTIMIZER_STATES: (
            f"pieces of {len(choices.device_homes)} units that are updated on the device, "
            f"{buffers_in_words(choices.update_buffers, choices.spare_buffers)}"
        ),
        MemoryItem.BOUNDARY_RINGS: f"{_rings(choices)} buffers for boundaries on the host",
    }


def _rings(choices: PlanChoices) -> int:
    """Returns the number of buffers that boundaries on the host pass through."""
    return 2 * choices.boundary_rings if choices.host_boundaries else 0


def _staging(choices: PlanChoices) -> MemoryItem:
    """Returns the item of rounded gradients."""
    is_parked = choices.gradients_in_sums or choices.parked_gradients
    return MemoryItem.PARKED_GRADIENTS if is_parked else MemoryItem.GRADIENT_STAGING


def _staging_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of rounded gradients. With several ranks the shape is padded, and a
    gradient that is rounded is a shard.
    """
    if choices.gradients_in_sums:
        return 0
    settled = choices.settled_units
    is_in_sums = choices.gradient_sum == GradientSum.DEVICE and shape.item_bytes == 2
    is_in_sums = is_in_sums and choices.world_size == 1
    waiting = 0 if is_in_sums else shape.first_gradients[settled]
    if choices.parked_gradients:
        numel = waiting + shape.gradient_numel - shape.first_gradients[settled]
        return numel // choices.ranks * shape.item_bytes
    blocks = settled_blocks(len(shape.blocks), choices)
    outer = max((unit.gradient_numel for unit in _streamed_outer(shape, choices)), default=0)
    numel = waiting + 2 * shape.block_sizes.largest_from(blocks) + outer
    return numel // choices.ranks * shape.item_bytes


def _staging_note(shape: ModelShape, choices: PlanChoices) -> str:
    if choices.gradients_in_sums:
        return "in the memory of their sums"
    if choices.parked_gradients:
        return "the rounded gradients of all units, until the clip factor is known"
    words = "rounded gradients on their way to the host"
    if choices.settled_units:
        words += f", and those of {settled_in_words(shape, choices)}"
    return words


def settled_in_words(shape: ModelShape, choices: PlanChoices) -> str:
    """Returns the units that live on the device, in words."""
    if choices.settled_units == len(shape.units):
        return "the whole model"
    count = settled_blocks(len(shape.blocks), choices)
    if count and choices.settled_apart:
        return f"embed and {count} of {len(shape.blocks)} blocks"
    if count == 1:
        return "embed and the first block"
    return f"embed and the first {count} blocks" if count else "embed"


def _outer_slot_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of the slots of embed and head, beyond those of a parked gradient."""
    embed, head, item = shape.embed, shape.head, shape.item_bytes
    if not choices.shared_outer_slot:
        return sum(_slot_bytes([unit], item) for unit in _streamed_outer(shape, choices))
    both = _slot_bytes([embed, head], item)
    return both - embed.gradient_numel * item if choices.outer_in_parked else both


def _streamed_outer(shape: ModelShape, choices: PlanChoices) -> list[UnitShape]:
    """Returns which of embed and head do not live on the device."""
    embed = [shape.embed] if choices.settled_units == 0 else []
    return embed if choices.settled_units == len(shape.units) else [*embed, shape.head]


def _slot_bytes(units: Sequence[UnitShape], item: int) -> int:
    """Returns the bytes of a slot that can hold each of `units`, of `item` bytes an element. The
    weights that stay in fp32 are kept beside the others.
    """
    numel = max((unit.weight_numel for unit in units), default=0)
    exact = max((unit.exact_numel for unit in units), default=0)
    return numel * item + exact * EXACT_ITEM_BYTES


def _sum_numel(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the number of elements of all fp32 sums. With several ranks the shape is padded."""
    outer = (shape.embed.gradient_numel, shape.head.gradient_numel)
    if choices.gradient_sum == GradientSum.DEVICE:
        return sum(outer) + shape.block_sizes.numel
    more, largest = shape.block_sizes.largest_sums(summed_apart(len(shape.blocks), choices))
    if shape.holds_embed:
        return sum(outer) + largest + more
    return (largest if choices.outer_in_parked else max(*outer, largest)) + more


def _shard_numel(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the number of elements of the shards of sums that each of several ranks keeps over
    the rounds. The shape is padded.
    """
    if choices.gradient_sum != GradientSum.SHARDS:
        return 0
    return shape.gradient_numel // choices.ranks


def _sums_in_words(shape: ModelShape, choices: PlanChoices) -> str:
    """Returns which fp32 sums there are at once, in words."""
    if choices.gradient_sum == GradientSum.DEVICE:
        return "every unit, summed over the rounds"
    more, _ = shape.block_sizes.largest_sums(summed_apart(len(shape.blocks), choices))
    if shape.holds_embed:
        return "embed, head and the largest block" + (", twice" if more else "")
    words = "one unit at a time" + (", two blocks together" if more else "")
    if choices.world_size > 1:
        words = "one unit at a time, and one that is added up over the GPUs"
    if choices.gradient_sum == GradientSum.SHARDS:
        words += "; a shard of every unit, summed over the rounds"
    if choices.outer_in_parked:
        return f"{words}; embed in pieces, the head among parked gradients"
    return words


def _update_buffer_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of update buffers beyond the memory that they share with other buffers."""
    if not choices.device_homes:
        return 0
    return arena_of(shape, choices).bytes - sum(shared_sum_bytes(shape, choices))


def arena_of(shape: ModelShape, choices: PlanChoices) -> Arena:
    """Returns where the plan's sums and update buffers are in the memory that they share."""
    own = choices.update_buffers - choices.spare_buffers
    size = update_buffer(shape, choices).bytes
    return lay_out_arena(shared_sum_bytes(shape, choices), size, own, choices)


def shared_sum_bytes(shape: ModelShape, choices: PlanChoices) -> Sequence[int]:
    """Returns the bytes of the fp32 sums that share their memory with update buffers: those of the
    blocks, the last one first, where the sums of all rounds stay on the device, and else all of
    them together. With several ranks they are those of each.
    """
    shape = shape.padded(choices.ranks)
    if choices.gradient_sum == GradientSum.DEVICE:
        sums = shape.block_sizes.sum_bytes
        return sums[: len(sums) - settled_blocks(len(sums), choices)]
    return [4 * _sum_numel(shape, choices)]


def gradient_ring_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of the host buffers that pieces of parked gradients pass through, for one
    rank. There are none where all optimizers run on the device.
    """
    settled = settled_of([unit.name for unit in shape.blocks], choices)
    elsewhere = {*settled, *choices.device_homes, *shape.frozen_units}
    if not choices.parked_gradients or len(elsewhere) == len(shape.units):
        return 0
    # Parked gradients of moments on the disk come in pieces as large as those of the moments.
    spilled = max((unit.numel for unit in spilled_units(shape, choices)), default=0)
    numel = max(ring_numel(shape, choices.ranks), min(SPILL_NUMEL, spilled))
    return GRADIENT_RINGS * numel * shape.item_bytes


def spilled_units(shape: ModelShape, choices: PlanChoices) -> tuple[UnitShape, ...]:
    """Returns the units whose moments are on the disk."""
    return shape.units[len(shape.units) - choices.spilled_units :]


def spilled_in_words(shape: ModelShape, choices: PlanChoices) -> str:
    """Returns the units whose moments are on the disk, in words."""
    if choices.spilled_units == len(shape.units):
        return "all units"
    count = choices.spilled_units - 1
    return f"the last {counted(count, 'block')} and the head" if count else "the head"


def state_rings_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of the host buffers that moments on the disk pass through."""
    units = spilled_units(shape, choices)
    size = state_ring_bytes([unit.moment_counts for unit in units], shape.optimizer)
    return min(STATE_RINGS, _spilled_pieces(units)) * size


def spilled_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the most bytes that moments take on the disk. A step reads and writes them once."""
    units = spilled_units(shape, choices)
    moments = len(MOMENTS) * shape.last_moment_bytes[choices.spilled_units]
    return moments + spill_padding(units) if units else 0


def spill_padding(units: Sequence[UnitShape]) -> int:
    """Returns the bytes that moments of these units take on the disk beyond their own: each piece
    of a moment is filled up to a whole page.
    """
    return len(MOMENTS) * PAGE * _spilled_pieces(units)


def _spilled_pieces(units: Sequence[UnitShape]) -> int:
    return sum(-(-unit.numel // SPILL_NUMEL) for unit in units)


def ring_numel(shape: ModelShape, ranks: int) -> int:
    """Returns the number of elements of a ring buffer of gradients: a small piece."""
    return shape.update_buffer(small_pieces(shape.largest_block), ranks).numel


def update_buffer(shape: ModelShape, choices: PlanChoices) -> UpdateBuffer:
    """Returns the buffer for a piece of the states of a unit that the device updates."""
    buffer = shape.update_buffer(choices.update_pieces, choices.ranks)
    return buffer.without_gradients if choices.parked_gradients else buffer


def state_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes that planes, parked gradients and what passes between host and disk take
    on the host. Planes are there once for all ranks of a host, as far as they are that host's.
    """
    planes = _planes_of_host(shape, choices)
    if choices.parked_gradients:
        del planes["grad"]
    rings = choices.ranks_of_host * gradient_ring_bytes(shape, choices)
    return sum(planes.values()) + rings + state_rings_bytes(shape, choices)


def _planes_of_host(shape: ModelShape, choices: PlanChoices) -> dict[str, int]:
    """Returns the bytes of each plane in the RAM of one host. Where planes are divided among hosts,
    the first one has a little more than that, since shards are multiples of `SHARD_ELEMENTS`.
    """
    planes = shape.plane_bytes(choices.settled_units, choices.spilled_units)
    return {plane: -(-size // choices.span) for plane, size in planes.items()}


def boundary_count(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the number of blocks that keep a boundary for each micro-batch."""
    blocks = len(shape.blocks)
    without = choices.kept_blocks + len(seconds_of_pairs(blocks, choices))
    return blocks - shape.forward_blocks - without


def host_boundary_bytes(shape: ModelShape, choices: PlanChoices, tokens: int) -> int:
    """Returns the bytes that boundaries on the host take of RAM, for one rank: one for each
    micro-batch and each block that keeps one there, some with what attention returned, and the
    buffers of those on the disk. tokens: the number of tokens in the largest micro-batch.
    """
    if not choices.host_boundaries:
        return 0
    stored = boundary_count(shape, choices) * choices.micro_batches - choices.spilled_boundaries
    boundary = _boundary_bytes(shape, tokens)
    more = with_room(boundary, choices.attention_bytes, tokens) - boundary
    in_ram = stored * boundary + choices.attention_blocks * choices.micro_batches * more
    return in_ram + disk_rings_bytes(shape, choices, tokens)


def disk_rings_bytes(shape: ModelShape, choices: PlanChoices, tokens: int) -> int:
    """Returns the bytes of the host buffers that boundaries on the disk pass through."""
    rings = min(DISK_RINGS, choices.spilled_boundaries)
    return rings * whole_pages(_boundary_bytes(shape, tokens))


def spilled_boundary_bytes(shape: ModelShape, choices: PlanChoices, tokens: int) -> int:
    """Returns the bytes of boundaries on the disk, which a step writes and reads once."""
    return choices.spilled_boundaries * whole_pages(_boundary_bytes(shape, tokens))


def _boundary_bytes(shape: ModelShape, tokens: int) -> int:
    """Returns the bytes of the input of a block, for a micro-batch of so many tokens."""
    return tokens * shape.hidden_width * shape.item_bytes


def plane_items(shape: ModelShape, choices: PlanChoices) -> list[Item]:
    """Returns the items of planes in RAM, and of the buffers for parked gradients and for moments
    on the disk.
    """
    items: list[Item] = []
    for plane, size in _planes_of_host(shape, choices).items():
        if plane == "grad" and choices.parked_gradients:
            ring = choices.ranks_of_host * gradient_ring_bytes(shape, choices)
            words = "parked gradients on their way to the optimizer"
            items.append(Item(MemoryItem.GRADIENT_RING, ring, words))
            continue
        if size:
            items.append(Item(MemoryItem(plane), size, _plane_note(shape, choices, plane, size)))
    rings = state_rings_bytes(shape, choices)
    if rings:
        words = "moments on the disk, while they are updated"
        items.append(Item(MemoryItem.STATES_RING, rings, words))
    return items


def _plane_note(shape: ModelShape, choices: PlanChoices, plane: str, size: int) -> str:
    """Returns a text on what a plane holds. The bytes a parameter of moments are those of its real
    `size`, since small parameters and embeddings may keep theirs more exactly.
    """
    is_moment = plane in MOMENTS
    kind = f", {KINDS[shape.optimizer]}" if is_moment else ""
    units = shape.units[choices.settled_units :]
    if is_moment:
        units = units[: len(units) - choices.spilled_units]
    is_high = plane == "weight_high"
    numel = sum(unit.numel for unit in units)
    if is_high:
        numel += sum(unit.frozen_numel for unit in units)
    text = f"{PLANE_NOTES[plane]}{kind}, {choices.span * size / numel:.3g} bytes a parameter"
    if shape.work_parameters is not None and not is_high:
        text += " that is trained"
    if choices.span > 1:
        text += f", divided among {choices.span} hosts"
    if choices.settled_units:
        text += f"; without {settled_in_words(shape, choices)}"
    if is_moment and choices.spilled_units:
        text += f"; those of {spilled_in_words(shape, choices)} are on the disk"
    return text
