"""The bytes of the planes and buffers that a plan keeps throughout a run, on the device and on the
host, are computed here, to the byte. Pure arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config.optimizers import OPTIMIZERS
from engine.planning.fit.memory_items import Item, MemoryItem
from engine.planning.layout.disk_chunks import DISK_CHUNK_NUMEL, PAGE, whole_pages
from engine.planning.layout.layout import FP32_ITEM_BYTES
from engine.planning.layout.update_buffers import UpdateBuffer, small_chunks
from engine.planning.schedule.arena import Arena, lay_out_arena
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.offloaded_activations import DISK_RINGS
from engine.planning.schedule.offloaded_updates import STATE_RINGS
from engine.planning.schedule.ops import MainGrad
from engine.planning.schedule.step_buffers import GRADIENT_RINGS
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.saved_attention_sizes import with_room
from engine.planning.shape.unit_shape import UnitShape
from engine.text import counted

PLANE_NOTES = {
    "weight_high": "weights",
    "weight_low": "rest of the fp32 weights",
    "grad": "gradients",
}
"""What the planes hold that every optimizer has."""


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

    block_input_numel: the number of elements in the hidden state of the largest micro-batch.
    """
    slots, resident = block_slot_bytes(shape, choices)
    gpu_resident = shape.states.gpu_resident_bytes_on(choices.sharding.ranks)[
        choices.placement.gpu_resident_units
    ]
    shape = shape.padded(choices.sharding.ranks)
    main_grads = 4 * (_main_grad_numel(shape, choices) + _shard_numel(shape, choices))
    norms = 8 * (len(shape.units) + 1)  # in fp64, with the loss
    clip = 8
    of_token = choices.activations.attention_bytes if choices.activations.attention_blocks else 0
    tokens = block_input_numel // shape.hidden_width
    ring_bytes = with_room(block_input_numel * shape.item_bytes, of_token, tokens)
    return {
        MemoryItem.BLOCK_SLOTS: slots,
        MemoryItem.EMBED_AND_HEAD_SLOTS: _embed_and_head_slot_bytes(shape, choices),
        MemoryItem.BLOCKS_KEPT_IN_SLOTS: resident,
        MemoryItem.GPU_RESIDENT_UNITS: gpu_resident,
        MemoryItem.MAIN_GRADS: main_grads + norms + clip,
        _staging(choices): _staging_bytes(shape, choices),
        MemoryItem.OPTIMIZER_STATES: _update_buffer_bytes(shape, choices),
        MemoryItem.BLOCK_INPUT_RINGS: _rings(choices) * ring_bytes,
    }


def block_slot_bytes(shape: ModelShape, choices: PlanChoices) -> tuple[int, int]:
    """Returns the bytes of the slots that blocks share, and of those of blocks kept in slots."""
    shape = shape.padded(choices.sharding.ranks)
    blocks, sizes = len(shape.blocks), shape.block_sizes
    placement = choices.placement
    first, stop = placement.gpu_resident_blocks(blocks), blocks - placement.blocks_kept_in_slots
    slots = min(choices.streaming.slots, stop - first)
    shared = slots * sizes.slot_bytes(first, stop)
    return shared, sizes.resident_bytes(placement.blocks_kept_in_slots)


def _fixed_notes(shape: ModelShape, choices: PlanChoices) -> dict[MemoryItem, str]:
    """Returns a description of each item of `fixed_bytes`."""
    placement, updates, blocks = choices.placement, choices.updates, len(shape.blocks)
    resident = placement.blocks_kept_in_slots
    streamed = blocks - resident - placement.gpu_resident_blocks(blocks)
    slots = min(choices.streaming.slots, streamed)
    return {
        MemoryItem.BLOCK_SLOTS: f"{slots} for the blocks that are streamed",
        MemoryItem.EMBED_AND_HEAD_SLOTS: (
            "beyond the kept gradient of embed"
            if choices.streaming.embed_and_head_in_kept_gradients
            else ""
        ),
        MemoryItem.BLOCKS_KEPT_IN_SLOTS: f"the last {resident} blocks",
        MemoryItem.GPU_RESIDENT_UNITS: (
            f"weights and moments of {gpu_resident_text(shape, choices)}"
        ),
        MemoryItem.MAIN_GRADS: f"fp32: {_main_grads_text(shape, choices)}",
        _staging(choices): _staging_note(shape, choices),
        MemoryItem.OPTIMIZER_STATES: (
            f"chunks of {len(updates.device_updated_units)} units that are updated on the device, "
            f"{updates.update_buffers} at a time"
        ),
        MemoryItem.BLOCK_INPUT_RINGS: f"{_rings(choices)} buffers for block inputs in RAM",
    }


