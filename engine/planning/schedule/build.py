"""The plan of one step is built here, from the units and from choices. This file runs no op and
makes no choices; `engine.planning.fit.choose` makes them. No torch.

Three passes turn a step into ops:

1. `assign_slots` assigns a slot to every use of a block, and decides when the slot must be filled.
2. `write_ops` puts the ops into program order; `unit_ops` says what each reads and writes:
   - Every round goes forward through embed, the blocks and the loss, and backward again.
   - Each prefetch comes as early as its slot and the prefetch depth allow.
   - After a unit's backward its gradient is rounded and sent to the host.
   - After the last round come the summary, the clip factor and the updates. `device_updates` writes
     the ops of optimizers that run on the device, `offloaded_updates` those of moments on the disk.
   - `offloaded_activations` writes the ops of block inputs on the disk.
3. `derive_waits` finds, from what the ops read and write, which op must wait for which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.planning.schedule.buffers import EMBED, HEAD
from engine.planning.schedule.choices import (
    PlanChoices,
    PlaneSizes,
    blocks_with_attention,
    blocks_with_saved_input,
    gpu_resident_blocks,
    gpu_resident_of,
    has_one_term,
)
from engine.planning.schedule.derive_waits import with_waits
from engine.planning.schedule.device_updates import DeviceUpdates
from engine.planning.schedule.ops import MainGrad
from engine.planning.schedule.rounds import TrainedUnits
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.write_ops import StepEnd, StepWriter


def build_step_plan(
    blocks: list[str],
    tied: bool,
    choices: PlanChoices,
    sizes: PlaneSizes | None = None,
    updates: bool = True,
) -> StepPlan:
    """Returns the plan of one training step over `blocks` (unit names in forward order) between the
    embed and head units.

    tied: the head or blocks also use the embed unit's weights, so the embed slot is held and the
    embed gradient is accumulated all step. sizes: needed where an optimizer runs on the device.
    updates: False for a dry run, the same step up to its summary, in which no op writes weights or
    moments. Raises ValueError for choices that contradict each other.
    """
    _refuse_contradictions(blocks, tied, choices, sizes)
    if choices.embed_and_head_in_kept_gradients:
        _refuse_wrong_embed_and_head(choices, sizes)
    end = StepEnd.UPDATES if updates else StepEnd.SUMMARY
    writer = StepWriter(blocks, tied, choices, sizes or PlaneSizes({}), end)
    buffers, device = writer.buffers, writer.device
    kept_gradients_numel = writer.disk_offloaded.numel if choices.gradients_on_gpu else 0
    return StepPlan(
        ops=with_waits(writer.write()),
        slots=buffers.slot_units(),
        grads=buffers.grad_units(),
        stagings=buffers.staging_units(),
        rings=buffers.rings(),
        shards=writer.shards,
        replicas=choices.replicas,
        nodes_per_replica=choices.nodes_per_replica,
        gradient_rings=buffers.gradient_rings(),
        graphs=choices.micro_batches // choices.rounds if choices.graphs else 0,
        state_rings=writer.disk_offloaded.rings(),
        disk_chunk_numel=writer.disk_offloaded.numel,
        disk_rings=writer.on_disk.rings,
        compiled=choices.compiled,
        tile_tokens=choices.tile_tokens,
        with_attention=blocks_with_attention(buffers.trained.blocks_back, choices),
        attention_bytes=choices.attention_bytes if choices.attention_blocks else 0,
        device_updated_units=choices.device_updated_units,
        placed=device.placed_units(),
        gpu_resident=buffers.gpu_resident_slots(),
        update_buffers=tuple(device.buffers),
        spare_buffers=tuple(device.spare),
        chunk_numel=device.chunk_numel,
        ring_numel=max(device.ring_numel, kept_gradients_numel),
        **_of_arena(device),
        without_main_grad=_without_main_grad(buffers.trained.blocks_back, choices, sizes),
        rounded_in_main_grads=buffers.rounded_in_main_grads,
        embed_and_head_in_kept_gradients=choices.embed_and_head_in_kept_gradients,
        embed_chunk=sizes.embed_chunk if sizes else 0,
        frozen=buffers.trained.frozen,
        forward_only=buffers.trained.forward_only,
    )


def build_forward_plan(
    blocks: list[str], tied: bool, choices: PlanChoices, held: bool = False, rank: int = 0
) -> StepPlan:
    """Returns the plan of a pass without gradients, for evaluation and sampling. The pass ends with
    its `loss` ops.

    Of the choices, only the ranks, the micro-batches, the rounds, the slots, the prefetch depth,
    the blocks kept in slots, the GPU-resident units, the compiled kernels and the sequence chunks
    should differ from their defaults. The rounds need not divide the micro-batches. held: an
    earlier pass on the same weights has left every unit with a slot of its own in that slot, so
    these units are not fetched again.
    """
    end = StepEnd.LOSS_AGAIN if held else StepEnd.LOSS
    writer = StepWriter(blocks, tied, choices, PlaneSizes({}, rank=rank), end)
    return StepPlan(
        ops=with_waits(writer.write()),
        slots=writer.buffers.slot_units(),
        shards=writer.shards,
        compiled=choices.compiled,
        tile_tokens=choices.tile_tokens,
        gpu_resident=writer.gpu_resident,
        held=writer.held,
    )


def _without_main_grad(
    blocks: Sequence[str], choices: PlanChoices, sizes: PlaneSizes | None
) -> tuple[str, ...]:
    """Returns the blocks whose gradients ranks exchange in bf16, of those that have a backward."""
    if (
        sizes is None
        or sizes.item_bytes != 2
        or sizes.has_fp32_weights
        or not has_one_term(choices)
    ):
        return ()
    return tuple(block for block in blocks if block not in sizes.frozen)


def _of_arena(device: DeviceUpdates) -> dict[str, Any]:
    """Returns the fields of a plan that say where accumulators and update buffers are."""
    arena = device.arena
    if arena is None:
        return {}
    return {
        "arena": tuple(zip(device.main_grads, arena.starts)),
        "buffer_places": arena.places,
        "arena_bytes": arena.bytes,
    }


ONE_RANK_ONLY = (
    "disk_offloaded_units",
    "disk_offloaded_block_inputs",
    "gradients_in_main_grads",
    "embed_and_head_in_kept_gradients",
    "spare_buffers",
    "graphs",
)
"""Choices that no plan for several ranks makes."""


def _refuse_contradictions(
    blocks: list[str], tied: bool, choices: PlanChoices, sizes: PlaneSizes | None
) -> None:
    micro_batches, rounds = choices.micro_batches, choices.rounds
    if micro_batches % rounds:
        raise ValueError(f"{rounds} rounds do not divide {micro_batches} micro-batches")
    if (choices.main_grad == MainGrad.VERTICAL) != (rounds == 1):
        raise ValueError("main_grad is 'vertical' exactly when there is one round")
    if tied and choices.shared_embed_and_head_slot:
        raise ValueError("embed and head of a tied model cannot share a slot")
    if choices.gradients_on_gpu and choices.main_grad == MainGrad.HOST:
        raise ValueError("kept gradients cannot be accumulated on the host")
    in_main_grads = choices.gradients_on_gpu and choices.main_grad == MainGrad.DEVICE
    if choices.gradients_in_main_grads and not in_main_grads:
        raise ValueError(
            "only kept gradients can be in main_grads, and only in those of all rounds"
        )
    if choices.blocks_without_recompute > len(blocks):
        raise ValueError(
            f"{choices.blocks_without_recompute} of {len(blocks)} blocks cannot keep their "
            "activations"
        )
    if choices.blocks_per_saved_input not in (1, 2):
        raise ValueError(f"no input is kept for {choices.blocks_per_saved_input} blocks together")
    if choices.blocks_per_saved_input == 2 and choices.slots < 2:
        raise ValueError("two blocks that are recomputed together need two slots")
    device_updated = choices.device_updated_units
    unknown = set(device_updated) - {EMBED, *blocks, HEAD}
    if unknown or (device_updated and choices.update_buffers < 1):
        raise ValueError(f"{choices.update_buffers} buffers for the optimizers of {device_updated}")
    _refuse_wrong_moments(choices)
    _refuse_wrong_ranks(choices, sizes)
    trained = TrainedUnits(blocks, sizes.frozen if sizes is not None else ())
    if trained.frozen:
        _refuse_wrong_frozen(blocks, choices, trained)
    _refuse_wrong_spares(choices)
    _refuse_wrong_gpu_residents(blocks, choices)
    _refuse_wrong_disk_offload(blocks, choices, trained)
    if choices.attention_blocks:
        _refuse_wrong_attention(choices, trained)


def _refuse_wrong_ranks(choices: PlanChoices, sizes: PlaneSizes | None) -> None:
    """Raises ValueError where several ranks cannot compute a step with these choices."""
    if choices.ranks == 1 and choices.unsharded_reads:
        raise ValueError("one rank of a node reads whole units anyway")
    if choices.ranks % choices.nodes_per_replica:
        raise ValueError(
            f"{choices.nodes_per_replica} nodes have unequal shares of {choices.ranks} ranks"
        )
    if choices.nodes_per_replica > 1 and choices.unsharded_reads:
        raise ValueError("no node has whole units where planes are divided among nodes")
    rank = sizes.rank if sizes is not None else 0
    if not 0 <= rank < choices.ranks or (sizes is None and choices.ranks > 1):
        raise ValueError(f"the plan is of none of {choices.ranks} ranks")
    if choices.world_size == 1:
        if choices.main_grad == MainGrad.SHARDS:
            raise ValueError("only several ranks keep shards of gradient accumulators")
        return
    for name in ONE_RANK_ONLY:
        if getattr(choices, name):
            raise ValueError(f"{name} is for one rank, not for {choices.world_size}")
    if choices.main_grad == MainGrad.HOST or choices.blocks_per_saved_input > 1:
        raise ValueError("accumulators on the host and pairs of blocks are for one rank")


def _refuse_wrong_moments(choices: PlanChoices) -> None:
    """Raises ValueError where moments cannot be updated after the weights of all units."""
    if choices.moments_after_weights and (choices.gradients_on_gpu or choices.disk_offloaded_units):
        raise ValueError(
            "moments are updated after all weights only where they and the gradients are in RAM"
        )


def _refuse_wrong_frozen(blocks: list[str], choices: PlanChoices, trained: TrainedUnits) -> None:
    """Raises ValueError where choices need a gradient or a backward that units do not have."""
    if choices.embed_and_head_in_kept_gradients or choices.blocks_per_saved_input > 1:
        raise ValueError(
            "pairs of blocks, and embed and head among kept gradients, are for models that are "
            "trained whole"
        )
    if not set(trained.frozen) < {EMBED, *blocks, HEAD}:
        raise ValueError("nothing is trained")
    if set(choices.device_updated_units) & set(trained.frozen):
        raise ValueError(f"some of {trained.frozen} have no optimizer")
    if choices.blocks_without_recompute > len(trained.blocks_back):
        raise ValueError(
            f"{choices.blocks_without_recompute} blocks keep activations, and "
            f"{len(trained.blocks_back)} have a "
            "backward"
        )
    if choices.graphs and not set(trained.forward_only) <= {EMBED}:
        raise ValueError("blocks are recorded only where all of them have a backward")


def _refuse_wrong_disk_offload(
    blocks: list[str], choices: PlanChoices, trained: TrainedUnits
) -> None:
    """Raises ValueError where these moments and block inputs cannot be on the disk."""
    units = 2 + len(blocks)
    if not 0 <= choices.disk_offloaded_units <= units - choices.gpu_resident_units:
        raise ValueError(
            f"the moments of {choices.disk_offloaded_units} units cannot be on the disk where "
            f"{choices.gpu_resident_units} of {units} live on the device"
        )
    if choices.disk_offloaded_units and choices.gpu_resident_apart:
        raise ValueError("moments on the disk are the last ones, and some of these may live apart")
    if choices.disk_offloaded_units and choices.device_updated_units:
        raise ValueError("moments on the disk cannot be streamed to the device")
    kept = choices.micro_batches * len(blocks_with_saved_input(len(trained.blocks_back), choices))
    disk_offloaded = choices.disk_offloaded_block_inputs
    if not 0 <= disk_offloaded <= kept:
        raise ValueError(
            f"{disk_offloaded} block inputs cannot be on the disk where a step keeps {kept}"
        )
    if disk_offloaded and not choices.offloaded_block_inputs:
        raise ValueError("block inputs go to the disk from the host, and they are on the device")


def _refuse_wrong_attention(choices: PlanChoices, trained: TrainedUnits) -> None:
    """Raises ValueError where blocks cannot keep what attention returned."""
    most = len(trained.blocks_back) - choices.blocks_without_recompute
    if not 0 <= choices.attention_blocks <= most:
        raise ValueError(f"{choices.attention_blocks} of {most} blocks cannot keep attention")
    waits_in_ram = choices.offloaded_block_inputs and not choices.disk_offloaded_block_inputs
    if not (waits_in_ram and choices.tile_tokens and choices.attention_bytes > 0):
        raise ValueError(
            "attention is kept beside block inputs in RAM, of blocks with sequence tiling"
        )
    if choices.blocks_per_saved_input > 1:
        raise ValueError("attention is kept of blocks that each keep their input, not of pairs")


def _refuse_wrong_gpu_residents(blocks: list[str], choices: PlanChoices) -> None:
    """Raises ValueError where units cannot live on the device beside the other choices."""
    gpu_resident = gpu_resident_of(blocks, choices)
    is_whole = gpu_resident_blocks(len(blocks), choices) == len(blocks)
    if choices.graphs and (choices.offloaded_block_inputs or not is_whole):
        raise ValueError("blocks are recorded only where all of them live on the device")
    if not gpu_resident:
        return
    if gpu_resident_blocks(len(blocks), choices) + choices.blocks_kept_in_slots > len(blocks):
        raise ValueError(
            f"{choices.blocks_kept_in_slots} blocks kept in slots are among {gpu_resident}"
        )
    if set(gpu_resident) & set(choices.device_updated_units):
        raise ValueError(f"the states of some of {gpu_resident} are streamed to the device")
    if choices.shared_embed_and_head_slot or choices.main_grad == MainGrad.HOST:
        raise ValueError(
            "units cannot live on the device where embed and head share a slot or gradients are "
            "accumulated on the host"
        )


def _refuse_wrong_embed_and_head(choices: PlanChoices, sizes: PlaneSizes | None) -> None:
    """Raises ValueError where embed and head cannot use the memory of kept gradients."""
    keeps_gradients = choices.gradients_on_gpu and choices.shared_embed_and_head_slot
    if not keeps_gradients or choices.main_grad != MainGrad.VERTICAL:
        raise ValueError(
            "embed and head use the memory of gradients that are kept in one round, and share a "
            "slot"
        )
    if sizes is None or not sizes.embed_chunk:
        raise ValueError("the gradient of embed has no chunks")


def _refuse_wrong_spares(choices: PlanChoices) -> None:
    """Raises ValueError unless some but not all update buffers are spare, and some of the kept
    blocks leave them the memory of their activations.
    """
    spare, spare_blocks = choices.spare_buffers, choices.spare_blocks
    if not (spare or spare_blocks):
        return
    buffers, kept = choices.update_buffers, choices.blocks_without_recompute
    if not (choices.device_updated_units and 0 < spare < buffers and 0 < spare_blocks <= kept):
        raise ValueError(
            f"{spare} of {buffers} buffers in the place of {spare_blocks} blocks of {kept}"
        )
