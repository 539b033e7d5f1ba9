"""What a run takes of its machine is summed up here over its ranks, of which most runs have one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.machine.cgroups import private_memory
from engine.runs.record.events import MemorySampled, RankSample
from engine.runtime.device.backend import Backend
from engine.runtime.distributed.messages import DeviceMemory
from engine.runtime.distributed.worker_group import WorkerGroup


def samples_of_ranks(
    workers: WorkerGroup, sample: MemorySampled, powers: Sequence[float]
) -> list[RankSample]:
    """Returns the figures of each rank. `sample` has those of the device of rank 0; `powers` are
    those of the cards in watts, and there are none on a CPU.
    """
    devices = {
        0: DeviceMemory(
            sample.gpu_allocated,
            sample.gpu_reserved,
            sample.gpu_peak,
            in_use=sample.gpu_driver,
            total=sample.gpu_total,
        )
    } | workers.device_memory()
    host = {0: private_memory()} | workers.host_memory()
    watts = dict(enumerate(powers))
    return [
        RankSample(
            rank=rank,
            host=host.get(rank, device.host),
            gpu_allocated=device.allocated,
            gpu_reserved=device.reserved,
            gpu_peak=device.peak,
            gpu_driver=device.in_use,
            gpu_total=device.total,
            power=watts.get(rank, 0.0),
        )
        for rank, device in devices.items()
    ]


def gpus_here(device: str, workers: WorkerGroup | None) -> int:
    """Returns how many devices of this node compute a run on `device`; ranks on the CPU share
    one.
    """
    return 1 if workers is None or device == "cpu" else workers.plan.ranks


def gpus_of(device: str, workers: WorkerGroup | None) -> int:
    """Returns how many devices of all nodes compute a run on `device`."""
    return 1 if workers is None or device == "cpu" else workers.place.world_size


def fullest_gpu(
    backend: Backend, workers: WorkerGroup | None
) -> Callable[[], Mapping[str, int]] | None:
    """Returns what tells the memory of this GPU as `Backend.memory` does, with the largest
    `peak_reserved` of all GPUs of the run. It is None on a CPU.
    """
    if backend.device.type == "cpu" or workers is None:
        return None if backend.device.type == "cpu" else backend.memory

    def memory() -> Mapping[str, int]:
        own = backend.memory()
        others = [other.peak_reserved for other in workers.device_memory().values()]
        return own | {"peak_reserved": max([own["peak_reserved"], *others])}

    return memory
