"""Planes of units that live on the devices of several ranks: rank 0 reads and writes them as
if it had all of them, and every rank holds its shard.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.config.optimizers import ADAMW, MOMENTS
from engine.config.settings import ModelConfig
from engine.model.build.build import build_model
from engine.model.build.measure_shape import shape_of
from engine.planning.schedule.shards import Shards
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.host.device_planes import DevicePlanes
from engine.runtime.host.host_states import HostStates, Sharing
from tests.support.optimizers import KINDS
from tests.support.same_planes import assert_same_planes
from tests.support.tiny import plain_model, pour, tiny_config

pytestmark = pytest.mark.computing

GPU_RESIDENT = ["embed", "block 0", "block 1"]


class OtherDevices:
    """The devices of the other ranks, in this process."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.planes = {rank: DevicePlanes(CpuBackend()) for rank in range(1, ranks)}

    def allocate(self, rank, wanted):
        self.planes[rank].allocate(wanted)

    def release(self, keys):
        for planes in self.planes.values():
            planes.release(keys)

    def read(self, rank, key, begin, end):
        return self.planes[rank].read(key, begin, end)

    def write(self, ranks, key, begin, content):
        for rank in ranks:
            self.planes[rank].write(key, begin, content)


def host_states_of(dtype, optimizer, ranks, wide=48):
    """Returns host states with all planes in RAM, and one with some on the devices of several
    ranks, whose planes hold the same.
    """
    plain = plain_model(tiny_config("llama", intermediate_size=wide))
    model = build_model(plain.config, ModelConfig(source="tiny", dtype=dtype))
    plainly = HostStates(model.layouts, dtype, threads=1)
    others = OtherDevices(ranks)
    divided = HostStates(model.layouts, dtype, threads=1, sharing=Sharing(others=others))
    divided.placement.arrange(GPU_RESIDENT, CpuBackend())
    generator = np.random.default_rng(0)
    for states in (plainly, divided):
        states.allocate_weights()
        pour(plain, model, states)
        states.allocate_states(optimizer=optimizer)
    for unit in model.layouts:
        for plane in MOMENTS:
            size = plainly.nbytes(unit.unit, plane)
            content = generator.integers(0, 255, size).astype(np.uint8)
            for states in (plainly, divided):
                states.put(unit.unit, plane, 0, content)
    return model, plainly, divided, others


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "dtype, optimizer, wide",
    [("float32", "adamw", 48), ("bfloat16", "adamw", 48), ("bfloat16", "adamw_8bit", 160)],
)
def test_planes_read_as_if_they_were_in_one_place(dtype, optimizer, ranks, wide):
    model, plainly, divided, others = host_states_of(dtype, optimizer, ranks, wide)
    names = [plane for plane in plainly.planes if plane != "grad"]
    assert_same_planes(divided, plainly, model.layouts, names)
    divided.placement.arrange((), CpuBackend())  # and they come back whole
    for unit in GPU_RESIDENT:
        for plane in names:
            size = plainly.nbytes(unit, plane)
            found = divided.content(unit, plane, 0, size)
            assert divided.placement.is_in_ram(unit, plane)
            assert np.array_equal(found, plainly.content(unit, plane, 0, size))
    assert not any(planes.tensors for planes in others.planes.values())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("optimizer", KINDS)
def test_each_rank_holds_the_weights_whole_and_a_shard_of_the_rest(optimizer, ranks):
    model, plainly, divided, others = host_states_of("bfloat16", optimizer, ranks, 160)
    layouts = {layout.unit: layout for layout in model.layouts}
    for rank, planes in others.planes.items():
        assert {unit for unit, _ in planes.tensors} == set(GPU_RESIDENT)
        for (unit, plane), tensor in planes.tensors.items():
            layout = layouts[unit]
            start, stop = Shards(ranks, rank).bounds(layout.numel)
            if plane == "weight_high":
                assert tensor.numel() == Shards(ranks).padded(layout.numel)
            elif plane == "weight_low":
                assert tensor.numel() == stop - start
                expected = plainly.tensor(unit, plane)[start:stop]
                assert torch.equal(tensor, expected)
            elif optimizer == ADAMW:
                # Random bytes are no numbers, so bits are compared.
                expected = plainly.tensor(unit, plane)[start:stop]
                assert torch.equal(tensor.view(torch.int32), expected.view(torch.int32))
            elif stop > start:
                first, last = layout.state_bounds(optimizer, plane, start, stop)
                assert torch.equal(tensor, plainly.tensor(unit, plane)[first:last])
    if optimizer == ADAMW:
        assert (
            divided.placement.device_bytes
            == shape_of(model).states.gpu_resident_bytes_on(ranks)[len(GPU_RESIDENT)]
        )
