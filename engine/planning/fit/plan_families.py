"""A plan family is a way to take less RAM, or less memory of the device, at some cost. The planner
fills the rest of the memory within it (`engine.planning.fit.fill_memory`). No torch.
"""

from __future__ import annotations

from engine.config.settings import AUTO
from engine.machine.link_rates import reads_unsharded
from engine.planning.fit.job import Job, Target
from engine.planning.schedule.choices import (
    EmbedAndHead,
    Gradients,
    Placement,
    PlanChoices,
    Sharding,
)
from engine.planning.shape.model_shape import ModelShape


def plan_families(job: Job, target: Target, coarse: bool) -> list[list[PlanChoices]]:
    """Returns the plan families, in groups, the usual one first. A group is tried where RAM
    or the device's memory is too short for those before it. They differ by where gradients wait, by
    whether embed and head share a slot, and use the memory of kept gradients, and by whether
    every block or every second one keeps its input. With several ranks, every block keeps its
    input, and the accumulators of embed and head have memory of their own. Where units are
    frozen, every block with a backward keeps its input.
    """
    on_gpu, level = keeps_gradients_on_gpu(job, target), job.config.engine.activation_checkpointing
    whole = job.nodes_per_replica == 1 and reads_unsharded(target.rates, job.ranks)
    replicas, of_replica = job.nodes // job.nodes_per_replica, job.ranks * job.nodes_per_replica
    # What is trained is updated in forward order, so its first blocks are needed first. Frozen ones
    # can be fetched at any time.
    apart = job.shape.has_alike_frozen_blocks
    plain = PlanChoices(
        sharding=Sharding(
            ranks=of_replica,
            replicas=replicas,
            nodes_per_replica=job.nodes_per_replica,
            unsharded_reads=whole,
        ),
        placement=Placement(gpu_resident_apart=apart),
    )
    usual = [] if on_gpu else [plain]
    kept_gradients = [] if on_gpu is False else [plain.changed(gradients_on_gpu=True)]
    if kept_gradients and not job.shape.holds_embed:
        kept_gradients.append(kept_gradients[0].changed(embed_and_head=EmbedAndHead.SHARED_SLOT))
    if job.world_size > 1:
        return [group for group in (usual, kept_gradients) if group]
    if job.shape.frozen_units:  # what has no backward has no block input, and keeps no gradient
        return [group for group in (usual, kept_gradients) if group]
    embed_and_head = []
    if kept_gradients and _can_keep_embed_and_head(job.shape):
        embed_and_head = [kept_gradients[-1].changed(embed_and_head=EmbedAndHead.IN_KEPT_GRADIENTS)]
    slots = (2,) if coarse or job.config.engine.slots != AUTO else (2, 4)

    def in_pairs(families: list[PlanChoices]) -> list[PlanChoices]:
        return [
            each.changed(blocks_per_saved_input=2, slots=count)
            for each in families
            for count in slots
        ]

    if level == "offload_pairs" or job.blocks_per_saved_input == 2:
        groups = [in_pairs(usual), in_pairs(kept_gradients), in_pairs(embed_and_head)]
    elif level == AUTO and job.blocks_per_saved_input is None and target.device != "cpu":
        groups = [
            usual,
            [*kept_gradients, *in_pairs(usual)],
            in_pairs(kept_gradients),
            embed_and_head,
            in_pairs(embed_and_head),
        ]
    else:
        groups = [usual, kept_gradients, embed_and_head]
    return [group for group in groups if group]


def _can_keep_embed_and_head(shape: ModelShape) -> bool:
    """Returns whether embed can be accumulated in chunks, and the accumulator of the head is no
    larger than the kept gradients of all blocks.
    """
    kept_gradients = shape.item_bytes * sum(unit.gradient_numel for unit in shape.blocks)
    return shape.embed_chunk > 0 and 4 * shape.head.gradient_numel <= kept_gradients


def keeps_gradients_on_gpu(job: Job, target: Target) -> bool | None:
    """Returns whether gradients are kept on the device, by the settings or by what was decided
    before; None where that depends on the memory.
    """
    asked = job.config.engine.gradients
    if asked != AUTO:
        return asked == "gpu"
    # On the CPU the device's memory is RAM too, and kept gradients reach the host in chunks.
    if target.device == "cpu" or not job.cuts_units:
        return False
    return job.gradients_on_gpu


def with_kept_gradients(choices: PlanChoices) -> PlanChoices:
    """Returns the plan family that keeps gradients on the device for speed, on the ranks of
    `choices` and with its spread of GPU-resident blocks. Each block keeps its input, and embed and
    head have slots of their own: where memory is that short, gradients are kept there anyway.
    """
    return PlanChoices(
        sharding=choices.sharding,
        placement=Placement(gpu_resident_apart=choices.placement.gpu_resident_apart),
        gradients=Gradients(gradients_on_gpu=True),
    )
