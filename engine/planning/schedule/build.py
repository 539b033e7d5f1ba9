"""The plan of one step is built here, from the units and from choices. This file runs no op and
makes no choices; `engine.planning.fit.choose` makes them. No torch.

Three passes turn a step into ops:

1. `assign_slots` assigns a slot to every use of a block, and decides when the slot must be filled.
2. `write_ops` puts the ops into program order; `unit_ops` says what each reads and writes:
   - Every round goes forward through embed, the blocks and the loss, and backward again.
   - Each prefetch comes as early as its slot and the prefetch depth allow.
   - After a unit's backward its gradient is rounded and sent to the host.
   - After the last round come the summary, the clip factor and the updates. `device_updates` writes
     the ops of optimizers that run on the device, `spilled_updates` those of moments on the disk.
   - `spilled_boundaries` writes the ops of boundaries on the disk.
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
    bounded_blocks,
    has_one_term,
    settled_blocks,
    settled_of,
)
from engine.planning.schedule.derive_waits import with_waits
from engine.planning.schedule.device_updates import DeviceUpdates
from engine.planning.schedule.ops import GradientSum
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
    embed gradient is summed all step. sizes: needed where an optimizer runs on the device. updates:
    False for a dry run, the same step up to its summary, in which no op writes weights or moments.
    Raises ValueError for choices that contradict each other.
    """
    _refuse_contradictions(blocks, tied, choices, sizes)
    if choices.outer_in_parked:
        _refuse_wrong_outer(choices, sizes)
    end = StepEnd.UPDATES if updates else StepEnd.SUMMARY
    writer = StepWriter(blocks, tied, choices, sizes or PlaneSizes({}), end)
    buffers, device = writer.buffers, writer.device
    parked_numel = writer.spilled.numel if choices.parked_gradients else 0
    return StepPlan(
        ops=with_waits(writer.write()),
        slots=buffers.slot_units(),
        grads=buffers.grad_units(),
        stagings=buffers.staging_units(),
        rings=buffers.rings(),
        shards=writer.shards,
        hosts=choices.hosts,
        span=choices.span,
        gradient_rings=buffers.gradient_rings(),
        graphs=choices.micro_batches // choices.rounds if choices.graphs else 0,
        state_rings=writer.spilled.rings(),
        spill_numel=writer.spilled.numel,
        disk_rings=writer.on_disk.rings,
        compiled=choices.compiled,
        tile_tokens=choices.tile_tokens,
        with_attention=blocks_with_attention(buffers.trained.blocks_back, choices),
        attention_bytes=choices.attention_bytes if choices.attention_blocks else 0,
        device_homes=choices.device_homes,
        placed=device.placed_units(),
        settled=buffers.settled_slots(),
        update_buffers=tuple(device.buffers),
        spare_buffers=tuple(device.spare),
        piece_numel=device.piece_numel,
        ring_numel=max(device.ring_numel, parked_numel),
        **_of_arena(device),
        unsummed=_unsummed(buffers.trained.blocks_back, choices, sizes),
        rounded_in_sums=buffers.rounded_in_sums,
        outer_in_parked=choices.outer_in_parked,
        embed_piece=sizes.embed_piece if sizes else 0,
        frozen=buffers.trained.frozen,
        forward_only=buffers.trained.forward_only,
    )


def build_forward_plan(
    blocks: list[str], tied: bool, choices: PlanChoices, held: bool = False, rank: int = 0
) -> StepPlan:
    """Returns the plan of a pass without gradients, for evaluation and sampling. The pass ends with
    its `loss` ops.

    Of the choices, only the ranks, the micro-batches, the rounds, the slots, the prefetch depth,
    the resident blocks, the settled units, the compiled kernels and the tiles should differ from
    their defaults. The rounds need not divide the micro-batches. held: an earlier pass on the same
    weights has left every unit with a slot of its own in that slot, so these units are not fetched
    again.
    """
    end = StepEnd.LOSS_AGAIN if held else StepEnd.LOSS
    writer = StepWriter(blocks, tied, choices, PlaneSizes({}, rank=rank), end)
    return StepPlan(
        ops=with_waits(writer.write()),
        slots=writer.buffers.slot_units(),
        shards=writer.shards,
        compiled=choices.compiled,
        tile_tokens=choices.tile_tokens,
        settled=writer.settled,
        held=writer.held,
    )


def _unsummed(
    blocks: Sequence[str], choices: PlanChoices, sizes: PlaneSizes | None
) -> tuple[str, ...]:
    """Returns the blocks whose gradients ranks exchange in bf16, of those that have a backward."""
    if sizes is None or sizes.item_bytes != 2 or sizes.has_exact or not has_one_term(choices):
        return ()
    return tuple(block for block in blocks if block not in sizes.frozen)


