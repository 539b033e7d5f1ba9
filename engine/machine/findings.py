"""What stops or slows training on this machine, each in one sentence with the command that mends
it. `launch.py doctor`, Hardware and the fit report show the same ones.

Each check is a pure function of `Readings`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from engine.machine.gpus import NO_DRIVER, NvidiaDriver
from engine.machine.readings import Package, Readings
from engine.paths import program_command
from engine.text import in_gib

BF16_CAPABILITY = (8, 0)
"""First compute capability with products in bfloat16."""
CUDA_13_CAPABILITY = (7, 5)
"""First compute capability for which libraries of CUDA 13 are built."""
HIDES_ALL = ("", "-1", "none", "void", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES with which a person hides all GPUs."""
_INDEX = "https://download.pytorch.org/whl/"
_WSL_MEMORY = "powershell.exe -c 'notepad $env:USERPROFILE\\.wslconfig'"


class Effect(StrEnum):
    """What a finding does to training."""

    RIGHT = "right"
    NOTE = "note"
    """It is as it should be, and limits what fits."""
    SLOWS = "slows"
    NO_GPU = "no_gpu"
    """There is a GPU, and training would take the CPU."""


class Check(StrEnum):
    """What is checked."""

    GPU = "GPU"
    TORCH = "PyTorch"
    CUDA = "CUDA"
    BF16 = "bfloat16"
    LOCKED = "Locked RAM"
    RAM = "RAM"
    KERNELS = "Kernels"
    CACHES = "Kernel cache"
    DISK = "Disk"
    VERSIONS = "Versions"


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    check: Check
    text: str
    effect: Effect = Effect.RIGHT
    command: str = ""
    """What mends it; empty where no command does."""

    @property
    def sentence(self) -> str:
        """The text, with the command between backticks."""
        return f"{self.text} To fix it: `{self.command}`" if self.command else self.text

    @property
    def is_wrong(self) -> bool:
        """Whether it stops or slows training."""
        return self.effect in (Effect.SLOWS, Effect.NO_GPU)


def findings(readings: Readings) -> tuple[Finding, ...]:
    """Returns the result of each check that this machine has something for."""
    found = (check(readings) for check in CHECKS)
    return tuple(finding for finding in found if finding is not None)


def without_gpu(found: tuple[Finding, ...]) -> Finding | None:
    """Returns why a GPU of this machine would not be used; None where it is, or there is none."""
    return next((each for each in found if each.effect == Effect.NO_GPU), None)


# ---------------------------------------------------------------- the GPU


def gpu(readings: Readings) -> Finding:
    """Finds whether there is a GPU that this process may use."""
    torch, driver = readings.torch, readings.driver
    if torch is not None and (torch.hip or torch.xpu):
        maker = "AMD" if torch.hip else "Intel"
        text = (
            f"PyTorch {torch.version} is built for GPUs of {maker}, on which Ramstream does not "
            "train: it takes NVIDIA GPUs or the CPU."
        )
        return Finding(Check.GPU, text, Effect.NO_GPU, _install_torch(readings))
    if driver.gpus or driver.without_memory:
        return _driven(driver)
    if driver.cards:
        return _hidden(readings)
    if "NVIDIA" in readings.cards:
        return _no_driver(readings)
    return _of_another_maker(readings)


def _driven(driver: NvidiaDriver) -> Finding:
    """The driver shows GPUs to this process."""
    if not driver.gpus:
        text = (
            f"The {driver.without_memory[0]} reports no memory of its own, as one that shares the "
            "computer's RAM, and no plan can be made for it, so the GPU is not used."
        )
        return Finding(Check.GPU, text, Effect.NO_GPU)
    if driver.without_memory:
        text = f"The {driver.without_memory[0]} does not report its memory, so it is left out."
        return Finding(Check.GPU, text, Effect.NOTE)
    names = list(dict.fromkeys(each.name for each in driver.gpus))
    count = f"{len(driver.gpus)} x " if len(driver.gpus) > 1 and len(names) == 1 else ""
    version = f", driver {driver.gpus[0].driver}" if driver.gpus[0].driver else ""
    return Finding(Check.GPU, f"{count}{', '.join(names)}{version}")


