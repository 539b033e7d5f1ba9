"""A `BatchSplit` is a way to spread a step's rows over micro-batches and rounds. `batch_splits`
yields those that the planner tries. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.config.settings import AUTO
from engine.planning.fit.job import Job

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
