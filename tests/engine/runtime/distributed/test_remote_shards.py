"""Bytes of planes reach the devices of other ranks, and come back, through shared memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import RankError
from engine.runtime.collectives.rank import RankInfo
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.distributed import remote_shards
from engine.runtime.distributed.messages import ReadShard, ShardReply, WriteShard
from engine.runtime.distributed.remote_shards import OwnNodeShards, RemoteShards, answer
from engine.runtime.host import shared_chunk
from engine.runtime.host.device_planes import DevicePlanes
from engine.runtime.host.ram_planes import Wanted

pytestmark = pytest.mark.computing
KEY = ("block 0", "weight_high")
SIZE = 1000


class Workers:
    """Three ranks, of which the last is on another node. They answer in this process."""

    def __init__(self):
        backend = CpuBackend()
        self.planes = {rank: DevicePlanes(backend) for rank in (1, 2, 3)}
        self.sent = []
        self.problem = ""
        self.shards = RemoteShards(RankInfo(0, 3, 2), self.send, lambda: self.problem)

    def send(self, rank, message):
        self.sent.append((rank, message))
        self.shards.take(rank, answer(self.planes[rank], OwnNodeShards(1), message))


@pytest.fixture
def workers(monkeypatch):
    # Planes are longer than a chunk, and the last part is shorter.
    for module in (remote_shards, shared_chunk):
        monkeypatch.setattr(module, "CHUNK_BYTES", 384)
    made = Workers()
    for rank in (1, 2, 3):
        made.shards.allocate(rank, {KEY: Wanted(SIZE, np.uint8, is_for_dma=False)})
    yield made
    made.shards.close()


def test_ranks_get_what_rank_0_writes_and_it_reads_the_same(workers):
    content = np.random.default_rng(0).integers(0, 256, 900, np.uint8)
    workers.shards.write([1, 2, 3], KEY, 50, content)
    for rank in (1, 2, 3):
        held = workers.planes[rank].tensors[KEY].view(torch.uint8).numpy()
        np.testing.assert_array_equal(held[50:950], content)
        assert not held[:50].any() and not held[950:].any()
        found = workers.shards.read(rank, KEY, 40, 960)
        np.testing.assert_array_equal(found, held[40:960])


def test_only_bytes_of_another_node_are_in_messages(workers):
    workers.shards.write([1, 2, 3], KEY, 0, np.ones(SIZE, np.uint8))
    in_messages = {
        rank: message.content is not None
        for rank, message in workers.sent
        if isinstance(message, WriteShard)
    }
    assert in_messages == {1: False, 2: False, 3: True}
    for rank in (1, 2, 3):
        workers.shards.read(rank, KEY, 0, SIZE)
    chunks = [rank for rank, message in workers.sent if isinstance(message, ReadShard)]
    assert chunks == [1, 1, 1, 2, 2, 2, 3]


def test_what_was_read_stays_as_it_was(workers):
    workers.shards.write([1], KEY, 0, np.full(SIZE, 7, np.uint8))
    found = workers.shards.read(1, KEY, 0, SIZE)
    workers.shards.write([1], KEY, 0, np.zeros(SIZE, np.uint8))
    assert (found == 7).all()


def test_a_rank_that_is_lost_ends_a_write_and_lets_go_of_the_chunk(workers, monkeypatch):
    monkeypatch.setattr(remote_shards, "_POLL_SECONDS", 0.01)
    whole = workers.send
    monkeypatch.setattr(workers.shards, "_send", lambda rank, message: None)
    workers.problem = "Rank 1 of 3 was killed."
    with pytest.raises(RankError, match=r"^Rank 1 of 3 was killed\.$"):
        workers.shards.write([1, 2], KEY, 0, np.ones(SIZE, np.uint8))
    workers.problem = ""
    monkeypatch.setattr(workers.shards, "_send", whole)
    workers.shards.write([2], KEY, 0, np.full(SIZE, 3, np.uint8))
    assert (workers.shards.read(2, KEY, 0, SIZE) == 3).all()
    assert isinstance(workers.shards.ask(1, ReadShard(KEY, 0, 1)), ShardReply)