def _of_another_maker(readings: Readings) -> Finding:
    """There is no card of NVIDIA."""
    if readings.cards:
        text = (
            f"The {readings.cards[0]} GPU is not used: Ramstream trains on NVIDIA GPUs or on the "
            "CPU."
        )
        return Finding(Check.GPU, text, Effect.NO_GPU)
    driver = readings.driver
    why = "" if driver.problem in ("", NO_DRIVER) else f" ({driver.problem})"
    text = f"No NVIDIA GPU found{why}. Training will use the CPU."
    return Finding(Check.GPU, text, Effect.NOTE)


def _hidden(readings: Readings) -> Finding:
    """CUDA_VISIBLE_DEVICES leaves no card."""
    count, visible = readings.driver.cards, readings.visible or ""
    cards = "its GPU" if count == 1 else f"its {count} GPUs"
    if visible.strip() in HIDES_ALL:
        text = f"CUDA_VISIBLE_DEVICES hides {cards}. Training will use the CPU."
        return Finding(Check.GPU, text, Effect.NOTE)
    text = (
        f"CUDA_VISIBLE_DEVICES is {visible}, which names no GPU of this machine, so none of "
        f"{cards} is used."
    )
    return Finding(Check.GPU, text, Effect.NO_GPU, "unset CUDA_VISIBLE_DEVICES")


def _no_driver(readings: Readings) -> Finding:
    problem = readings.driver.problem
    if readings.is_container:
        text = "The machine has an NVIDIA GPU, and this container may not use it."
        command = "docker run --gpus all"
    elif readings.is_wsl:
        text = "The NVIDIA driver of Windows does not answer in WSL2, so the GPU is not used."
        command = "wsl.exe --update"
    elif problem == NO_DRIVER:
        text = "There is an NVIDIA GPU, and no driver for it, so the GPU is not used."
        command = "sudo ubuntu-drivers install"
    else:
        said = f" ({problem})" if problem else ""
        text = f"The NVIDIA driver does not answer{said}, so the GPU is not used."
        # A driver that was updated meanwhile is loaded at the next start.
        command = "sudo reboot" if "mismatch" in problem else "sudo modprobe nvidia"
    return Finding(Check.GPU, text, Effect.NO_GPU, command)


def torch(readings: Readings) -> Finding:
    """Finds whether PyTorch is built for the GPU."""
    build, gpus = readings.torch, readings.driver.gpus
    if build is None:
        effect = Effect.NO_GPU if gpus else Effect.SLOWS
        return Finding(
            Check.TORCH, "PyTorch is not installed.", effect, _install_torch(readings, True)
        )
    if build.cuda is None and gpus:
        text = (
            f"PyTorch {build.version} is built without CUDA, so the {gpus[0].name} would not be "
            "used."
        )
        return Finding(Check.TORCH, text, Effect.NO_GPU, _install_torch(readings))
    built_for = f"CUDA {build.cuda}" if build.cuda else "the CPU"
    return Finding(Check.TORCH, f"{build.version}, built for {built_for}")


