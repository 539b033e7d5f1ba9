"""`bench --disk` measures a disk after its cache is full, and plans use what it measured."""

from __future__ import annotations

import json

import pytest

import launch
from engine.bench import disk_bench
from engine.errors import RunError
from engine.machine import disk_rates
from engine.machine.disk_rates import stored_disk_rates


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("RAMSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_bench, "FILE_BYTES", 8 << 20)
    monkeypatch.setattr(disk_bench, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(disk_bench, "PIECE_BYTES", 1 << 20)
    for place in (disk_bench, disk_rates):
        monkeypatch.setattr(place, "DRAINED_BYTES", 64 << 20)
    return tmp_path


def test_a_measured_disk_is_kept_for_plans(small, capsys):
    assert stored_disk_rates(small) is None
    assert launch.main(["bench", "--disk", str(small), "--json"]) == 0
    told = capsys.readouterr()
    assert "while reading" in told.err
    found = json.loads(told.out)
    kept = stored_disk_rates(small)
    assert kept.is_drained and kept.written == found["written"] == 64 << 20
    assert (kept.read, kept.write) == (found["read"], found["write"])
    assert [path.name for path in small.iterdir()] == ["cache"]


def test_a_folder_without_space_is_refused(small, monkeypatch):
    monkeypatch.setattr(disk_bench, "disk_free", lambda _: 100)
    with pytest.raises(RunError, match="free some space"):
        disk_bench.measured_disk(small, 1 << 20)


def test_a_folder_that_takes_no_moments_is_refused(small, capsys):
    assert launch.main(["bench", "--disk", str(small / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
