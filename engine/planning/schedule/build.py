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
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.derive_waits import with_waits, without_waits
from engine.planning.schedule.device_updates import DeviceUpdates
from engine.planning.schedule.rounds import TrainedUnits
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.write_ops import StepEnd, StepWriter


def build_step_plan(
    blocks: list[str],
    tied: bool,
    choices: PlanChoices,
    sizes: PlaneSizes | None = None,
    updates: bool = True,
    waits: bool = True,
) -> StepPlan:
    """Returns the plan of one training step over `blocks` (unit names in forward order) between the
    embed and head units.

    tied: the head or blocks also use the embed unit's weights, so the embed slot is held and the
    embed gradient is accumulated all step. sizes: needed where an optimizer runs on the device.
    updates: False for a dry run, the same step up to its summary, in which no op writes weights or
    moments. waits: False for a plan that is only simulated (`without_waits`). Raises ValueError for
    choices that contradict each other.
    """
    choices.check()
    _refuse_other_units(blocks, tied, choices, sizes)
    end = StepEnd.UPDATES if updates else StepEnd.SUMMARY
    writer = StepWriter(blocks, tied, choices, sizes or PlaneSizes(numel={}), end)
    buffers, device = writer.buffers, writer.device
    kept_gradients_numel = writer.disk_offloaded.numel if choices.gradients.gradients_on_gpu else 0
    return StepPlan(
        ops=with_waits(writer.write()) if waits else without_waits(writer.write()),
        slots=buffers.slot_units(),
        grads=buffers.grad_units(),
        stagings=buffers.staging_units(),
        rings=buffers.rings(),
        shards=writer.shards,
        replicas=choices.sharding.replicas,
        nodes_per_replica=choices.sharding.nodes_per_replica,
        gradient_rings=buffers.gradient_rings(),
        graphs=choices.batching.micro_batches_per_round if choices.kernels.graphs else 0,
        state_rings=writer.disk_offloaded.rings(),
        disk_chunk_numel=writer.disk_offloaded.numel,
        disk_rings=writer.on_disk.rings,
        compiled=choices.kernels.compiled,
        tile_tokens=choices.kernels.tile_tokens,
        with_attention=choices.activations.blocks_with_attention(buffers.trained.blocks_back),
        attention_bytes=choices.activations.attention_bytes
        if choices.activations.attention_blocks
        else 0,
        device_updated_units=choices.updates.device_updated_units,
        placed=device.placed_units(),
        gpu_resident=buffers.gpu_resident_slots(),
        update_buffers=tuple(device.buffers),
        chunk_numel=device.chunk_numel,
        ring_numel=max(device.ring_numel, kept_gradients_numel),
        **_of_arena(device),
        without_main_grad=_without_main_grad(buffers.trained.blocks_back, choices, sizes),
        rounded_in_main_grads=buffers.rounded_in_main_grads,
        embed_and_head_in_kept_gradients=choices.streaming.embed_and_head_in_kept_gradients,
        embed_chunk=sizes.embed_chunk if sizes else 0,
        frozen=buffers.trained.frozen,
        forward_only=buffers.trained.forward_only,
    )


def build_forward_plan(
    blocks: list[str], tied: bool, choices: PlanChoices, held: bool = False, rank: int = 0
) -> StepPlan:
    """Returns the plan of a pass without gradients, for evaluation and sampling. The pass ends with
    its `loss` ops.

    choices: those of `PlanChoices.of_forward_passes`, with micro-batches, rounds and compiled
    kernels of its own. The rounds need not divide the micro-batches. held: an
    earlier pass on the same weights has left every unit with a slot of its own in that slot, so
    these units are not fetched again.
    """
    end = StepEnd.LOSS_AGAIN if held else StepEnd.LOSS
    writer = StepWriter(blocks, tied, choices, PlaneSizes(numel={}, rank=rank), end)
    return StepPlan(
        ops=with_waits(writer.write()),
        slots=writer.buffers.slot_units(),
        shards=writer.shards,
        compiled=choices.kernels.compiled,
        tile_tokens=choices.kernels.tile_tokens,
        gpu_resident=writer.gpu_resident,
        held=writer.held,
    )


def _without_main_grad(
    blocks: Sequence[str], choices: PlanChoices, sizes: PlaneSizes | None
) -> tuple[str, ...]:
    """Returns the blocks whose gradients ranks exchange in bf16, of those that have a backward."""
    if sizes is None or sizes.item_bytes != 2 or sizes.has_fp32_weights or not choices.has_one_term:
        return ()
    return tuple(block for block in blocks if block not in sizes.frozen)