def _rings(choices: PlanChoices) -> int:
    """Returns the number of buffers that block inputs on the host pass through."""
    activations = choices.activations
    return 2 * activations.block_input_rings if activations.offloaded_block_inputs else 0


def _staging(choices: PlanChoices) -> MemoryItem:
    """Returns the item of rounded gradients."""
    is_kept = choices.gradients.gradients_on_gpu
    return MemoryItem.KEPT_GRADIENTS if is_kept else MemoryItem.GRADIENT_STAGING


def _staging_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of rounded gradients. With several ranks the shape is padded, and a
    gradient that is rounded is a shard.
    """
    gpu_resident = choices.placement.gpu_resident_units
    is_in_main_grads = choices.gradients.main_grad == MainGrad.DEVICE and shape.item_bytes == 2
    is_in_main_grads = is_in_main_grads and choices.sharding.world_size == 1
    waiting = 0 if is_in_main_grads else shape.first_gradients[gpu_resident]
    if choices.gradients.gradients_on_gpu:
        numel = waiting + shape.gradient_numel - shape.first_gradients[gpu_resident]
        return numel // choices.sharding.ranks * shape.item_bytes
    blocks = choices.placement.gpu_resident_blocks(len(shape.blocks))
    embed_and_head = max(
        (unit.gradient_numel for unit in _streamed_embed_and_head(shape, choices)), default=0
    )
    numel = waiting + 2 * shape.block_sizes.largest_from(blocks) + embed_and_head
    return numel // choices.sharding.ranks * shape.item_bytes


def _staging_note(shape: ModelShape, choices: PlanChoices) -> str:
    if choices.gradients.gradients_on_gpu:
        return "the rounded gradients of all units, until the clip factor is known"
    words = "rounded gradients on their way to RAM"
    if choices.placement.gpu_resident_units:
        words += f", and those of {gpu_resident_text(shape, choices)}"
    return words


def gpu_resident_text(shape: ModelShape, choices: PlanChoices) -> str:
    """Returns the units that live on the device, in words."""
    if choices.placement.gpu_resident_units == len(shape.units):
        return "the whole model"
    count = choices.placement.gpu_resident_blocks(len(shape.blocks))
    if count and choices.placement.gpu_resident_apart:
        return f"embed and {count} of {len(shape.blocks)} blocks"
    if count == 1:
        return "embed and the first block"
    return f"embed and the first {count} blocks" if count else "embed"


def _embed_and_head_slot_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of the slots of embed and head, beyond those of a kept gradient."""
    embed, head, item = shape.embed, shape.head, shape.item_bytes
    if not choices.streaming.shared_embed_and_head_slot:
        return sum(_slot_bytes([unit], item) for unit in _streamed_embed_and_head(shape, choices))
    both = _slot_bytes([embed, head], item)
    in_kept_gradients = choices.streaming.embed_and_head_in_kept_gradients
    return both - embed.gradient_numel * item if in_kept_gradients else both


def _streamed_embed_and_head(shape: ModelShape, choices: PlanChoices) -> list[UnitShape]:
    """Returns which of embed and head do not live on the device."""
    resident = choices.placement.gpu_resident_units
    embed = [shape.embed] if resident == 0 else []
    return embed if resident == len(shape.units) else [*embed, shape.head]


