"""What moments on the disk take and write: the bytes that the report tells, and that the kernel
counts.
"""

from __future__ import annotations

import errno
import fcntl
import os
from itertools import pairwise

import pytest
import torch

from engine.errors import DiskOffloadError
from engine.machine.offload_folder import mount_of
from engine.planning.layout.disk_chunks import DISK_CHUNK_NUMEL, PAGE, disk_chunks, state_ring_bytes
from engine.planning.layout.layout import ParameterSpec, lay_out
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.host.disk_file import DiskFile
from engine.runtime.host.disk_planes import DiskPlanes
from engine.runtime.host.host_states import HostStates
from engine.runtime.host.mapped_memory import map_memory
from tests.support.counted import counted
from tests.support.optimizers import ALL

ROUNDS = 3


def layout_of(numel: int):
    return lay_out("block 0", [ParameterSpec("weight", "block.weight", (numel,), True)])


@pytest.mark.parametrize("optimizer", ALL)
def test_the_kernel_counts_the_bytes_that_steps_write(optimizer, tmp_path):
    mount = mount_of(tmp_path)
    if mount is None or mount.kind not in ("ext4", "xfs"):
        pytest.skip("the kernel counts bytes of disks alone")
    layout = layout_of(DISK_CHUNK_NUMEL + DISK_CHUNK_NUMEL // 2)
    disk = DiskPlanes(tmp_path)
    disk.allocate([layout], optimizer)
    ring = memoryview(map_memory(state_ring_bytes([layout.state_counts], optimizer)))
    before = counted()
    for _ in range(ROUNDS):
        for chunk in disk_chunks(layout, optimizer):
            disk.read_chunk("block 0", chunk.start, ring)
            disk.write_chunk("block 0", chunk.start, ring)
    after = counted()
    written = after["write_bytes"] - before["write_bytes"]
    assert disk.written_bytes == ROUNDS * disk.nbytes
    assert written == pytest.approx(disk.written_bytes, rel=0.02)
    # The first read of reserved space needs no disk.
    read = after["read_bytes"] - before["read_bytes"]
    assert read == pytest.approx((ROUNDS - 1) * disk.nbytes, rel=0.02)
    assert disk.nbytes == pytest.approx(
        sum(layout.state_counts.bytes(optimizer).values()), abs=4 * PAGE
    )
    assert disk.is_direct
    disk.release(["block 0"])


def test_a_file_system_that_cannot_reserve_space_is_written_by_the_c_library(tmp_path, monkeypatch):
    """It writes a byte to each block then, which a file that is opened for whole pages refuses."""
    reserve = os.posix_fallocate

    def emulated(descriptor: int, offset: int, size: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", emulated)
    file = DiskFile(tmp_path, 2 * PAGE)
    memory = memoryview(map_memory(PAGE))
    file.read(memory, PAGE)
    assert bytes(memory) == bytes(PAGE)
    file.close()


def test_a_move_that_fails_half_way_leaves_the_planes_where_they_were(tmp_path, monkeypatch):
    layout = layout_of(5000)
    states = HostStates([layout], "bfloat16", threads=1, disk=tmp_path)
    states.allocate_weights()
    states.allocate_states()
    moments = states.tensor("block 0", "exp_avg")
    moments.copy_(torch.arange(layout.numel))
    kept = moments.clone()

    def fails(*_: object) -> None:
        raise DiskOffloadError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(DiskFile, "write", fails)
        with pytest.raises(DiskOffloadError, match="the disk is gone"):
            states.placement.arrange((), CpuBackend(), ("block 0",))
    assert not states.placement.disk_offloaded
    assert torch.equal(states.tensor("block 0", "exp_avg"), kept)
    states.placement.arrange((), CpuBackend(), ("block 0",))
    assert states.placement.disk_offloaded == {"block 0"}
    content = states.content("block 0", "exp_avg", 0, states.nbytes("block 0", "exp_avg"))
    assert torch.equal(torch.from_numpy(content.copy()).view(torch.float32), kept)
    states.close()


def test_chunks_follow_each_other_and_cut_no_block():
    layout = layout_of(2 * DISK_CHUNK_NUMEL + 4096)
    for optimizer in ALL:
        chunks = disk_chunks(layout, optimizer)
        assert [chunk.start for chunk in chunks] == [0, DISK_CHUNK_NUMEL, 2 * DISK_CHUNK_NUMEL]
        assert [chunk.begin for chunk in chunks[1:]] == [chunk.end for chunk in chunks[:-1]]
        assert chunks[-1].end == layout.state_counts.bytes(optimizer)["exp_avg"]
        for chunk, following in pairwise(chunks):
            assert chunk.file_end == following.offset and following.offset % PAGE == 0
            assert 8 << 20 <= 2 * chunk.bytes <= 33 << 20
