from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine.files import disk_free
from engine.machine.cgroups import cgroup_memory, sample_host_memory, usable_cores
from engine.machine.gpus import GpuSample, GpuSampler
from engine.machine.read_machine import read_machine
from engine.paths import PROGRAM_ROOT

GIB = 2**30


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


V2 = {
    "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw",
    "proc/self/cgroup": "0::/user.slice/job",
}
V1 = {
    "proc/self/mountinfo": (
        "31 24 0:27 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
        "32 24 0:28 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct"
    ),
    "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/",
}


def test_v2_takes_the_tightest_of_all_levels_and_counts_page_cache_as_free(tmp_path):
    root = tree(
        tmp_path,
        V2
        | {
            "sys/fs/cgroup/user.slice/job/memory.max": "max",
            "sys/fs/cgroup/user.slice/job/memory.current": 3 * GIB,
            "sys/fs/cgroup/user.slice/memory.max": 8 * GIB,
            "sys/fs/cgroup/user.slice/memory.high": "max",
            "sys/fs/cgroup/user.slice/memory.current": 5 * GIB,
            "sys/fs/cgroup/user.slice/memory.stat": (
                f"anon 5\ninactive_file {GIB}\nactive_file {GIB // 2}\nslab_reclaimable {GIB // 2}"
            ),
        },
    )
    assert cgroup_memory(root) == (8 * GIB, 5 * GIB)


def test_v2_high_limits_too_and_a_full_group_has_nothing_free(tmp_path):
    root = tree(
        tmp_path,
        V2
        | {
            "sys/fs/cgroup/user.slice/job/memory.max": 8 * GIB,
            "sys/fs/cgroup/user.slice/job/memory.high": 6 * GIB,
            "sys/fs/cgroup/user.slice/job/memory.current": 7 * GIB,
        },
    )
    assert cgroup_memory(root) == (6 * GIB, 0)


def test_v1_limits(tmp_path):
    root = tree(
        tmp_path,
        V1
        | {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 4 * GIB,
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 3 * GIB,
            "sys/fs/cgroup/memory/job/memory.stat": (
                f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0"
            ),
        },
    )
    assert cgroup_memory(root) == (4 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    "mount_root, path", [("/docker/abc", "/docker/abc"), ("/", "/"), ("/docker/abc", "/other")]
)
def test_a_container_that_sees_its_own_group_as_the_top(tmp_path, mount_root, path):
    root = tree(
        tmp_path,
        {
            "proc/self/mountinfo": f"30 24 0:26 {mount_root} /sys/fs/cgroup ro - cgroup2 cgroup rw",
            "proc/self/cgroup": f"0::{path}",
            "sys/fs/cgroup/memory.max": 2 * GIB,
            "sys/fs/cgroup/memory.current": GIB,
        },
    )
    assert cgroup_memory(root) == (2 * GIB, GIB)


def test_without_limits_or_cgroups_nothing_limits(tmp_path):
    assert cgroup_memory(tree(tmp_path / "a", V2)) == (1 << 60, 1 << 60)
    assert cgroup_memory(tmp_path / "nothing") == (1 << 60, 1 << 60)


def test_cores_are_affinity_within_the_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert usable_cores(tmp_path / "nothing") == 64
    assert (
        usable_cores(
            tree(
                tmp_path / "a",
                V2
                | {
                    "sys/fs/cgroup/user.slice/job/cpu.max": "max 100000",
                    "sys/fs/cgroup/user.slice/cpu.max": "350000 100000",
                },
            )
        )
        == 4
    )
    assert (
        usable_cores(
            tree(
                tmp_path / "b",
                V1
                | {
                    "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": 200000,
                    "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": 100000,
                    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1,
                    "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
                },
            )
        )
        == 2
    )


def test_this_machine(tmp_path):
    found = read_machine(tmp_path / "not" / "there")
    assert 1 <= found.cpu_cores <= os.cpu_count() and found.cpu_name
    assert 0 < found.ram_available <= found.ram_limit <= found.ram_total
    assert found.disk_free == pytest.approx(disk_free(tmp_path), rel=0.01) and found.disk_free > 0
    assert json.loads(json.dumps(found.to_dict()))["ram_total"] == found.ram_total


