"""`bench --disk` measures a disk after its cache is full, and plans use what it measured."""

from __future__ import annotations

import json

import pytest

import launch
from engine.errors import RunError
from engine.machine import disk_rates
from engine.machine.disk_rates import stored_disk_rates
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cpu_backend import CpuBackend
from engine.tools.bench import disk_bench
from engine.tools.bench.steps import Planes, RunSettings, random_rows, run_steps
from tests.support.tiny import VOCAB, tiny_config


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("RAMSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_bench, "FILE_BYTES", 8 << 20)
    monkeypatch.setattr(disk_bench, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(disk_bench, "CHUNK_BYTES", 1 << 20)
    for place in (disk_bench, disk_rates):
        monkeypatch.setattr(place, "DRAINED_BYTES", 64 << 20)
    return tmp_path


def test_a_measured_disk_is_kept_for_plans(small, capsys):
    assert stored_disk_rates(small) is None
    assert launch.main(["bench", "--disk", str(small), "--json"]) == 0
    reported = capsys.readouterr()
    assert "while reading" in reported.err
    found = json.loads(reported.out)
    kept = stored_disk_rates(small)
    assert kept.is_drained and kept.written == found["written"] == 72 << 20
    rates = ("read", "write", "read_alone", "write_alone")
    assert all(getattr(kept, name) == found[name] > 0 for name in rates)
    assert [path.name for path in small.iterdir()] == ["cache"]


def test_a_folder_without_space_is_refused(small, monkeypatch):
    monkeypatch.setattr(disk_bench, "disk_free", lambda _: 100)
    with pytest.raises(RunError, match="free some space"):
        disk_bench.measured_disk(small, 1 << 20)


def test_a_folder_that_takes_no_moments_is_refused(small, capsys):
    assert launch.main(["bench", "--disk", str(small / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_training_with_moments_on_the_disk_is_benched(tmp_path):
    planes = Planes.open(tiny_config("llama"), CpuBackend())
    planes.host_states.placement.offload_to_disk(tmp_path)
    choices = PlanChoices().changed(micro_batches=2, disk_offloaded_units=3)
    planes.use("adamw_8bit", choices)
    assert planes.host_states.placement.disk.nbytes > 0
    batches = random_rows([2, 2], 16, VOCAB)
    found = run_steps(planes, batches, RunSettings(choices, 3, 1e-3, 32))
    assert len(found.steps) == 3 and planes.host_states.placement.disk.written_bytes > 0
    planes.leave_device()
    assert (
        not planes.host_states.placement.disk.nbytes
        and not planes.host_states.placement.disk_offloaded
    )
    planes.close()
