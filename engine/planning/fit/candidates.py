"""A `BatchSplit` is a way to spread a step's rows over micro-batches and rounds. `batch_splits`
yields those that the planner tries. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.config.settings import AUTO
from engine.machine.link_rates import reads_unsharded
from engine.planning.fit.job import Job, Target
from engine.planning.schedule.choices import EmbedAndHead, Placement, PlanChoices, Sharding
from engine.planning.shape.model_shape import ModelShape

# ---------------------------------------------------------------------- plan families

# A plan family is a way to take less RAM, or less memory of the device, at some cost. The planner
# fills the rest of the memory within it (`engine.planning.fit.fill_memory`). No torch.


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


# ---------------------------------------------------------------------- candidates


SATURATING_TOKENS = {"cuda": 16384, "cpu": 2048}
"""Tokens of a micro-batch that keep the device busy."""
LEAST_TOKENS = 4096
"""Fewest tokens of a micro-batch that is a round of its own."""
MOST_ROUNDS = 32
"""Most rounds of a step, unless the settings request more."""


class BatchSplit(NamedTuple):
    """A batch split says how many micro-batches and rounds a step has. `size` is the rows of a
    micro-batch.
    """

    size: int
    micro_batches: int
    rounds: int


def batch_splits(job: Job, device: str, coarse: bool) -> Iterator[BatchSplit]:
    """Yields the batch splits of one rank to try, fewer rounds first. coarse: fewer numbers of
    rounds are tried.
    """
    train, asked_rounds = job.config.train, job.config.engine.rounds
    one_or_asked = 1 if asked_rounds == AUTO else asked_rounds
    if job.rounding:
        size = job.rounding["micro_batch_size"]
        micro_batches = -(-job.rows // size)
        yield BatchSplit(size, micro_batches, job.rounding["rounds"])
        return
    for size in _micro_batch_sizes(job, device):
        yield BatchSplit(size, job.rows // size, one_or_asked)
    if asked_rounds != AUTO or device == "cpu":
        return
    if train.micro_batch_size != AUTO:
        yield from _rounds_of_asked_size(job.rows, train.micro_batch_size)
    else:
        yield from _one_micro_batch_a_round(job, coarse)


def _rounds_of_asked_size(rows: int, size: int) -> Iterator[BatchSplit]:
    """Yields batch splits whose rounds have equal numbers of micro-batches, of the size that the
    settings request.
    """
    micro_batches = rows // size
    for rounds in range(2, min(micro_batches, MOST_ROUNDS) + 1):
        if micro_batches % rounds == 0:
            yield BatchSplit(size, micro_batches, rounds)


def _one_micro_batch_a_round(job: Job, coarse: bool) -> Iterator[BatchSplit]:
    """Yields batch splits whose rounds have one micro-batch each, until the micro-batches are too
    small. The last micro-batches may have a row less than the others. Each of several ranks takes
    as many of those into which the whole step is cut.
    """
    rows, ranks = job.rows, job.world_size
    most = min(rows, MOST_ROUNDS)
    numbers: Sequence[int] = range(2, most + 1)
    if coarse:
        numbers = [2**exponent for exponent in range(1, most.bit_length())]
    for rounds in numbers:
        size = -(-rows // rounds)
        if size * job.row_length < LEAST_TOKENS:
            return
        if -(-rows * ranks // size) == rounds * ranks:
            yield BatchSplit(size, rounds, rounds)


def _micro_batch_sizes(job: Job, device: str) -> list[int]:
    """Returns the micro-batch sizes in rows to try, in order of preference."""
    asked, asked_rounds = job.config.train.micro_batch_size, job.config.engine.rounds
    if asked != AUTO:
        return [asked]
    target, row_length = SATURATING_TOKENS[device], job.row_length
    rows = job.rows // (1 if asked_rounds == AUTO else asked_rounds)
    divisors = [size for size in range(rows, 0, -1) if rows % size == 0]
    small = [size for size in divisors if size * row_length <= target] or [1]
    # With fewer micro-batches, gradients are added less often. Batch sizes such as 148 = 4 x 37
    # have no divisor close below the target.
    large = [size for size in divisors if target < size * row_length <= 3 * target]
    if device == "cpu":
        # The CPU takes the first size that fits, so a larger one comes first only where the others
        # are far too small.
        too_small = 2 * small[0] * row_length < target
        large = large[-1:] if too_small else []
    return large + small