def test_the_memory_sample_sees_what_this_process_takes():
    before, available = sample_host_memory()
    with mmap.mmap(
        -1, 64 << 20
    ) as block:  # pages of its own: what malloc gives may be resident already
        block.write(b"x" * len(block))
        after, _ = sample_host_memory()
        assert after - before > len(block) // 2
    assert 0 < available <= psutil.virtual_memory().total


def test_reading_the_machine_imports_no_torch():
    program = (
        "import sys; from engine.machine.gpus import GpuSampler; from engine.machine.read_machine "
        "import read_machine\nread_machine(); GpuSampler().sample(); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROGRAM_ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr


# ---------------------------------------------------------------- GPUs


class FakeNvml:
    """Stands in for pynvml: three cards, the last of which answers fewer questions."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.open = 0
        self.names = ["NVIDIA H200", "NVIDIA H200", "NVIDIA H200"]
        self.uuids = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlSystemGetCudaDriverVersion(self):
        return 13000

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return 9, 0

    def nvmlDeviceGetCount(self):
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid == "MIG-x":
            return 2
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetName(self, handle):
        return self.names[handle]

    def nvmlDeviceGetUUID(self, handle):
        return self.uuids[handle]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(
            total=(handle + 1) * GIB, free=GIB // 2, used=(handle + 1) * GIB - GIB // 2
        )

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle == 2:
            raise self.NVMLError("Not Supported")
        return 71500

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 40

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle):
        return 1

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle):
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):
        return 16

    nvmlDeviceGetMaxPcieLinkWidth = nvmlDeviceGetCurrPcieLinkWidth


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return fake


def test_gpus_are_read_and_the_library_is_left_closed(nvml):
    found = read_machine()
    first, _, last = found.gpus
    assert (first.name, first.total, first.free, first.driver) == (
        "NVIDIA H200",
        GIB,
        GIB // 2,
        "580.1",
    )
    assert (
        first.pcie_generation,
        first.pcie_generation_max,
        first.pcie_width,
        first.pcie_width_max,
    ) == (1, 5, 16, 16)
    assert (first.power, first.temperature, last.power, last.index) == (71.5, 40, None, 2)
    assert nvml.open == 0 and found.notes == ()


@pytest.mark.parametrize(
    "visible, uuids",
    [
        ("1", ["GPU-aabb-2"]),
        ("2,0", ["GPU-cccc-3", "GPU-aaaa-1"]),
        ("GPU-cc", ["GPU-cccc-3"]),
        ("GPU-aa", []),
        ("0,7,1", ["GPU-aaaa-1"]),
        ("-1", []),
        ("", []),
        ("MIG-x", ["GPU-cccc-3"]),
        ("MIG-y,0", []),
        (" 1 , GPU-aaaa ", ["GPU-aabb-2", "GPU-aaaa-1"]),
    ],
)
def test_only_gpus_that_cuda_may_use_are_seen_in_its_order(nvml, monkeypatch, visible, uuids):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = read_machine()
    assert [gpu.uuid for gpu in found.gpus] == uuids
    assert [gpu.index for gpu in found.gpus] == list(range(len(uuids)))
    assert bool(uuids) or "CUDA_VISIBLE_DEVICES" in found.findings[0].text
    sampler = GpuSampler(0)
    sample = sampler.sample()
    assert (sample.total if sample else None) == (found.gpus[0].total if uuids else None)
    sampler.close()
    assert sampler.sample() is None and nvml.open == 0


def test_cards_that_differ_may_be_numbered_otherwise(nvml, monkeypatch):
    nvml.names[1] = "NVIDIA RTX 4090"
    assert "CUDA_DEVICE_ORDER" in read_machine().notes[0]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert read_machine().notes == ()


def test_a_sample_has_used_bytes_and_watts(nvml):
    sampler = GpuSampler(1)
    assert sampler.sample() == GpuSample(used=2 * GIB - GIB // 2, total=2 * GIB, power=71.5)
    assert GpuSampler(5).sample() is None


@pytest.mark.parametrize(
    ("said", "shown"),
    [("Driver Not Loaded", " (Driver Not Loaded)"), ("NVML Shared Library Not Found", "")],
)
def test_without_a_driver_the_reason_is_a_sentence(nvml, monkeypatch, said, shown):
    def refuse():
        raise nvml.NVMLError(said)

    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    found = read_machine().findings[0]
    assert found.sentence == f"No NVIDIA GPU found{shown}. Training will use the CPU."
    assert not found.is_wrong
    assert GpuSampler().sample() is None