def _of_arena(device: DeviceUpdates) -> dict[str, Any]:
    """Returns the fields of a plan that say where accumulators and update buffers are."""
    arena = device.arena
    if arena is None:
        return {}
    return {
        "arena": tuple(zip(device.main_grads, arena.starts)),
        "arena_bytes": arena.bytes,
    }


def _refuse_other_units(
    blocks: list[str], tied: bool, choices: PlanChoices, sizes: PlaneSizes | None
) -> None:
    """Raises ValueError for choices that these units do not allow."""
    streaming, updates = choices.streaming, choices.updates
    if tied and streaming.shared_embed_and_head_slot:
        raise ValueError("embed and head of a tied model cannot share a slot")
    if streaming.embed_and_head_in_kept_gradients and not (sizes and sizes.embed_chunk):
        raise ValueError("the gradient of embed has no chunks")
    kept = choices.activations.blocks_without_recompute
    if kept > len(blocks):
        raise ValueError(f"{kept} of {len(blocks)} blocks cannot keep their activations")
    unknown = set(updates.device_updated_units) - {EMBED, *blocks, HEAD}
    if unknown:
        raise ValueError(f"there are no buffers for the optimizers of {unknown}")
    ranks, rank = choices.sharding.ranks, sizes.rank if sizes is not None else 0
    if not 0 <= rank < ranks or (sizes is None and ranks > 1):
        raise ValueError(f"the plan is of none of {ranks} ranks")
    trained = TrainedUnits(blocks, sizes.frozen if sizes is not None else ())
    if trained.frozen:
        _refuse_wrong_frozen(blocks, choices, trained)
    _refuse_wrong_placement(blocks, choices)
    _refuse_wrong_activations(choices, trained)


def _refuse_wrong_frozen(blocks: list[str], choices: PlanChoices, trained: TrainedUnits) -> None:
    """Raises ValueError where choices need a gradient or a backward that units do not have."""
    if (
        choices.streaming.embed_and_head_in_kept_gradients
        or choices.activations.blocks_per_saved_input > 1
    ):
        raise ValueError(
            "pairs of blocks, and embed and head among kept gradients, are for models that are "
            "trained whole"
        )
    if not set(trained.frozen) < {EMBED, *blocks, HEAD}:
        raise ValueError("nothing is trained")
    if set(choices.updates.device_updated_units) & set(trained.frozen):
        raise ValueError(f"some of {trained.frozen} have no optimizer")
    if choices.activations.blocks_without_recompute > len(trained.blocks_back):
        raise ValueError(
            f"{choices.activations.blocks_without_recompute} blocks keep activations, and "
            f"{len(trained.blocks_back)} have a "
            "backward"
        )
    if choices.kernels.graphs and not set(trained.forward_only) <= {EMBED}:
        raise ValueError("blocks are recorded only where all of them have a backward")


def _refuse_wrong_placement(blocks: list[str], choices: PlanChoices) -> None:
    """Raises ValueError where units cannot live on the device, or have their moments on the disk,
    beside the other choices.
    """
    placement = choices.placement
    gpu_resident = placement.gpu_resident(blocks)
    resident_blocks = placement.gpu_resident_blocks(len(blocks))
    if choices.kernels.graphs and resident_blocks < len(blocks):
        raise ValueError("blocks are recorded only where all of them live on the device")
    kept = placement.blocks_kept_in_slots
    if gpu_resident and resident_blocks + kept > len(blocks):
        raise ValueError(f"{kept} blocks kept in slots are among {gpu_resident}")
    if set(gpu_resident) & set(choices.updates.device_updated_units):
        raise ValueError(f"the states of some of {gpu_resident} are streamed to the device")
    units, resident = 2 + len(blocks), placement.gpu_resident_units
    if not 0 <= placement.disk_offloaded_units <= units - resident:
        raise ValueError(
            f"the moments of {placement.disk_offloaded_units} units cannot be on the disk where "
            f"{resident} of {units} live on the device"
        )


def _refuse_wrong_activations(choices: PlanChoices, trained: TrainedUnits) -> None:
    """Raises ValueError where more is kept of blocks than they have for a backward."""
    activations, back = choices.activations, len(trained.blocks_back)
    on_disk = activations.disk_offloaded_block_inputs
    kept = choices.batching.micro_batches * len(activations.blocks_with_saved_input(back))
    if not 0 <= on_disk <= kept:
        raise ValueError(f"{on_disk} block inputs cannot be on the disk where a step keeps {kept}")
    recomputed = back - activations.blocks_without_recompute
    if activations.attention_blocks and not 0 <= activations.attention_blocks <= recomputed:
        raise ValueError(
            f"{activations.attention_blocks} of {recomputed} blocks cannot keep attention"
        )
