"""Between processes, an exchange gives the bits that the exchange in memory gives, which all other
tests of ranks use.
"""

from __future__ import annotations

import pytest
import torch

from engine.exchange.exchange import Exchange
from tests.support.group_ranks import in_processes
from tests.support.ranks import on_ranks

SHARD = 1000
# gloo has no int16.
DTYPES = (torch.float32, torch.bfloat16, torch.int32)


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns numbers of a rank whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(count, generator=generator) * 10.0 ** torch.randint(
        -4, 5, (count,), generator=generator
    )
    return values.to(dtype) if dtype.is_floating_point else (values * 10).to(dtype)


def exchanged(exchange: Exchange) -> dict[str, torch.Tensor]:
    """Returns what a rank has after each kind of exchange. Its tensors begin with its own numbers
    and otherwise with 7, which must go.
    """
    rank, ranks = exchange.rank, exchange.ranks
    own = slice(rank * SHARD, (rank + 1) * SHARD)
    found: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        whole = torch.full((ranks * SHARD,), 7, dtype=dtype)
        whole[own] = numbers(rank, SHARD, dtype)
        exchange.all_gather(whole)
        found[f"gathered {dtype}"] = whole
    for dtype in (torch.float32, torch.int32):
        values = numbers(rank, 12, dtype).view(3, 4)
        before = values.clone()
        found[f"summed {dtype}"] = exchange.all_reduce(values)
        found[f"unchanged {dtype}"] = (values == before).all()
    # A part of a larger buffer, as the sum of a small unit is.
    buffer = torch.full((ranks * SHARD + 5,), 7.0)
    sums = buffer[: ranks * SHARD]
    sums.copy_(numbers(rank, ranks * SHARD, torch.float32))
    exchange.reduce_scatter(sums)
    found["scattered"] = sums[own].clone()
    found["beyond"] = buffer[ranks * SHARD :].clone()
    return found


RANKS = 3
"""Two numbers have the same sum in either order; three have not."""


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[list, list]:
    """Returns what ranks in processes and ranks in threads have."""
    folder = tmp_path_factory.mktemp("ranks")
    return in_processes(RANKS, exchanged, folder), on_ranks(RANKS, exchanged)


def test_processes_have_the_bits_of_threads(both):
    for ours, theirs in zip(*both):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value.dtype == theirs[name].dtype and value.shape == theirs[name].shape, name
            assert torch.equal(value, theirs[name]), name


def test_every_rank_has_what_all_have_brought(both):
    for found in both:
        for dtype in DTYPES:
            brought = torch.cat([numbers(rank, SHARD, dtype) for rank in range(RANKS)])
            assert all(torch.equal(each[f"gathered {dtype}"], brought) for each in found)
        for dtype in (torch.float32, torch.int32):
            total = numbers(0, 12, dtype)
            for rank in range(1, RANKS):
                total += numbers(rank, 12, dtype)
            assert all(torch.equal(each[f"summed {dtype}"], total.view(3, 4)) for each in found)
            assert all(each[f"unchanged {dtype}"] for each in found)


def test_sums_are_added_in_the_order_of_ranks(both):
    for found in both:
        everyone = [numbers(rank, RANKS * SHARD, torch.float32) for rank in range(RANKS)]
        total = everyone[0].clone()
        for other in everyone[1:]:
            total += other
        for rank, each in enumerate(found):
            own = slice(rank * SHARD, (rank + 1) * SHARD)
            assert torch.equal(each["scattered"], total[own])
            assert torch.equal(each["beyond"], torch.full((5,), 7.0))
        backwards = everyone[-1].clone()
        for other in everyone[-2::-1]:
            backwards += other
        assert not torch.equal(backwards, total)  # such numbers tell an order from another one
