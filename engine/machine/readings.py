"""Readings of this machine and of the packages installed here, by which `engine.machine.findings`
tells what stops or slows training. No torch: what torch was built for stands in one of its files.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from engine.files import existing_part, takes_direct_access
from engine.machine.cgroups import cgroup_memory
from engine.machine.gpus import NvidiaDriver, read_driver
from engine.paths import PROGRAM_ROOT, cache_folder

PROGRAM = "ramstream"
MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
"""Makers of GPUs by their PCI id."""
_DISPLAY = "0x03"
"""Class of displays and GPUs on the PCI bus."""
_CARD_BYTES = 4 << 30
"""Memory from which on an AMD GPU counts as a card to compute on."""
_WSL_CUDA = "usr/lib/wsl/lib/libcuda.so.1"
"""NVIDIA's library that Windows brings into WSL2, where no PCI bus shows the card."""


@dataclass(frozen=True)
class TorchBuild:
    """A build of PyTorch, and what it was built for."""

    version: str
    cuda: str | None = None
    """Version of CUDA, such as 13.0."""
    hip: str | None = None
    """Version of ROCm, for GPUs of AMD."""
    xpu: str | None = None
    """Version for GPUs of Intel."""


@dataclass(frozen=True)
class CudaTrial:
    """What PyTorch did with the GPU."""

    problem: str = ""
    """Why it cannot use it, in its own words."""
    lock_tried: int = 0
    """Bytes of RAM that were to be locked for transfers."""
    locked: int = 0
    """Bytes that the system has locked."""


@dataclass(frozen=True)
class KernelCache:
    """A folder in which compiled kernels are kept."""

    folder: str
    variable: str
    """Environment variable that names another folder."""
    is_writable: bool = True


@dataclass(frozen=True)
class Package:
    """A package, or Python itself, and the versions of it that are tested."""

    name: str
    version: str
    tested: str
    """Such as >=2.11,<2.14."""

    @property
    def is_tested(self) -> bool:
        return SpecifierSet(self.tested).contains(self.version, prereleases=True)


@dataclass(frozen=True)
class Readings:
    """All that findings follow from. Sizes are in bytes."""

    driver: NvidiaDriver = field(default_factory=NvidiaDriver)
    cards: tuple[str, ...] = ()
    """Makers of the cards of this machine, as the PCI bus shows them, whether or not a driver
    answers. GPUs that are a part of the processor are none.
    """
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES; None where it is not set."""
    torch: TorchBuild | None = None
    """None where PyTorch is not installed."""
    trial: CudaTrial | None = None
    """None where PyTorch was not asked, which takes seconds."""
    is_wsl: bool = False
    is_container: bool = False
    lock_limit: int | None = None
    """Limit of locked RAM (`ulimit -l`); None without one."""
    ram_total: int = 0
    ram_limit: int = 0
    compiler_problem: str = ""
    caches: tuple[KernelCache, ...] = ()
    runs: str = "runs"
    runs_direct: bool | None = True
    """Whether files of runs can be written past the page cache; None where that is not known."""
    packages: tuple[Package, ...] = ()

    @property
    def has_nvidia(self) -> bool:
        """Whether there is a card of NVIDIA, whether or not it can be used."""
        return bool(self.driver.cards) or "NVIDIA" in self.cards


def read(runs: str | os.PathLike[str]) -> Readings:
    """Returns the readings of this machine, with runs in the folder `runs`, which need not exist
    yet.
    """
    driver, total = read_driver(), psutil.virtual_memory().total
    return Readings(
        driver=driver,
        cards=tuple(cards()),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        torch=torch_build(),
        is_wsl=is_wsl(),
        is_container=is_container(),
        lock_limit=lock_limit(),
        ram_total=total,
        ram_limit=min(total, cgroup_memory()[0]),
        compiler_problem=compiler_problem(),
        caches=tuple(kernel_caches(bool(driver.gpus))),
        runs=str(runs),
        runs_direct=takes_direct_access(Path(runs)),
        packages=packages(),
    )


# ---------------------------------------------------------------- GPUs


def cards(root: Path = Path("/")) -> Iterator[str]:
    """Yields the maker of each GPU that is a card of its own."""
    if (root / _WSL_CUDA).exists():
        yield "NVIDIA"
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if not _text(device / "class").startswith(_DISPLAY):
            continue
        maker = MAKERS.get(_text(device / "vendor"), "")
        memory = _text(device / "mem_info_vram_total")
        # Intel's processors have their GPU on the first bus. Those of AMD own little memory.
        is_card = {
            "NVIDIA": True,
            "AMD": memory.isdigit() and int(memory) >= _CARD_BYTES,
            "Intel": not device.name.startswith("0000:00:"),
        }
        if is_card.get(maker, False):
            yield maker


def is_wsl() -> bool:
    """Returns whether this is the Windows Subsystem for Linux."""
    return "microsoft" in platform.uname().release.lower()


def lock_limit() -> int | None:
    """Returns the bytes of RAM that this process may lock; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def is_container(root: Path = Path("/")) -> bool:
    """Returns whether this process is in a container of Docker, Podman or Kubernetes."""
    marks = (root / ".dockerenv", root / "run/.containerenv")
    return any(mark.exists() for mark in marks) or "KUBERNETES_SERVICE_HOST" in os.environ


