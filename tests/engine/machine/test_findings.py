"""Each fault of a machine, planted: what is found, what it does to training, and what mends it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.machine import readings as reading
from engine.machine.device import refuse_unasked_cpu
from engine.machine.findings import Check, Effect, Finding, findings, refused_lock, without_gpu
from engine.machine.gpus import GpuInfo, NvidiaDriver
from engine.machine.known_machines import named_machine
from engine.machine.readings import (
    CudaTrial,
    KernelCache,
    Package,
    Readings,
    TorchBuild,
    build_in,
    cards,
    is_container,
    kernel_caches,
    packages,
)
from engine.text import GIB
from engine.tools.cli.doctor import as_text

H200 = GpuInfo("NVIDIA H200", 140 * GIB, 139 * GIB, driver="580.1", capability=(9, 0))
DRIVER = NvidiaDriver((H200,), cards=1, cuda=(13, 0))
TORCH = Package("torch", "2.13.0", ">=2.11,<2.14")
SOUND = Readings(
    driver=DRIVER,
    cards=("NVIDIA",),
    torch=TorchBuild("2.13.0", "13.0"),
    trial=CudaTrial("", 2 * GIB, 2 * GIB),
    lock_limit=8 << 20,
    ram_total=64 * GIB,
    ram_limit=64 * GIB,
    caches=(KernelCache("/cache", "RAMSTREAM_CACHE"),),
    packages=(Package("Python", "3.12.1", ">=3.11"), TORCH),
)


def of_driver(**values) -> Readings:
    return replace(SOUND, driver=replace(DRIVER, **values))


def of_card(**values) -> Readings:
    return of_driver(gpus=(replace(H200, **values),))


NO_NVML = NvidiaDriver(problem="NVML Shared Library Not Found")
FAULTS = {
    "torch without CUDA": (
        replace(SOUND, torch=TorchBuild("2.13.0+cpu")),
        (Check.TORCH, Effect.NO_GPU),
        "PyTorch 2.13.0+cpu is built without CUDA, so the NVIDIA H200 would not be used.",
        '--force-reinstall "torch>=2.11,<2.14" --index-url https://download.pytorch.org/whl/cu130',
    ),
    "torch without CUDA, driver for CUDA 12": (
        replace(of_driver(cuda=(12, 4)), torch=TorchBuild("2.13.0+cpu")),
        (Check.TORCH, Effect.NO_GPU),
        "built without CUDA",
        "whl/cu126",
    ),
    "driver older than torch's CUDA": (
        replace(of_driver(cuda=(12, 4)), trial=None),
        (Check.CUDA, Effect.NO_GPU),
        "The driver 580.1 offers CUDA 12.4, and PyTorch 2.13.0 is built for CUDA 13.0",
        "whl/cu126",
    ),
    "torch cannot open the GPU": (
        replace(SOUND, trial=CudaTrial("CUDA driver initialization failed.")),
        (Check.CUDA, Effect.NO_GPU),
        "PyTorch cannot use the NVIDIA H200: CUDA driver initialization failed.",
        "nvidia-smi",
    ),
    "card without bf16": (
        of_card(name="Tesla T4", capability=(7, 5)),
        (Check.BF16, Effect.SLOWS),
        "The Tesla T4 does not multiply in bfloat16",
        "--set model.dtype=float32",
    ),
    "torch for AMD": (
        replace(
            SOUND,
            driver=NO_NVML,
            cards=("AMD",),
            torch=TorchBuild("2.13.0+rocm7", None, "7.0"),
        ),
        (Check.GPU, Effect.NO_GPU),
        "PyTorch 2.13.0+rocm7 is built for GPUs of AMD, on which Ramstream does not train",
        "whl/cpu",
    ),
    "torch for Intel": (
        replace(SOUND, driver=NO_NVML, cards=(), torch=TorchBuild("2.13.0+xpu", None, None, "2")),
        (Check.GPU, Effect.NO_GPU),
        "built for GPUs of Intel",
        "whl/cpu",
    ),
    "card of AMD": (
        replace(SOUND, driver=NO_NVML, cards=("AMD",)),
        (Check.GPU, Effect.NO_GPU),
        "The AMD GPU is not used: Ramstream trains on NVIDIA GPUs or on the CPU.",
        "",
    ),
    "no driver": (
        replace(SOUND, driver=NO_NVML),
        (Check.GPU, Effect.NO_GPU),
        "There is an NVIDIA GPU, and no driver for it",
        "sudo ubuntu-drivers install",
    ),
    "driver of another version": (
        replace(SOUND, driver=NvidiaDriver(problem="Driver/library version mismatch")),
        (Check.GPU, Effect.NO_GPU),
        "does not answer (Driver/library version mismatch)",
        "sudo reboot",
    ),
    "container without the GPU": (
        replace(SOUND, driver=NO_NVML, is_container=True),
        (Check.GPU, Effect.NO_GPU),
        "this container may not use it",
        "docker run --gpus all",
    ),
    "WSL2 without the driver": (
        replace(SOUND, driver=NO_NVML, is_wsl=True),
        (Check.GPU, Effect.NO_GPU),
        "does not answer in WSL2",
        "wsl.exe --update",
    ),
    "a number that no card has": (
        replace(of_driver(gpus=()), visible="7"),
        (Check.GPU, Effect.NO_GPU),
        "CUDA_VISIBLE_DEVICES is 7, which names no GPU of this machine",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "GPUs that a person hides": (
        replace(of_driver(gpus=()), visible="-1"),
        (Check.GPU, Effect.NOTE),
        "CUDA_VISIBLE_DEVICES hides its GPU. Training will use the CPU.",
        "",
    ),
    "memory that NVML does not report": (
        of_driver(gpus=(), without_memory=("NVIDIA GB10",)),
        (Check.GPU, Effect.NO_GPU),
        "The NVIDIA GB10 reports no memory of its own",
        "",
    ),
    "one of two cards without its memory": (
        of_driver(without_memory=("NVIDIA GB10",), cards=2),
        (Check.GPU, Effect.NOTE),
        "The NVIDIA GB10 does not report its memory, so it is left out.",
        "",
    ),
    "locked RAM capped by WSL2": (
        replace(SOUND, is_wsl=True, trial=CudaTrial("", 2 * GIB, GIB // 2)),
        (Check.LOCKED, Effect.SLOWS),
        "The system locks no more than 512 MiB of RAM for transfers.",
        ".wslconfig",
    ),
    "locked RAM of WSL2, not tried": (
        replace(SOUND, is_wsl=True, trial=None),
        (Check.LOCKED, Effect.SLOWS),
        "WSL2 locks only a part of RAM for transfers.",
        ".wslconfig",
    ),
    "locked RAM capped by ulimit": (
        replace(SOUND, trial=CudaTrial("", 2 * GIB, GIB)),
        (Check.LOCKED, Effect.SLOWS),
        "no more than 1.0 GiB of RAM",
        "ulimit -l unlimited",
    ),
    "control group": (
        replace(SOUND, ram_limit=16 * GIB),
        (Check.RAM, Effect.NOTE),
        "A control group limits this program to 16.0 GiB of the 64.0 GiB of RAM.",
        "systemd-run --user --scope",
    ),
    "limit of a container": (
        replace(SOUND, ram_limit=16 * GIB, is_container=True),
        (Check.RAM, Effect.NOTE),
        "limits this program to 16.0 GiB",
        "docker update --memory 64g --memory-swap 64g CONTAINER",
    ),
    "no compiler": (
        replace(SOUND, compiler_problem="there is no C compiler, which Triton needs"),
        (Check.KERNELS, Effect.SLOWS),
        "steps take longer: there is no C compiler",
        "sudo apt install gcc",
    ),
    "caches that cannot be written": (
        replace(
            SOUND,
            caches=(
                KernelCache("/ro/numba", "NUMBA_CACHE_DIR", False),
                KernelCache("/ro/triton", "TRITON_CACHE_DIR", False),
            ),
        ),
        (Check.CACHES, Effect.SLOWS),
        "Nothing can be written in /ro/numba or /ro/triton",
        "export NUMBA_CACHE_DIR=FOLDER TRITON_CACHE_DIR=FOLDER",
    ),
    "disk without direct access": (
        replace(SOUND, runs="/nfs/runs", runs_direct=False),
        (Check.DISK, Effect.SLOWS),
        "The file system of /nfs/runs has no direct access (O_DIRECT)",
        "--runs-dir FOLDER",
    ),
    "a version that is not tested": (
        replace(SOUND, packages=(replace(TORCH, version="2.15.0"),)),
        (Check.VERSIONS, Effect.SLOWS),
        "Not tested with torch 2.15.0 (>=2.11,<2.14).",
        'python -m pip install "torch>=2.11,<2.14"',
    ),
}


def found_in(readings: Readings) -> list[Finding]:
    return [each for each in findings(readings) if each.effect != Effect.RIGHT]


def test_a_sound_machine_has_no_fault():
    assert found_in(SOUND) == [] and {each.check for each in findings(SOUND)} == set(Check)
    text = as_text(findings(SOUND))
    assert text.count("\nok ") + 1 == len(Check)
    assert text.endswith("Nothing here stops or slows training.")


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_alone(name):
    readings, (check, effect), text, command = FAULTS[name]
    (found,) = found_in(readings)
    assert (found.check, found.effect) == (check, effect)
    assert text in found.text and command in found.command
    assert bool(command) == bool(found.command)
    shown = as_text(findings(readings))
    assert found.text in shown and found.command in shown
    assert ("1 check of" in shown) == found.is_wrong == (effect != Effect.NOTE)


def test_a_card_older_than_what_torch_is_built_for_is_named_first():
    old, slow = found_in(of_card(name="GTX 1080", capability=(6, 1)))
    assert "CUDA 13.0 wants compute capability 7.5, and it has 6.1." in old.text
    assert "whl/cu126" in old.command and slow.check == Check.BF16
    assert without_gpu((slow, old)) == old
    built = replace(of_card(capability=(6, 1)), torch=TorchBuild("2.13.0", "12.6"))
    assert [each.check for each in found_in(built)] == [Check.BF16]


def test_an_older_driver_of_the_same_cuda_will_do():
    ready = replace(of_driver(cuda=(12, 0)), torch=TorchBuild("2.13.0", "12.8"), trial=None)
    assert found_in(ready) == []
    # And so will one with which PyTorch has used the GPU, whatever its number.
    assert found_in(of_driver(cuda=(12, 4))) == []


def test_without_any_gpu_training_on_the_cpu_is_only_noted():
    bare = replace(SOUND, driver=NO_NVML, cards=(), torch=TorchBuild("2.13.0+cpu"))
    (found,) = found_in(bare)
    assert found.sentence == "No NVIDIA GPU found. Training will use the CPU."
    assert not found.is_wrong and without_gpu(findings(bare)) is None


def test_a_refusal_of_the_system_during_a_run_is_told_alike():
    found = refused_lock(True, None, "The system refused to lock 3.0 GiB of RAM for transfers")
    assert found.sentence.startswith("The system refused to lock 3.0 GiB of RAM for transfers. ")
    assert ".wslconfig" in found.sentence and "ulimit" not in found.sentence
    # Without a limit to raise, none is named.
    assert refused_lock(False, None, "The system refused").command == ""


# ---------------------------------------------------------------- whether a run may begin


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
def test_a_run_takes_the_cpu_only_where_it_is_asked_to(device):
    config = TrainConfig.from_dict(
        {"model": {"source": "any"}, "data": {"source": "any"}, "engine": {"device": device}}
    )
    readings, _, text, _ = FAULTS["torch without CUDA"]
    machine = replace(named_machine("H200"), findings=tuple(found_in(readings)))
    refused = (
        contextlib.nullcontext() if device == "cpu" else pytest.raises(ConfigError, match="cpu")
    )
    with refused as told:
        refuse_unasked_cpu(config, machine)
    assert told is None or text in str(told.value)
    refuse_unasked_cpu(config, named_machine("H200"))


# ---------------------------------------------------------------- readings


def plant(root: Path, name: str, maker: str, device_class: str = "0x030000", memory: str = ""):
    device = root / "sys/bus/pci/devices" / name
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{maker}\n")
    (device / "class").write_text(f"{device_class}\n")
    if memory:
        (device / "mem_info_vram_total").write_text(f"{memory}\n")


def test_cards_of_the_bus_are_told_by_their_makers(tmp_path):
    plant(tmp_path, "0000:00:02.0", "0x8086")  # a part of the processor
    plant(tmp_path, "0000:01:00.0", "0x10de", "0x030200")
    plant(tmp_path, "0000:02:00.0", "0x10de", "0x020000")  # a network card
    plant(tmp_path, "0000:03:00.0", "0x1002", memory=str(16 * GIB))
    plant(tmp_path, "0000:04:00.0", "0x1002", memory=str(GIB // 2))
    plant(tmp_path, "0000:05:00.0", "0x8086")
    assert list(cards(tmp_path)) == ["NVIDIA", "AMD", "Intel"]
    assert list(cards(tmp_path / "nothing")) == []


def test_under_wsl_the_card_is_told_by_the_library_of_windows(tmp_path):
    library = tmp_path / "usr/lib/wsl/lib/libcuda.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    assert list(cards(tmp_path)) == ["NVIDIA"]


def test_a_container_is_told_by_its_mark(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert not is_container(tmp_path)
    (tmp_path / ".dockerenv").touch()
    assert is_container(tmp_path)


def test_builds_of_torch_are_read_without_importing_it():
    lines = "from typing import Optional\n__version__ = '2.11.0'\ncuda: Optional[str] = '13.0'\n"
    assert build_in(f"{lines}hip: Optional[str] = None\n") == TorchBuild("2.11.0", "13.0")
    assert build_in("__version__ = '2.8.0'\nhip: str = '7.0'\n") == TorchBuild("2.8.0", None, "7.0")
    import torch

    here = reading.torch_build()
    assert (here.version, here.cuda) == (torch.__version__, torch.version.cuda)


def test_versions_here_are_those_that_are_needed():
    found = {each.name: each for each in packages()}
    assert {"Python", "torch", "transformers", "numba"} <= set(found)
    assert found["torch"].tested.startswith(">=") and all(each.is_tested for each in found.values())
    assert replace(TORCH, version="2.13.0+cu130").is_tested
    assert not replace(TORCH, version="2.14.1").is_tested


def test_folders_for_kernels_are_those_that_a_person_names(tmp_path, monkeypatch):
    for name in ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAMSTREAM_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "refused" / "triton"))
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda place, mode: place.name != "refused" and real(place, mode)
    )
    (tmp_path / "refused").mkdir()
    found = {cache.variable: cache for cache in kernel_caches(has_gpu=True)}
    assert found["RAMSTREAM_CACHE"].folder == str(tmp_path / "own")
    assert [name for name, cache in found.items() if not cache.is_writable] == ["TRITON_CACHE_DIR"]
    assert [cache.variable for cache in kernel_caches(has_gpu=False)] == ["NUMBA_CACHE_DIR"]
