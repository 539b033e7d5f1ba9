"""GPUs as NVIDIA's management library describes them, and samples of their memory, power and use.
No torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuInfo:
    """One GPU that this process may use. Bytes, degrees Celsius, watts; None where the driver does
    not say.
    """

    name: str
    total: int
    free: int
    driver: str = ""
    index: int = 0
    """Position among the GPUs that CUDA shows to this process."""
    uuid: str = ""
    pcie_generation: int | None = None
    """Now: idle cards fall back to a slower generation."""
    pcie_width: int | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    temperature: int | None = None
    power: float | None = None


@dataclass(frozen=True)
class GpuSample:
    """Driver-reported bytes of the whole card, and watts (None where not reported)."""

    used: int
    total: int
    power: float | None


# ---------------------------------------------------------------- GPUs


class GpuSampler:
    """Reads one GPU's memory and power through a kept driver handle: microseconds, no CUDA call, no
    synchronization.
    """

    def __init__(self, index: int = 0):
        """`index` counts the GPUs that CUDA shows to this process. Without such a GPU, `sample`
        returns None.
        """
        self._nvml, _ = _open_nvml()
        self._handle = None
        if self._nvml is not None:
            handles = _visible_handles(self._nvml)
            self._handle = handles[index] if index < len(handles) else None

    def sample(self) -> GpuSample | None:
        """The card now, or None where there is none or the driver does not answer."""
        if self._handle is None:
            return None
        memory = _ask(self._nvml, self._nvml.nvmlDeviceGetMemoryInfo, self._handle)
        if memory is None:
            return None
        return GpuSample(memory.used, memory.total, _power(self._nvml, self._handle))

    def close(self) -> None:
        self._handle = None
        if self._nvml is not None:
            _ask(self._nvml, self._nvml.nvmlShutdown)
            self._nvml = None


def read_gpus() -> tuple[list[GpuInfo], list[str]]:
    nvml, problem = _open_nvml()
    if nvml is None:
        return [], [problem]
    gpus, notes = [], []
    try:
        driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion) or ""
        for index, handle in enumerate(_visible_handles(nvml)):
            gpu = _read_gpu(nvml, handle, index, driver)
            if gpu is None:
                notes.append(f"GPU {index} does not report its memory, so it is left out.")
            else:
                gpus.append(gpu)
        if not gpus and not notes:
            hidden = (
                " that CUDA_VISIBLE_DEVICES lets this process use"
                if "CUDA_VISIBLE_DEVICES" in os.environ
                else ""
            )
            notes.append(f"There is no NVIDIA GPU{hidden}, so blocks compute on the CPU.")
        if (
            len({gpu.name for gpu in gpus}) > 1
            and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        ):
            notes.append(
                "The GPUs differ and CUDA may number them in another order; "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID to make both orders the same."
            )
    finally:
        _ask(nvml, nvml.nvmlShutdown)
    return gpus, notes


def _read_gpu(nvml: Any, handle: Any, index: int, driver: str) -> GpuInfo | None:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        return None
    return GpuInfo(
        name=_ask(nvml, nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU",
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
    )


def _power(nvml: Any, handle: Any) -> float | None:
    milliwatts = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return None if milliwatts is None else milliwatts / 1000


def _open_nvml() -> tuple[Any, str]:
    """The initialised library, or None and one sentence on why there is none."""
    try:
        import pynvml
    except ImportError:
        return (
            None,
            "The package nvidia-ml-py is not installed, so GPUs are not seen; blocks compute on "
            "the CPU.",
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"No NVIDIA driver answers ({error}), so blocks compute on the CPU."
    return pynvml, ""


def _ask(nvml: Any, question: Callable[..., Any], *args: Any) -> Any:
    try:
        return question(*args)
    except nvml.NVMLError:
        return None


def _visible_handles(nvml: Any) -> list[Any]:
    """Driver handles in the order in which CUDA numbers the devices of this process. Like CUDA,
    stops at the first entry of CUDA_VISIBLE_DEVICES that names no device.
    """
    count = _ask(nvml, nvml.nvmlDeviceGetCount) or 0
    handles = [
        handle
        for i in range(count)
        if (handle := _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, i)) is not None
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return handles
    chosen = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit():
            handle = handles[int(entry)] if int(entry) < len(handles) else None
        elif entry.startswith("MIG-"):
            handle = _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, entry)
        else:
            matches = [
                h
                for h in handles
                if entry and (_ask(nvml, nvml.nvmlDeviceGetUUID, h) or "").startswith(entry)
            ]
            handle = matches[0] if len(matches) == 1 else None
        if handle is None:
            break
        chosen.append(handle)
    return chosen
