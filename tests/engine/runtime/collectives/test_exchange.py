"""Between processes, an exchange gives the bits that the exchange in memory gives, which all other
tests of ranks use.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from engine.runtime.collectives import process_groups as exchange_room
from engine.runtime.collectives.process_groups import (
    CollectiveError,
    Collectives,
    ProcessGroupCollectives,
)
from engine.runtime.collectives.rank import RankInfo
from tests.support.group_ranks import in_processes
from tests.support.ranks import added, on_ranks

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


def exchanged(exchange: Collectives) -> dict[str, torch.Tensor]:
    """Returns what a rank has after each kind of exchange. Its tensors begin with its own numbers
    and otherwise with 7, which must go.
    """
    place = exchange.place
    ranks = place.local_world_size
    own = slice(place.local_rank * SHARD, (place.local_rank + 1) * SHARD)
    found: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        whole = torch.full((ranks * SHARD,), 7, dtype=dtype)
        whole[own] = numbers(place.rank, SHARD, dtype)
        exchange.all_gather(whole)
        found[f"gathered {dtype}"] = whole
        chunk = numbers(place.rank, 10, dtype)
        exchange.broadcast(chunk)
        found[f"broadcast {dtype}"] = chunk
    for dtype in (torch.float32, torch.int32):
        values = numbers(place.rank, 12, dtype).view(3, 4)
        before = values.clone()
        found[f"summed {dtype}"] = exchange.all_reduce(values)
        found[f"summed over nodes {dtype}"] = exchange.all_reduce_nodes(values)
        found[f"unchanged {dtype}"] = (values == before).all()
    # A part of a larger buffer, as the sum of a small unit is.
    buffer = torch.full((ranks * SHARD + 5,), 7.0)
    sums = buffer[: ranks * SHARD]
    sums.copy_(numbers(place.rank, ranks * SHARD, torch.float32))
    exchange.reduce_scatter(sums)
    found["scattered"] = sums[own].clone()
    found["beyond"] = buffer[ranks * SHARD :].clone()
    if ranks > 1:
        # Gradients in bf16 are where a sum in fp32 would be, and so is their sum afterwards.
        total = torch.full((ranks * SHARD,), 7.0)
        gradients, room = total.view(torch.bfloat16).chunk(2)
        gradients.copy_(numbers(place.rank, ranks * SHARD, torch.bfloat16))
        exchange.add_gradients(gradients, room, total[:SHARD])
        found["added"] = total[:SHARD].clone()
    return found


PLACES = [RankInfo(0, 3), RankInfo(0, 1, 3), RankInfo(0, 2, 2)]
"""Two numbers have the same sum in either order; three have not."""


def exchanged_in_chunks(exchange: Collectives) -> dict[str, torch.Tensor]:
    """Does it in a process of its own, where a sum of nodes is added in several chunks."""
    exchange_room.CHUNK_NUMEL = 300
    return exchanged(exchange)


@pytest.fixture(scope="module", params=PLACES, ids=str)
def both(request, tmp_path_factory) -> tuple[RankInfo, list, list]:
    """Returns the place of the first rank, and what ranks in processes and ranks in threads
    have.
    """
    place = request.param
    folder = tmp_path_factory.mktemp("ranks")
    return (
        place,
        in_processes(place.world_size, exchanged_in_chunks, folder, place.nodes),
        on_ranks(place.world_size, exchanged, place.nodes),
    )


def by_node(place: RankInfo, count: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Returns the numbers of each rank of each node."""
    everyone = [numbers(rank, count, dtype) for rank in range(place.world_size)]
    return [
        everyone[at : at + place.local_world_size]
        for at in range(0, place.world_size, place.local_world_size)
    ]


def test_processes_have_the_bits_of_threads(both):
    for ours, theirs in zip(*both[1:]):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value.dtype == theirs[name].dtype and value.shape == theirs[name].shape, name
            assert torch.equal(value, theirs[name]), name


def test_every_rank_has_what_those_of_its_node_have_brought(both):
    first = both[0]
    for found in both[1:]:
        for rank, each in enumerate(found):
            place = first.of(rank)
            for dtype in DTYPES:
                brought = torch.cat(by_node(place, SHARD, dtype)[place.node_rank])
                assert torch.equal(each[f"gathered {dtype}"], brought)
                assert torch.equal(each[f"broadcast {dtype}"], numbers(0, 10, dtype))
            for dtype in (torch.float32, torch.int32):
                nodes = by_node(place, 12, dtype)
                total = added(nodes[place.node_rank]).view(3, 4)
                assert torch.equal(each[f"summed {dtype}"], total)
                total = added(node[place.local_rank] for node in nodes).view(3, 4)
                assert torch.equal(each[f"summed over nodes {dtype}"], total)
                assert each[f"unchanged {dtype}"]


def assert_added_in_fp32(first: RankInfo, found: list) -> None:
    nodes = by_node(first, first.local_world_size * SHARD, torch.bfloat16)
    total = added(added(each.float() for each in node) for node in nodes)
    assert not torch.equal(total, added(added(node) for node in nodes).float())
    for rank, each in enumerate(found):
        at = first.of(rank).local_rank
        assert torch.equal(each["added"], total[at * SHARD : (at + 1) * SHARD])


def test_sums_are_added_in_the_order_of_ranks_and_then_of_nodes(both):
    first = both[0]
    for found in both[1:]:
        nodes = by_node(first, first.local_world_size * SHARD, torch.float32)
        total = added(map(added, nodes))
        for rank, each in enumerate(found):
            at = first.of(rank).local_rank
            assert torch.equal(each["scattered"], total[at * SHARD : (at + 1) * SHARD])
            assert torch.equal(each["beyond"], torch.full((5,), 7.0))
        if first.local_world_size > 1:
            assert_added_in_fp32(first, found)
        backwards = added(added(node[::-1]) for node in nodes[::-1])
        in_one_row = added(each for node in nodes for each in node)
        # Such numbers tell an order from another one.
        assert first.world_size == 4 or not torch.equal(backwards, total)
        assert first.world_size == 3 or not torch.equal(in_one_row, total)


def _without_rank_1(collectives):
    """Rank 1 lives and does not come, as one that is gone where gloo has not noticed."""
    if collectives.place.rank:
        time.sleep(2)
        return 0.0
    exchange_room.LOOK_SECONDS = 0.2
    threading.Timer(0.3, collectives.abort).start()
    began = time.monotonic()
    with pytest.raises(CollectiveError):
        collectives.reduce_scatter(torch.ones(2, 4))
    collectives.close()
    return time.monotonic() - began


def test_an_aborted_collective_ends_though_the_other_rank_lives(tmp_path):
    waited, _ = in_processes(2, _without_rank_1, tmp_path)
    assert 0.3 <= waited < 1.5


class _EndsAfterTheLook:
    """Work that ends between a look at it and the question whether it has ended."""

    def __init__(self, error: str):
        self.error = error

    def wait(self, timeout=None):
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self):
        return True


@pytest.mark.parametrize("error", ["", "Connection closed by peer"])
def test_a_collective_that_ends_just_after_a_look_has_its_own_outcome(error):
    collectives = object.__new__(ProcessGroupCollectives)
    collectives._adds_on_the_way = False

    def collective(group, async_op):
        assert async_op
        return _EndsAfterTheLook(error)

    if not error:
        collectives._reach(collective, group=None)
        return
    with pytest.raises(CollectiveError, match=error):
        collectives._reach(collective, group=None)
