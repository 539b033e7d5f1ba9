"""`launch.py doctor`, and runs that would take the CPU although there is a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

import engine.runtime.device.open_backend as opening
import engine.tools.cli.doctor as command
import engine.training.loop.run as running
import launch
from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.machine.findings import findings
from engine.machine.gpus import NO_DRIVER, GpuInfo, NvidiaDriver
from engine.machine.readings import TorchBuild, read
from engine.paths import PROGRAM_ROOT
from engine.text import GIB

CARD = GpuInfo("NVIDIA H200", 140 * GIB, 139 * GIB, driver="580.1", capability=(9, 0))
STARTER = str(PROGRAM_ROOT / "presets/starter.yaml")
ON_CPU = {"engine.device": "cpu"}


def with_a_card(folder, cuda: str | None):
    """The readings of this machine, with a card that it has not and a torch of this kind."""
    driver = NvidiaDriver((CARD,), cards=1, cuda=(13, 0))
    return replace(read(folder), driver=driver, torch=TorchBuild("2.13.0", cuda))


def test_a_gpu_that_torch_cannot_use_is_wrong_and_a_machine_without_one_is_not(
    tmp_path, capsys, monkeypatch
):
    bare = replace(
        read(tmp_path), driver=NvidiaDriver(problem=NO_DRIVER), cards=(), torch=TorchBuild("2.13.0")
    )
    monkeypatch.setattr(command, "read", lambda folder: bare)
    assert launch.main(["doctor", "--runs-dir", str(tmp_path)]) == 0
    assert "No NVIDIA GPU found. Training will use the CPU." in capsys.readouterr().out
    # The helper process has the torch of this machine, which is without CUDA where tests run.
    monkeypatch.setattr(command, "read", lambda folder: with_a_card(folder, "13.0"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launch.main(["doctor", "--runs-dir", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    (number,) = (place for place, line in enumerate(lines) if line.startswith("wrong"))
    assert "CUDA" in lines[number] and "PyTorch cannot use the NVIDIA H200: " in lines[number]
    assert lines[number + 1].split() == ["$", "nvidia-smi"]


@pytest.fixture
def unused_gpu(monkeypatch):
    """This machine seems to have a card, and a torch without CUDA."""
    real = running.read_machine

    def read_machine(folder):
        found = findings(with_a_card(folder, None))
        return replace(real(folder), findings=found)

    monkeypatch.setattr(running, "read_machine", read_machine)


def test_train_refuses_the_cpu_unless_it_is_asked_for(tmp_path, capsys, unused_gpu):
    runs = tmp_path / "runs"
    assert launch.main(["train", STARTER, "--runs-dir", str(runs)]) == 2
    said = capsys.readouterr().err
    assert "is built without CUDA, so the NVIDIA H200 would not be used." in said
    assert "`--set engine.device=cpu`" in said and said.count("\n") == 1
    assert not runs.exists()
    config = TrainConfig.load(STARTER)
    run = running.start_run(config.with_values(ON_CPU), runs)
    run.close()
    assert running.resume_run(runs, run.id).close() is None
    with pytest.raises(ConfigError, match="without CUDA"):
        running.resume_run(runs, run.id, ["engine.device=auto"])


def test_a_gpu_that_torch_finds_unusable_later_ends_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "read", lambda folder: with_a_card(tmp_path, "13.0"))
    monkeypatch.setattr(opening, "cuda_problem", lambda: "Error 802: system not yet initialized")
    config = TrainConfig.load(STARTER)
    with pytest.raises(ConfigError, match="cannot use the NVIDIA H200: Error 802"):
        opening.open_run_backend(config)
    opening.open_run_backend(config.with_values(ON_CPU)).close()