def _slot_bytes(units: Sequence[UnitShape], item: int) -> int:
    """Returns the bytes of a slot that can hold each of `units`, of `item` bytes an element. The
    weights that stay in fp32 are kept beside the others.
    """
    numel = max((unit.weight_numel for unit in units), default=0)
    keep_in_fp32 = max((unit.fp32_numel for unit in units), default=0)
    return numel * item + keep_in_fp32 * FP32_ITEM_BYTES


def _main_grad_numel(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the number of elements of all fp32 accumulators. With several ranks the shape is
    padded.
    """
    embed_and_head = (shape.embed.gradient_numel, shape.head.gradient_numel)
    if choices.gradients.main_grad == MainGrad.DEVICE:
        return sum(embed_and_head) + shape.block_sizes.numel
    more, largest = shape.block_sizes.largest_main_grads(
        choices.blocks_with_second_main_grad(len(shape.blocks))
    )
    if shape.holds_embed:
        return sum(embed_and_head) + largest + more
    return (
        largest
        if choices.streaming.embed_and_head_in_kept_gradients
        else max(*embed_and_head, largest)
    ) + more


def _shard_numel(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the number of elements of the shards of accumulators that each of several ranks keeps
    over the rounds. The shape is padded.
    """
    if choices.gradients.main_grad != MainGrad.SHARDS:
        return 0
    return shape.gradient_numel // choices.sharding.ranks


def _main_grads_text(shape: ModelShape, choices: PlanChoices) -> str:
    """Returns which fp32 accumulators there are at once, in words."""
    if choices.gradients.main_grad == MainGrad.DEVICE:
        return "every unit, accumulated over the rounds"
    more, _ = shape.block_sizes.largest_main_grads(
        choices.blocks_with_second_main_grad(len(shape.blocks))
    )
    if shape.holds_embed:
        return "embed, head and the largest block" + (", twice" if more else "")
    words = "one unit at a time" + (", two blocks together" if more else "")
    if choices.sharding.world_size > 1:
        words = "one unit at a time, and one that is added up over the GPUs"
    if choices.gradients.main_grad == MainGrad.SHARDS:
        words += "; a shard of every unit, accumulated over the rounds"
    if choices.streaming.embed_and_head_in_kept_gradients:
        return f"{words}; embed in chunks, the head among kept gradients"
    return words


def _update_buffer_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of update buffers beyond the memory that they share with other buffers."""
    if not choices.updates.device_updated_units:
        return 0
    return arena_of(shape, choices).bytes - sum(shared_main_grad_bytes(shape, choices))


def arena_of(shape: ModelShape, choices: PlanChoices) -> Arena:
    """Returns where the plan's accumulators and update buffers are in the memory they share."""
    return lay_out_arena(
        shared_main_grad_bytes(shape, choices),
        update_buffer(shape, choices).bytes,
        choices.updates.update_buffers,
        choices.gradients.main_grad,
    )


def shared_main_grad_bytes(shape: ModelShape, choices: PlanChoices) -> Sequence[int]:
    """Returns the bytes of the fp32 accumulators that share their memory with update buffers: those
    of the blocks, the last one first, where the accumulators of all rounds stay on the device, and
    else all of them together. With several ranks they are those of each.
    """
    shape = shape.padded(choices.sharding.ranks)
    if choices.gradients.main_grad == MainGrad.DEVICE:
        main_grads = shape.block_sizes.main_grad_bytes
        return main_grads[
            : len(main_grads) - choices.placement.gpu_resident_blocks(len(main_grads))
        ]
    return [4 * _main_grad_numel(shape, choices)]


def gradient_ring_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of the host buffers that chunks of kept gradients pass through, for one
    rank. There are none where all optimizers run on the device.
    """
    if not choices.gradients.gradients_on_gpu:
        return 0
    gpu_resident = choices.placement.gpu_resident([unit.name for unit in shape.blocks])
    elsewhere = {*gpu_resident, *choices.updates.device_updated_units, *shape.frozen_units}
    if len(elsewhere) == len(shape.units):
        return 0
    # Kept gradients of moments on the disk come in chunks as large as those of the moments.
    offloaded_to_disk = max(
        (unit.numel for unit in disk_offloaded_units(shape, choices)), default=0
    )
    numel = max(ring_numel(shape, choices.sharding.ranks), min(DISK_CHUNK_NUMEL, offloaded_to_disk))
    return GRADIENT_RINGS * numel * shape.item_bytes


def disk_offloaded_units(shape: ModelShape, choices: PlanChoices) -> tuple[UnitShape, ...]:
    """Returns the units whose moments are on the disk."""
    return shape.units[len(shape.units) - choices.placement.disk_offloaded_units :]


def disk_offloaded_text(shape: ModelShape, choices: PlanChoices) -> str:
    """Returns the units whose moments are on the disk, in words."""
    if choices.placement.disk_offloaded_units == len(shape.units):
        return "all units"
    count = choices.placement.disk_offloaded_units - 1
    return f"the last {counted(count, 'block')} and the head" if count else "the head"


def state_rings_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes of the host buffers that moments on the disk pass through."""
    count = choices.placement.disk_offloaded_units
    rings = min(STATE_RINGS, shape.states.last_disk_chunks[count])
    return rings * shape.states.last_state_ring_bytes[count]


def disk_offloaded_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the most bytes that moments take on the disk. A step reads and writes them once."""
    count = choices.placement.disk_offloaded_units
    states = sum(sizes[count] for sizes in shape.states.last_state_bytes.values())
    return states + disk_padding(shape, shape.states.last_disk_chunks[count])


def disk_padding(shape: ModelShape, chunks: int) -> int:
    """Returns the bytes that so many chunks of states take on the disk beyond their own: each chunk
    of a state is filled up to a whole page.
    """
    return len(OPTIMIZERS[shape.optimizer].states) * PAGE * chunks


def ring_numel(shape: ModelShape, ranks: int) -> int:
    """Returns the number of elements of a ring buffer of gradients: a small chunk."""
    return shape.update_buffer(small_chunks(shape.largest_block), ranks).numel


def update_buffer(shape: ModelShape, choices: PlanChoices) -> UpdateBuffer:
    """Returns the buffer for a chunk of the states of a unit that the device updates."""
    buffer = shape.update_buffer(choices.updates.update_chunks, choices.sharding.ranks)
    return buffer.without_gradients if choices.gradients.gradients_on_gpu else buffer


def state_bytes(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes that planes, kept gradients and what passes between host and disk take
    on the host. Planes are there once for all ranks of a node, as far as they are that host's.
    """
    planes = _planes_of_node(shape, choices)
    if choices.gradients.gradients_on_gpu:
        del planes["grad"]
    rings = choices.sharding.ranks_per_node * gradient_ring_bytes(shape, choices)
    rings += state_rings_bytes(shape, choices)
    return sum(planes.values()) + rings


def host_matrix_bytes(shape: ModelShape, device: str) -> int:
    """Returns the bytes of RAM in which the host updates a matrix; 0 where only the device does.

    They are what the update was made of, in bf16, with the larger of two: the matrix in fp32 and
    its transposed copy, or the matrix, the update in bf16 and two square products. What runs
    element by element has temporaries besides.
    """
    if shape.device_only(device):
        return 0
    sizes = (
        max(10 * small * large, 8 * small * large + 8 * small**2) + 36 * min(small * large, 1 << 22)
        for small, large in shape.orthogonalized_sides
    )
    return max(sizes, default=0)


def device_matrix_bytes(shape: ModelShape) -> int:
    """Returns the bytes of memory of the device in which it updates a matrix: what the update was
    made of, the matrix before and after an iteration, and two square products, all in bf16.
    """
    sizes = (6 * small * large + 4 * small**2 for small, large in shape.orthogonalized_sides)
    return max(sizes, default=0)


def _planes_of_node(shape: ModelShape, choices: PlanChoices) -> dict[str, int]:
    """Returns the bytes of each plane in the RAM of one node. Where planes are divided among nodes,
    the first one has a little more than that, since shards are multiples of `SHARD_ELEMENTS`.
    """
    planes = shape.states.plane_bytes(
        choices.placement.gpu_resident_units, choices.placement.disk_offloaded_units
    )
    return {plane: -(-size // choices.sharding.nodes_per_replica) for plane, size in planes.items()}


def saved_input_count(shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the number of blocks that keep their input for each micro-batch."""
    blocks = len(shape.blocks)
    activations = choices.activations
    seconds = len(activations.seconds_of_pairs(blocks))
    return blocks - shape.forward_blocks - activations.blocks_without_recompute - seconds


def offloaded_input_bytes(shape: ModelShape, choices: PlanChoices, tokens: int) -> int:
    """Returns the bytes that block inputs on the host take of RAM, for one rank: one for each
    micro-batch and each block that keeps one there, some with what attention returned, and the
    buffers of those on the disk. tokens: the number of tokens in the largest micro-batch.
    """
    activations, micro_batches = choices.activations, choices.batching.micro_batches
    if not activations.offloaded_block_inputs:
        return 0
    stored = saved_input_count(shape, choices) * micro_batches
    stored -= activations.disk_offloaded_block_inputs
    block_input = _block_input_bytes(shape, tokens)
    more = with_room(block_input, activations.attention_bytes, tokens) - block_input
    in_ram = stored * block_input + activations.attention_blocks * micro_batches * more
    return in_ram + disk_rings_bytes(shape, choices, tokens)


def disk_rings_bytes(shape: ModelShape, choices: PlanChoices, tokens: int) -> int:
    """Returns the bytes of the host buffers that block inputs on the disk pass through."""
    rings = min(DISK_RINGS, choices.activations.disk_offloaded_block_inputs)
    return rings * whole_pages(_block_input_bytes(shape, tokens))


def disk_offloaded_input_bytes(shape: ModelShape, choices: PlanChoices, tokens: int) -> int:
    """Returns the bytes of block inputs on the disk, which a step writes and reads once."""
    return choices.activations.disk_offloaded_block_inputs * whole_pages(
        _block_input_bytes(shape, tokens)
    )


def _block_input_bytes(shape: ModelShape, tokens: int) -> int:
    """Returns the bytes of the input of a block, for a micro-batch of `tokens` tokens."""
    return tokens * shape.hidden_width * shape.item_bytes


def plane_items(shape: ModelShape, choices: PlanChoices) -> list[Item]:
    """Returns the items of planes in RAM, and of the buffers for kept gradients and for moments
    on the disk.
    """
    items: list[Item] = []
    for plane, size in _planes_of_node(shape, choices).items():
        if plane == "grad" and choices.gradients.gradients_on_gpu:
            ring = choices.sharding.ranks_per_node * gradient_ring_bytes(shape, choices)
            words = "kept gradients on their way to the optimizer"
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
    """Returns a text on what a plane holds. The bytes a parameter of states are those of its real
    `size`, since small parameters and embeddings may keep theirs more exactly.
    """
    optimizer = OPTIMIZERS[shape.optimizer]
    of_states = {each.name: f"{each.words}, {optimizer.format}" for each in optimizer.states}
    notes = PLANE_NOTES | of_states
    is_state = plane in optimizer.planes
    units = shape.units[choices.placement.gpu_resident_units :]
    if is_state:
        units = units[: len(units) - choices.placement.disk_offloaded_units]
    is_high = plane == "weight_high"
    numel = sum(unit.numel for unit in units)
    if is_high:
        numel += sum(unit.frozen_numel for unit in units)
    parameter_bytes = choices.sharding.nodes_per_replica * size / numel
    what = notes[plane]
    if is_high:
        what += f", {'bf16' if shape.dtype == 'bfloat16' else 'fp32'}"
    text = f"{what}, {parameter_bytes:.3g} bytes a parameter"
    if shape.work_parameters is not None and not is_high:
        text += " that is trained"
    if choices.sharding.nodes_per_replica > 1:
        text += f", divided among {choices.sharding.nodes_per_replica} nodes"
    if choices.placement.gpu_resident_units:
        text += f"; without {gpu_resident_text(shape, choices)}"
    if is_state and choices.placement.disk_offloaded_units:
        text += f"; those of {disk_offloaded_text(shape, choices)} are on the disk"
    return text