def cuda(readings: Readings) -> Finding | None:
    """Finds whether driver, card and PyTorch are fit for each other."""
    build, driver = readings.torch, readings.driver
    if build is None or build.cuda is None or not driver.gpus:
        return None
    wanted, has = _version(build.cuda), driver.cuda
    card = driver.gpus[0]
    offers = "" if has is None else f"{has[0]}.{has[1]}"
    # Within a major version, an older driver will do, and a package of CUDA that makes it newer may
    # be there that NVML does not see. A trial knows.
    works = readings.trial is not None and not readings.trial.problem
    if has is not None and has[0] < wanted[0] and not works:
        text = (
            f"The driver {card.driver} offers CUDA {offers}, and PyTorch {build.version} is built "
            f"for CUDA {build.cuda}, so the {card.name} would not be used."
        )
        command = _install_torch(readings) if has[0] >= 12 else "sudo ubuntu-drivers install"
        return Finding(Check.CUDA, text, Effect.NO_GPU, command)
    if wanted[0] >= 13 and card.capability is not None and card.capability < CUDA_13_CAPABILITY:
        text = (
            f"The {card.name} is older than what PyTorch {build.version} is built for: CUDA "
            f"{build.cuda} wants compute capability 7.5, and it has "
            f"{card.capability[0]}.{card.capability[1]}."
        )
        return Finding(Check.CUDA, text, Effect.NO_GPU, _install_torch(readings, index="cu126"))
    if readings.trial is not None and readings.trial.problem:
        text = f"PyTorch cannot use the {card.name}: {readings.trial.problem.rstrip('.')}."
        return Finding(Check.CUDA, text, Effect.NO_GPU, "nvidia-smi")
    return Finding(Check.CUDA, f"driver for CUDA {offers or 'of unknown version'}")


def bf16(readings: Readings) -> Finding | None:
    """Finds whether the cards compute in bfloat16."""
    known = [each for each in readings.driver.gpus if each.capability is not None]
    if not known:
        return None
    lacking = [each for each in known if (each.capability or (0, 0)) < BF16_CAPABILITY]
    if not lacking:
        return Finding(Check.BF16, "computed by the GPU")
    text = (
        f"The {lacking[0].name} does not multiply in bfloat16, so steps in it are slow or fail; "
        "compute in float32."
    )
    command = f"{program_command()} train PRESET --set model.dtype=float32"
    return Finding(Check.BF16, text, Effect.SLOWS, command)


def _install_torch(readings: Readings, is_new: bool = False, index: str = "") -> str:
    """Returns the command that installs PyTorch for the driver of this machine, or for the CPU."""
    has = readings.driver.cuda
    if not index and not readings.has_nvidia:
        index = "cpu"
    elif not index:
        index = "cu126" if has is not None and has[0] < 13 else "cu130"
    tested = next((each.tested for each in readings.packages if each.name == "torch"), "")
    again = "" if is_new else "--force-reinstall "
    return f'python -m pip install {again}"torch{tested}" --index-url {_INDEX}{index}'


def _version(text: str) -> tuple[int, int]:
    """Returns the first two numbers of a version such as 13.0."""
    parts = [int(part) for part in text.split(".") if part.isdigit()]
    return (*parts, 0, 0)[0], (*parts, 0, 0)[1]


# ---------------------------------------------------------------- memory


def locked(readings: Readings) -> Finding | None:
    """Finds whether RAM can be locked for transfers without a limit."""
    if not readings.driver.gpus:
        return None
    trial = readings.trial
    if trial is not None and trial.lock_tried and trial.locked >= trial.lock_tried:
        return Finding(Check.LOCKED, f"{in_gib(trial.locked)} locked as a trial")
    if trial is not None and trial.lock_tried:
        refused = f"The system locks no more than {in_gib(trial.locked)} of RAM for transfers"
        return refused_lock(readings.is_wsl, readings.lock_limit, refused)
    if readings.is_wsl:
        return refused_lock(True, None, "WSL2 locks only a part of RAM for transfers")
    return None


def refused_lock(is_wsl: bool, lock_limit: int | None, refused: str) -> Finding:
    """Returns the finding for a system that refuses to lock RAM. refused: a clause that says so."""
    text = (
        f"{refused}. Copies with RAM that is not locked pass through the driver, so steps may take "
        "longer."
    )
    command = ""
    if is_wsl:
        text += " More memory for WSL2 (`memory=` under `[wsl2]` in .wslconfig) raises the limit."
        command = _WSL_MEMORY
    elif lock_limit is not None:
        command = "ulimit -l unlimited"
    return Finding(Check.LOCKED, text, Effect.SLOWS, command)