# ---------------------------------------------------------------- packages


@functools.cache
def torch_build() -> TorchBuild | None:
    """Returns the build of PyTorch that this process has, or would import."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    return build_in(text)


def build_in(text: str) -> TorchBuild:
    """Returns the build that torch's file of versions describes."""
    found: dict[str, str | None] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
        elif isinstance(node, ast.AnnAssign):
            name = ast.unparse(node.target)
        else:
            continue
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str | None):
            found[name] = node.value.value
    version = found.get("__version__") or ""
    return TorchBuild(version, found.get("cuda"), found.get("hip"), found.get("xpu"))


@functools.cache
def packages() -> tuple[Package, ...]:
    """Returns Python and the packages that this program needs, as they are installed here."""
    python, needed = _needs()
    found = [Package("Python", platform.python_version(), python)]
    for text in needed:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an import of it says so
        tested = sorted(map(str, requirement.specifier), reverse=True)  # the least comes first
        found.append(Package(requirement.name, version, ",".join(tested)))
    return tuple(found)


def _needs() -> tuple[str, list[str]]:
    """Returns the tested versions of Python, and the requirements of this program: those of its
    source tree, or else of its installation.
    """
    file = PROGRAM_ROOT / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == PROGRAM:
            return project["requires-python"], project["dependencies"]
    try:
        python = importlib.metadata.metadata(PROGRAM)["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        return "", []
    return python, importlib.metadata.requires(PROGRAM) or []


# ---------------------------------------------------------------- kernels


@functools.cache
def compiler_problem() -> str:
    """Returns the reason why kernels cannot be compiled on this machine, or an empty text where
    they can.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compilers = (os.environ.get("CC") or "cc", "gcc", "clang")
    if not any(shutil.which(name) for name in compilers):
        return "there is no C compiler, which Triton needs"
    return ""


def kernel_caches(has_gpu: bool) -> Iterator[KernelCache]:
    """Yields the folders in which compiled kernels are kept: those of the processor's, and of the
    GPU's where there is one.
    """
    # numba keeps kernels beside their source, or else in a folder of the user.
    beside = PROGRAM_ROOT / "engine/runtime/optimizer/__pycache__"
    of_user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    yield _kept_in("NUMBA_CACHE_DIR", beside, of_user / "numba")
    if has_gpu:
        named = "TORCHINDUCTOR_CACHE_DIR"
        yield _kept_in(named if named in os.environ else "RAMSTREAM_CACHE", cache_folder())
        yield _kept_in("TRITON_CACHE_DIR", Path("~/.triton/cache"))


def _kept_in(variable: str, *usual: Path) -> KernelCache:
    """Returns the folder that a variable names, or else the first of the usual ones that can be
    written in, or the last of them.
    """
    named = os.environ.get(variable)
    places = [Path(named)] if named else list(usual)
    writable = [place for place in places if _is_writable(place)]
    return KernelCache(str([*writable, places[-1]][0]), variable, bool(writable))


def _is_writable(folder: Path) -> bool:
    try:
        return os.access(existing_part(folder), os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # it may not be looked at, or there is no home folder
        return False


def _text(file: Path) -> str:
    """Returns the text of a small file of the system; empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
