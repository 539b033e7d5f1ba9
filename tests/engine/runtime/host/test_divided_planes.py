"""Planes in the RAM of several nodes: rank 0 reads and writes them as if it had all of them,
and every node has memory for its part alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.config.optimizers import MOMENTS
from engine.config.settings import ModelConfig
from engine.errors import FitError
from engine.model.build.build import build_model
from engine.model.build.measure_shape import shape_of
from engine.planning.fit.buffer_sizes import state_bytes
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.shards import Shards
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.distributed.messages import (
    AllocateNodeShards,
    ReadShard,
    ReleaseShards,
    WriteShard,
)
from engine.runtime.distributed.remote_shards import OwnNodeShards, answer
from engine.runtime.host import cross_node_planes
from engine.runtime.host.cross_node_planes import Nodes
from engine.runtime.host.device_planes import DevicePlanes
from engine.runtime.host.host_states import HostStates, OpenedPlanes, Sharing
from engine.runtime.host.shared_memory import OpenedMemory
from tests.support.same_planes import assert_same_planes
from tests.support.tiny import plain_model, pour, tiny_config

pytestmark = pytest.mark.computing


class OtherNodes:
    """The first ranks of the other nodes, in this process."""

    def __init__(self, nodes: int):
        self.parts = {host: OwnNodeShards(1) for host in range(1, nodes)}

    def _ask(self, host, message):
        return answer(None, self.parts[host], message).content

    def allocate(self, host, parts):
        self._ask(host, AllocateNodeShards(dict(parts)))

    def release(self, keys):
        for host in self.parts:
            self._ask(host, ReleaseShards(tuple(keys), in_ram=True))

    def read(self, host, key, begin, end):
        return self._ask(host, ReadShard(key, begin, end, in_ram=True))

    def write(self, host, key, begin, content):
        self._ask(host, WriteShard(key, begin, content, in_ram=True))


Case = tuple[HostStates, HostStates, OtherNodes]
KINDS = [("float32", "adamw", 48), ("bfloat16", "adamw", 48), ("bfloat16", "adamw_8bit", 160)]
CASES = [(*kind, 2, 1) for kind in KINDS] + [("bfloat16", "adamw", 48, 3, 2)]


@pytest.fixture(params=CASES, ids=str)
def cases(request, monkeypatch) -> Iterator[Case]:
    """Yields host states with all planes here, and one whose planes, which hold the same, are
    divided among nodes. What passes between nodes does so in small chunks.
    """
    dtype, optimizer, wide, nodes, ranks = request.param
    monkeypatch.setattr(cross_node_planes, "MOST_BYTES", 1000)
    plain = plain_model(tiny_config("llama", intermediate_size=wide))
    model = build_model(plain.config, ModelConfig(source="tiny", dtype=dtype))
    plainly = HostStates(model.layouts, dtype, threads=1)
    others = OtherNodes(nodes)
    sharing = Sharing(nodes=Nodes(nodes, nodes * ranks, others=others))
    divided = HostStates(model.layouts, dtype, threads=1, sharing=sharing)
    generator = np.random.default_rng(0)
    for states in (plainly, divided):
        states.allocate_weights()
        pour(plain, model, states)
        states.allocate_states(optimizer=optimizer)
    for unit in plainly.layouts:
        for plane in MOMENTS:
            content = generator.integers(0, 255, plainly.nbytes(unit, plane)).astype(np.uint8)
            for states in (plainly, divided):
                states.put(unit, plane, 0, content)
    shape = shape_of(model).with_optimizer(optimizer)
    choices = PlanChoices().changed(ranks=nodes * ranks, nodes_per_replica=nodes)
    # What the report says of a node may lack the elements that fill a shard.
    filling = 16 * 256 * nodes * ranks * len(plainly.layouts)
    assert 0 <= divided.ram.nbytes - state_bytes(shape, choices) < filling
    yield plainly, divided, others
    divided.close()
    assert not any(parts.planes.files for parts in others.parts.values())
    plainly.close()


def test_planes_read_as_if_they_were_on_one_node(cases: Case):
    plainly, divided, _ = cases
    assert_same_planes(divided, plainly, plainly.layouts.values(), plainly.planes)
    assert not any(
        divided.placement.is_in_ram(unit, plane)
        for unit in plainly.layouts
        for plane in plainly.planes
    )


def test_every_rank_finds_its_shard_where_it_is_in_a_whole_plane(cases: Case):
    """The ranks of another node open what the first of them holds."""
    plainly, _, others = cases
    nodes = 1 + len(others.parts)
    ranks = {2: 1, 3: 2}[nodes]
    for host, parts in others.parts.items():
        memory, device = OpenedMemory(parts.planes), DevicePlanes(CpuBackend())
        opened = HostStates(
            list(plainly.layouts.values()),
            plainly.dtype,
            threads=1,
            sharing=Sharing(memory, Nodes(nodes, nodes * ranks, host)),
            opened=OpenedPlanes(plainly.optimizer, True, (), device),
        )
        for unit, layout in plainly.layouts.items():
            for rank in range(host * ranks, host * ranks + ranks):
                start, stop = Shards(nodes * ranks, rank).bounds(layout.numel)
                ours, theirs = (each.tensor(unit, "weight_high") for each in (opened, plainly))
                assert torch.equal(ours[start:stop], theirs[start:stop])
        opened.close()


def test_units_that_come_to_live_on_a_device_bring_what_other_nodes_have(cases: Case):
    plainly, divided, others = cases
    divided.placement.arrange(["embed"], CpuBackend())
    left = {unit for parts in others.parts.values() for unit, _ in parts.planes.files}
    assert left == plainly.layouts.keys() - {"embed"}
    for plane in (plane for plane in plainly.planes if plane != "grad"):
        size = plainly.nbytes("embed", plane)
        expected = plainly.content("embed", plane, 0, size)
        assert np.array_equal(divided.content("embed", plane, 0, size), expected)


def test_a_node_without_room_says_what_it_lacks(monkeypatch):
    plain = plain_model(tiny_config("llama"))
    model = build_model(plain.config, ModelConfig(source="tiny", dtype="float32"))
    others = OtherNodes(2)
    sharing = Sharing(nodes=Nodes(2, 2, others=others))
    states = HostStates(model.layouts, "float32", threads=1, sharing=sharing)
    monkeypatch.setattr(others.parts[1].ram, "_touch", _full)
    with pytest.raises(FitError, match="^the other node is full$"):
        states.allocate_weights()
    assert states.ram.nbytes == 0 and not others.parts[1].planes.files
    states.close()


def _full(*_: object) -> None:
    raise FitError("the other node is full")