def _of_arena(device: DeviceUpdates) -> dict[str, Any]:
    """Returns the fields of a plan that say where sums and update buffers are."""
    arena = device.arena
    if arena is None:
        return {}
    return {
        "arena": tuple(zip(device.sums, arena.starts)),
        "buffer_places": arena.places,
        "arena_bytes": arena.bytes,
    }


ONE_RANK_ONLY = (
    "spilled_units",
    "spilled_boundaries",
    "gradients_in_sums",
    "outer_in_parked",
    "spare_buffers",
    "graphs",
)
"""Plans for several ranks make none of these choices."""


def _refuse_contradictions(
    blocks: list[str], tied: bool, choices: PlanChoices, sizes: PlaneSizes | None
) -> None:
    micro_batches, rounds = choices.micro_batches, choices.rounds
    if micro_batches % rounds:
        raise ValueError(f"{rounds} rounds do not divide {micro_batches} micro-batches")
    if (choices.gradient_sum == GradientSum.VERTICAL) != (rounds == 1):
        raise ValueError("gradient_sum is 'vertical' exactly when there is one round")
    if tied and choices.shared_outer_slot:
        raise ValueError("embed and head of a tied model cannot share a slot")
    if choices.parked_gradients and choices.gradient_sum == GradientSum.HOST:
        raise ValueError("parked gradients cannot be summed on the host")
    in_sums = choices.parked_gradients and choices.gradient_sum == GradientSum.DEVICE
    if choices.gradients_in_sums and not in_sums:
        raise ValueError("only parked gradients can be in sums, and only in those of all rounds")
    if choices.kept_blocks > len(blocks):
        raise ValueError(
            f"{choices.kept_blocks} of {len(blocks)} blocks cannot keep their activations"
        )
    if choices.boundary_blocks not in (1, 2):
        raise ValueError(f"no boundary is kept for {choices.boundary_blocks} blocks together")
    if choices.boundary_blocks == 2 and choices.slots < 2:
        raise ValueError("two blocks that are recomputed together need two slots")
    homes = choices.device_homes
    unknown = set(homes) - {EMBED, *blocks, HEAD}
    if unknown or (homes and choices.update_buffers < 1):
        raise ValueError(f"{choices.update_buffers} buffers for the optimizers of {homes}")
    _refuse_wrong_moments(choices)
    _refuse_wrong_ranks(choices, sizes)
    trained = TrainedUnits(blocks, sizes.frozen if sizes is not None else ())
    if trained.frozen:
        _refuse_wrong_frozen(blocks, choices, trained)
    _refuse_wrong_spares(choices)
    _refuse_wrong_settlers(blocks, choices)
    _refuse_wrong_spill(blocks, choices, trained)
    if choices.attention_blocks:
        _refuse_wrong_attention(choices, trained)


def _refuse_wrong_ranks(choices: PlanChoices, sizes: PlaneSizes | None) -> None:
    """Raises ValueError where several ranks cannot compute a step with these choices."""
    if choices.ranks == 1 and choices.whole_reads:
        raise ValueError("one rank of a host reads whole units anyway")
    if choices.ranks % choices.span:
        raise ValueError(f"{choices.span} hosts have unequal shares of {choices.ranks} ranks")
    if choices.span > 1 and choices.whole_reads:
        raise ValueError("no host has whole units where planes are divided among hosts")
    rank = sizes.rank if sizes is not None else 0
    if not 0 <= rank < choices.ranks or (sizes is None and choices.ranks > 1):
        raise ValueError(f"the plan is of none of {choices.ranks} ranks")
    if choices.world_size == 1:
        if choices.gradient_sum == GradientSum.SHARDS:
            raise ValueError("only several ranks keep shards of sums")
        return
    for name in ONE_RANK_ONLY:
        if getattr(choices, name):
            raise ValueError(f"{name} is for one rank, not for {choices.world_size}")
    if choices.gradient_sum == GradientSum.HOST or choices.boundary_blocks > 1:
        raise ValueError("sums on the host and pairs of blocks are for one rank")


def _refuse_wrong_moments(choices: PlanChoices) -> None:
    """Raises ValueError where moments cannot be updated after the weights of all units."""
    if choices.late_moments and (choices.parked_gradients or choices.spilled_units):
        raise ValueError(
            "moments are updated after all weights only where they and the gradients are in RAM"
        )