def ram(readings: Readings) -> Finding:
    """Finds whether this process may use all RAM."""
    limit, total = readings.ram_limit, readings.ram_total
    if limit >= total:
        return Finding(Check.RAM, f"{in_gib(total)}, without a limit")
    text = f"A control group limits this program to {in_gib(limit)} of the {in_gib(total)} of RAM."
    command = f"systemd-run --user --scope {program_command()}"
    if readings.is_container:
        whole = f"{total >> 30}g"
        command = f"docker update --memory {whole} --memory-swap {whole} CONTAINER"
    return Finding(Check.RAM, text, Effect.NOTE, command)


# ---------------------------------------------------------------- kernels, disk, packages


def kernels(readings: Readings) -> Finding | None:
    """Finds whether kernels for the GPU can be compiled."""
    if not readings.driver.gpus:
        return None
    if not readings.compiler_problem:
        return Finding(Check.KERNELS, "can be compiled")
    text = f"Kernels are not compiled, so steps take longer: {readings.compiler_problem}."
    is_triton = readings.compiler_problem.startswith("Triton is")
    command = "python -m pip install triton" if is_triton else "sudo apt install gcc"
    return Finding(Check.KERNELS, text, Effect.SLOWS, command)


def caches(readings: Readings) -> Finding:
    """Finds whether compiled kernels can be kept."""
    refused = [cache for cache in readings.caches if not cache.is_writable]
    if not refused:
        return Finding(Check.CACHES, ", ".join(cache.folder for cache in readings.caches))
    folders = " or ".join(cache.folder for cache in refused)
    text = (
        f"Nothing can be written in {folders}, so kernels are compiled again at each start. Name "
        "another folder."
    )
    command = " ".join(f"{cache.variable}=FOLDER" for cache in refused)
    return Finding(Check.CACHES, text, Effect.SLOWS, f"export {command}")


def disk(readings: Readings) -> Finding | None:
    """Finds whether files of runs go past the page cache."""
    if readings.runs_direct is None:
        return None
    if readings.runs_direct:
        return Finding(Check.DISK, f"{readings.runs}, with direct access")
    command = f"{program_command()} --runs-dir FOLDER"
    return Finding(Check.DISK, no_direct_access(readings.runs), Effect.SLOWS, command)


def no_direct_access(folder: object) -> str:
    """Returns a sentence on a folder whose files cannot be written past the page cache."""
    return (
        f"The file system of {folder} has no direct access (O_DIRECT), so what is written there "
        "passes through the page cache: it takes RAM, and steps may be slower."
    )


def versions(readings: Readings) -> Finding | None:
    """Finds whether Python and all packages have versions that are tested."""
    if not readings.packages:
        return None
    other = [each for each in readings.packages if not each.is_tested]
    if not other:
        return Finding(Check.VERSIONS, _tested_text(readings.packages))
    listed = ", ".join(f"{each.name} {each.version} ({each.tested})" for each in other)
    text = f"Not tested with {listed}."
    command = " ".join(f'"{each.name}{each.tested}"' for each in other if each.name != "Python")
    mend = f"python -m pip install {command}" if command else "python3.12 -m venv .venv"
    return Finding(Check.VERSIONS, text, Effect.SLOWS, mend)


def _tested_text(packages: tuple[Package, ...]) -> str:
    shown = ("Python", "torch", "transformers")
    named = [f"{each.name} {each.version}" for each in packages if each.name in shown]
    return f"{', '.join(named)} and {len(packages) - len(named)} others are tested versions"


CHECKS: tuple[Callable[[Readings], Finding | None], ...] = (
    *(gpu, torch, cuda, bf16, locked),
    *(ram, kernels, caches, disk, versions),
)
