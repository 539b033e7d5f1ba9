"""GPUs, read through NVIDIA's management library (NVML), and samples of their memory and power.
Neither torch nor CUDA is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NO_DRIVER = "NVML Shared Library Not Found"
"""NVML's words where no driver is installed."""


@dataclass(frozen=True)
class GpuInfo:
    """One GPU that this process may use. Memory is in bytes, temperature in degrees Celsius, power
    in watts; a field is None where the driver does not report it.
    """

    name: str
    total: int
    free: int
    driver: str = ""
    index: int = 0
    """Index among the GPUs that CUDA shows to this process."""
    uuid: str = ""
    pcie_generation: int | None = None
    """The link currently runs in this PCIe generation. Idle cards switch to a slower one."""
    pcie_width: int | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    temperature: int | None = None
    power: float | None = None
    capability: tuple[int, int] | None = None
    """CUDA's compute capability, such as (9, 0)."""


@dataclass(frozen=True)
class NvidiaDriver:
    """What the driver of NVIDIA says of the cards of this machine."""

    gpus: tuple[GpuInfo, ...] = ()
    """Cards that this process may use."""
    without_memory: tuple[str, ...] = ()
    """Names of cards that report no memory."""
    cards: int = 0
    """Number of cards, also those that CUDA_VISIBLE_DEVICES hides from this process."""
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver supports, such as (13, 0)."""
    problem: str = ""
    """Why it does not answer, in its own words."""


@dataclass(frozen=True)
class GpuSample:
    """The driver reports this memory of the whole card (bytes) and this power (watts; None where it
    does not report power).
    """

    used: int
    total: int
    power: float | None


class GpuSampler:
    """Reads one GPU's memory and power through a driver handle that it keeps. This takes
    microseconds, and needs no CUDA call and no synchronization.
    """

    def __init__(self, index: int = 0):
        """Opens the GPU at `index` among those that CUDA shows to this process. Without such a GPU,
        `sample` returns None.
        """
        self._nvml, _ = _open_nvml()
        self._handle = None
        if self._nvml is not None:
            handles = _visible_handles(self._nvml)
            self._handle = handles[index] if index < len(handles) else None

    def sample(self) -> GpuSample | None:
        """Returns the card's current figures, or None where there is no card or the driver does not
        answer.
        """
        if self._handle is None:
            return None
        memory = _ask(self._nvml, self._nvml.nvmlDeviceGetMemoryInfo, self._handle)
        if memory is None:
            return None
        return GpuSample(memory.used, memory.total, _power(self._nvml, self._handle))

    def close(self) -> None:
        """Closes the driver library."""
        self._handle = None
        if self._nvml is not None:
            _ask(self._nvml, self._nvml.nvmlShutdown)
            self._nvml = None


def read_driver() -> NvidiaDriver:
    """Returns what the driver says; a machine without one has no cards and a `problem`."""
    nvml, problem = _open_nvml()
    if nvml is None:
        return NvidiaDriver(problem=problem)
    gpus: list[GpuInfo] = []
    without_memory: list[str] = []
    try:
        driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion) or ""
        for index, handle in enumerate(_visible_handles(nvml)):
            gpu = _read_gpu(nvml, handle, index, driver)
            if gpu is None:
                without_memory.append(_name(nvml, handle))
            else:
                gpus.append(gpu)
        cards = _ask(nvml, nvml.nvmlDeviceGetCount) or 0
        version = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    finally:
        _ask(nvml, nvml.nvmlShutdown)
    # NVML writes 13.0 as 13000.
    cuda = None if version is None else (version // 1000, version % 1000 // 10)
    return NvidiaDriver(tuple(gpus), tuple(without_memory), cards, cuda)


def order_note(gpus: Sequence[GpuInfo]) -> list[str]:
    """Returns a sentence on cards that CUDA may number otherwise than the driver; none else."""
    differ = len({gpu.name for gpu in gpus}) > 1
    if not differ or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return []
    return [
        "The GPUs differ and CUDA may number them in another order; "
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID to make both orders the same."
    ]


def _read_gpu(nvml: Any, handle: Any, index: int, driver: str) -> GpuInfo | None:
    """Returns the description of one GPU, or None where it does not report its memory."""
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        return None
    return GpuInfo(
        name=_name(nvml, handle),
        total=memory.total,
        free=memory.free,
        driver=driver,
        index=index,
        uuid=_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or "",
        pcie_generation=_ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_width=_ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_generation_max=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width_max=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        temperature=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power=_power(nvml, handle),
        capability=_ask(nvml, _capability, nvml, handle),
    )


def _name(nvml: Any, handle: Any) -> str:
    return _ask(nvml, nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"


def _capability(nvml: Any, handle: Any) -> tuple[int, int]:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return int(major), int(minor)


def _power(nvml: Any, handle: Any) -> float | None:
    """Returns the power that the card draws now, in watts; None where the driver does not report
    it.
    """
    milliwatts = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return None if milliwatts is None else milliwatts / 1000


def _open_nvml() -> tuple[Any, str]:
    """Returns the initialized library and an empty text, or None and its words on why it is
    missing.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, str(error)
    return pynvml, ""


def _ask(nvml: Any, question: Callable[..., Any], *args: Any) -> Any:
    """Returns the driver's answer, or None where it reports an error."""
    try:
        return question(*args)
    except nvml.NVMLError:
        return None


def _visible_handles(nvml: Any) -> list[Any]:
    """Returns driver handles in the order in which CUDA numbers the devices of this process. Like
    CUDA, it stops at the first entry of CUDA_VISIBLE_DEVICES that does not name a device.
    """
    count = _ask(nvml, nvml.nvmlDeviceGetCount) or 0
    handles = [_ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
    handles = [handle for handle in handles if handle is not None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return handles
    chosen: list[Any] = []
    for entry in visible.split(","):
        handle = _named_handle(nvml, handles, entry.strip())
        if handle is None:
            break
        chosen.append(handle)
    return chosen


def _named_handle(nvml: Any, handles: Sequence[Any], entry: str) -> Any:
    """Returns the device that an entry of CUDA_VISIBLE_DEVICES names: by its number, as a part of a
    card (MIG), or by the beginning of its UUID. Returns None where it does not name exactly one
    device.
    """
    if entry.isdigit():
        return handles[int(entry)] if int(entry) < len(handles) else None
    if entry.startswith("MIG-"):
        return _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, entry)
    if not entry:
        return None
    uuids = [_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or "" for handle in handles]
    matches = [handle for handle, uuid in zip(handles, uuids) if uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
