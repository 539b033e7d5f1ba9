"""What this machine has: cores, memory within its real limits, GPUs and disk, read without torch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import math
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


@dataclass(frozen=True)
class GpuInfo:
    """One GPU that this process may use. Bytes, degrees Celsius, watts; None where the driver does not say."""

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
class Machine:
    """Bytes throughout."""

    cpu_name: str
    cpu_cores: int
    """Cores that this process may use."""
    ram_total: int
    ram_limit: int
    """What all processes of this session may use together: the smallest of RAM and the cgroup limits above us."""
    ram_available: int
    """What can still be allocated within the limit; page cache counts as available."""
    gpus: tuple[GpuInfo, ...] = ()
    disk_path: str = ""
    disk_free: int = 0
    notes: tuple[str, ...] = ()
    """Sentences on what could not be read, and why."""
    here: bool = False
    """This machine as it is, and none that is only asked about."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class GpuSample:
    """Driver-reported bytes of the whole card, and watts (None where not reported)."""

    used: int
    total: int
    power: float | None


def read_machine(disk_path: str | os.PathLike[str] = ".") -> Machine:
    """Read everything now. `disk_path` need not exist yet. What cannot be read is named in `notes`, never raised."""
    memory = psutil.virtual_memory()
    limit, within = cgroup_memory()
    gpus, notes = _read_gpus()
    try:
        free = disk_free(disk_path)
    except OSError as error:
        free = 0
        notes.append(f"The disk at {disk_path} cannot be read ({error.strerror}).")
    return Machine(cpu_name=_cpu_name(), cpu_cores=usable_cores(), ram_total=memory.total,
                   ram_limit=min(memory.total, limit), ram_available=max(0, min(memory.available, within)),
                   gpus=tuple(gpus), disk_path=str(disk_path), disk_free=free, notes=tuple(notes), here=True)


def sample_host_memory() -> tuple[int, int]:
    """(resident bytes of this process, bytes that can still be allocated within the real limits)."""
    available = min(psutil.virtual_memory().available, cgroup_memory()[1])
    return psutil.Process().memory_info().rss, max(0, available)


def private_memory() -> int:
    """Resident bytes of this process that count as taken. Pages of files, its libraries', do not: the kernel can drop them, and
    `ram_available` counts them as available."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def give_back_free_memory() -> None:
    """Return to the kernel what the allocator of the C library keeps of freed memory. How much it keeps depends on which thread
    freed what when: without this, the same program comes to resident sizes a hundred MiB apart. Only glibc can."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library; Windows opens no library without a name
        ctypes.CDLL(None).malloc_trim(0)


def disk_free(path: str | os.PathLike[str]) -> int:
    """Bytes that this user may still write at `path` or, where it does not exist, at its nearest existing parent."""
    place = Path(path).expanduser().absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


# ---------------------------------------------------------------- CPU


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its CPU affinity within its cgroups' quota, at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _cgroup_folders(root, "cpu"):
        quota = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
            cores = min(cores, int(quota[0]) / int(quota[1]))
    return max(1, math.ceil(cores))


@functools.cache
def compiler_problem() -> str:
    """Why nothing can be compiled on this machine, in words; empty where it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
        return "there is no C compiler, which Triton needs"
    return ""


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())
    except OSError:
        pass
    return platform.machine()


# ---------------------------------------------------------------- cgroups


def cgroup_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(limit, bytes still free below it), each the smallest over this process's cgroup and all above it, v1 and v2;
    2**60 where nothing limits. File pages that the kernel can drop count as free."""
    limit = free = _NO_LIMIT
    for folder in _cgroup_folders(root, "memory"):
        limits = [_number(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        here = min([value for value in limits if value is not None], default=_NO_LIMIT)
        if here >= _NO_LIMIT:
            continue
        used = _number(folder / "memory.current")
        if used is None:
            used = _number(folder / "memory.usage_in_bytes") or 0
        limit, free = min(limit, here), min(free, here - max(0, used - _reclaimable(folder)))
    return limit, max(0, free)


def _reclaimable(folder: Path) -> int:
    words = _words(folder / "memory.stat")
    values = dict(zip(words[::2], words[1::2]))
    total = "total_" if "total_inactive_file" in values else ""
    names = (f"{total}inactive_file", f"{total}active_file", "slab_reclaimable")
    return sum(int(values.get(name, 0)) for name in names)


@functools.lru_cache(maxsize=8)
def _cgroup_folders(root: Path, controller: str) -> tuple[Path, ...]:
    """This process's cgroup for a controller and every cgroup above it that can be seen, innermost first."""
    mounts: list[tuple[bool, str, Path]] = []
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 5 or not right or right[0] not in ("cgroup", "cgroup2"):
            continue
        if right[0] == "cgroup2" or controller in right[-1].split(","):
            mounts.append((right[0] == "cgroup2", left[3], root / left[4].replace("\\040", " ").lstrip("/")))
    found: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        second = number == "0" and not controllers
        if not second and controller not in controllers.split(","):
            continue
        for is_second, mount_root, mount_point in mounts:
            if is_second != second:
                continue
            inside = Path(path)
            # A container may see its own cgroup mounted as the top while its path is the host's.
            relative = inside.relative_to(mount_root) if inside.is_relative_to(mount_root) else Path()
            folder = mount_point / relative
            found += [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount_point))]
    return tuple(dict.fromkeys(found))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None


# ---------------------------------------------------------------- GPUs


class GpuSampler:
    """Reads one GPU's memory and power through a kept driver handle: microseconds, no CUDA call, no synchronization."""

    def __init__(self, index: int = 0):
        """`index` counts the GPUs that CUDA shows to this process. Without such a GPU, `sample` returns None."""
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


def _read_gpus() -> tuple[list[GpuInfo], list[str]]:
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
            hidden = " that CUDA_VISIBLE_DEVICES lets this process use" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
            notes.append(f"There is no NVIDIA GPU{hidden}, so blocks compute on the CPU.")
        if len({gpu.name for gpu in gpus}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            notes.append("The GPUs differ and CUDA may number them in another order; "
                         "set CUDA_DEVICE_ORDER=PCI_BUS_ID to make both orders the same.")
    finally:
        _ask(nvml, nvml.nvmlShutdown)
    return gpus, notes


def _read_gpu(nvml: Any, handle: Any, index: int, driver: str) -> GpuInfo | None:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        return None
    return GpuInfo(
        name=_ask(nvml, nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU", total=memory.total, free=memory.free,
        driver=driver, index=index, uuid=_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or "",
        pcie_generation=_ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_width=_ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_generation_max=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width_max=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        temperature=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power=_power(nvml, handle))


def _power(nvml: Any, handle: Any) -> float | None:
    milliwatts = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return None if milliwatts is None else milliwatts / 1000


def _open_nvml() -> tuple[Any, str]:
    """The initialised library, or None and one sentence on why there is none."""
    try:
        import pynvml
    except ImportError:
        return None, "The package nvidia-ml-py is not installed, so GPUs are not seen; blocks compute on the CPU."
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
    """Driver handles in the order in which CUDA numbers the devices of this process. Like CUDA, stops at the first
    entry of CUDA_VISIBLE_DEVICES that names no device."""
    count = _ask(nvml, nvml.nvmlDeviceGetCount) or 0
    handles = [handle for i in range(count) if (handle := _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, i)) is not None]
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
            matches = [h for h in handles if entry and (_ask(nvml, nvml.nvmlDeviceGetUUID, h) or "").startswith(entry)]
            handle = matches[0] if len(matches) == 1 else None
        if handle is None:
            break
        chosen.append(handle)
    return chosen
