"""A frame is a way to take less RAM, or less memory of the device, at some cost. The planner fills
the rest of the memory within it (`engine.fit.fill_memory`). No torch.
"""

from __future__ import annotations

from dataclasses import replace

from engine.config.settings import AUTO
from engine.fit.job import Job, Target
from engine.machine.link_rates import reads_whole
from engine.model.shape import ModelShape
from engine.plan.choices import PlanChoices


def frames_of(job: Job, target: Target, quick: bool) -> list[list[PlanChoices]]:
    """Returns the ways to take less RAM, in groups, the usual one first. A group is tried where RAM
    or the device's memory is too short for those before it. They differ by where gradients wait, by
    whether embed and head share a slot, and use the memory of parked gradients, and by whether
    every block or every second one keeps its boundary. With several ranks, embed and head have
    memory of their own, and every block keeps its boundary. Where units are frozen, every block
    with a backward keeps its boundary.
    """
    parks, level = parking(job, target), job.config.engine.save_level
    whole = job.span == 1 and reads_whole(target.rates, job.ranks)
    copies, of_copy = job.hosts // job.span, job.ranks * job.span
    # What is trained is updated in forward order, so its first blocks are needed first. Frozen ones
    # can be fetched at any time.
    apart = job.shape.has_alike_frozen_blocks
    plain = PlanChoices(
        ranks=of_copy, hosts=copies, span=job.span, whole_reads=whole, settled_apart=apart
    )
    usual = [] if parks else [plain]
    parked = [] if parks is False else [replace(plain, parked_gradients=True)]
    if parked and not job.shape.holds_embed:
        parked.append(replace(parked[0], shared_outer_slot=True))
    if job.all_ranks > 1:
        return [group for group in (usual, parked) if group]
    if job.shape.frozen_units:  # what has no backward has no boundary, and parks no gradient
        return [group for group in (usual, parked) if group]
    outer = []
    if parked and _can_park_outer(job.shape):
        outer = [replace(parked[-1], outer_in_parked=True)]
    slots = (2,) if quick or job.config.engine.slots != AUTO else (2, 4)

    def in_pairs(frames: list[PlanChoices]) -> list[PlanChoices]:
        return [replace(each, boundary_blocks=2, slots=count) for each in frames for count in slots]

    if level == "boundary_pairs" or job.boundary_blocks == 2:
        groups = [in_pairs(usual), in_pairs(parked), in_pairs(outer)]
    elif level == AUTO and job.boundary_blocks is None and target.device != "cpu":
        groups = [usual, [*parked, *in_pairs(usual)], in_pairs(parked), outer, in_pairs(outer)]
    else:
        groups = [usual, parked, outer]
    return [group for group in groups if group]


def _can_park_outer(shape: ModelShape) -> bool:
    """Tells whether embed can be summed in pieces, and the sum of the head is no larger than the
    parked gradients of all blocks.
    """
    parked = shape.item_bytes * sum(unit.gradient_numel for unit in shape.blocks)
    return shape.embed_piece > 0 and 4 * shape.head.gradient_numel <= parked


def parking(job: Job, target: Target) -> bool | None:
    """Tells whether gradients are parked on the device, by the settings or by what was decided
    before; None where that depends on the memory.
    """
    asked = job.config.engine.gradients
    if asked != AUTO:
        return asked == "parked"
    if target.device == "cpu":  # there the device's memory is RAM too
        return False
    return job.parked_gradients