def _refuse_wrong_frozen(blocks: list[str], choices: PlanChoices, trained: TrainedUnits) -> None:
    """Raises ValueError where choices need a gradient or a backward that units do not have."""
    if choices.outer_in_parked or choices.boundary_blocks > 1:
        raise ValueError(
            "pairs of blocks, and embed and head among parked gradients, are for models that are "
            "trained whole"
        )
    if not set(trained.frozen) < {EMBED, *blocks, HEAD}:
        raise ValueError("nothing is trained")
    if set(choices.device_homes) & set(trained.frozen):
        raise ValueError(f"some of {trained.frozen} have no optimizer")
    if choices.kept_blocks > len(trained.blocks_back):
        raise ValueError(
            f"{choices.kept_blocks} blocks keep activations, and {len(trained.blocks_back)} have a "
            "backward"
        )
    if choices.graphs and not set(trained.forward_only) <= {EMBED}:
        raise ValueError("blocks are recorded only where all of them have a backward")


def _refuse_wrong_spill(blocks: list[str], choices: PlanChoices, trained: TrainedUnits) -> None:
    """Raises ValueError where these moments and boundaries cannot be on the disk."""
    units = 2 + len(blocks)
    if not 0 <= choices.spilled_units <= units - choices.settled_units:
        raise ValueError(
            f"the moments of {choices.spilled_units} units cannot be on the disk where "
            f"{choices.settled_units} of {units} live on the device"
        )
    if choices.spilled_units and choices.settled_apart:
        raise ValueError("moments on the disk are the last ones, and some of these may live apart")
    if choices.spilled_units and choices.device_homes:
        raise ValueError("moments on the disk cannot be streamed to the device")
    kept = choices.micro_batches * len(bounded_blocks(len(trained.blocks_back), choices))
    spilled = choices.spilled_boundaries
    if not 0 <= spilled <= kept:
        raise ValueError(f"{spilled} boundaries cannot be on the disk where a step keeps {kept}")
    if spilled and not choices.host_boundaries:
        raise ValueError("boundaries go to the disk from the host, and they are on the device")


def _refuse_wrong_attention(choices: PlanChoices, trained: TrainedUnits) -> None:
    """Raises ValueError where blocks cannot keep what attention returned."""
    most = len(trained.blocks_back) - choices.kept_blocks
    if not 0 <= choices.attention_blocks <= most:
        raise ValueError(f"{choices.attention_blocks} of {most} blocks cannot keep attention")
    waits_in_ram = choices.host_boundaries and not choices.spilled_boundaries
    if not (waits_in_ram and choices.tile_tokens and choices.attention_bytes > 0):
        raise ValueError("attention is kept beside boundaries in RAM, of blocks in tiles")
    if choices.boundary_blocks > 1:
        raise ValueError("attention is kept of blocks that have a boundary each, not of pairs")


def _refuse_wrong_settlers(blocks: list[str], choices: PlanChoices) -> None:
    """Raises ValueError where units cannot live on the device beside the other choices."""
    settled = settled_of(blocks, choices)
    is_whole = settled_blocks(len(blocks), choices) == len(blocks)
    if choices.graphs and (choices.host_boundaries or not is_whole):
        raise ValueError("blocks are recorded only where all of them live on the device")
    if not settled:
        return
    if settled_blocks(len(blocks), choices) + choices.resident_blocks > len(blocks):
        raise ValueError(f"{choices.resident_blocks} resident blocks are among {settled}")
    if set(settled) & set(choices.device_homes):
        raise ValueError(f"the states of some of {settled} are streamed to the device")
    if choices.shared_outer_slot or choices.gradient_sum == GradientSum.HOST:
        raise ValueError(
            "units cannot live on the device where embed and head share a slot or gradients are "
            "summed on the host"
        )


def _refuse_wrong_outer(choices: PlanChoices, sizes: PlaneSizes | None) -> None:
    """Raises ValueError where embed and head cannot use the memory of parked gradients."""
    parks = choices.parked_gradients and choices.shared_outer_slot
    if not parks or choices.gradient_sum != GradientSum.VERTICAL:
        raise ValueError(
            "embed and head use the memory of gradients that are parked in one round, and share a "
            "slot"
        )
    if sizes is None or not sizes.embed_piece:
        raise ValueError("the gradient of embed has no pieces")


def _refuse_wrong_spares(choices: PlanChoices) -> None:
    """Raises ValueError unless some but not all update buffers are spare, and some of the kept
    blocks lend them memory.
    """
    spare, lenders = choices.spare_buffers, choices.spare_blocks
    if not (spare or lenders):
        return
    buffers, kept = choices.update_buffers, choices.kept_blocks
    if not (choices.device_homes and 0 < spare < buffers and 0 < lenders <= kept):
        raise ValueError(f"{spare} of {buffers} buffers in the place of {lenders} blocks of {kept}")
