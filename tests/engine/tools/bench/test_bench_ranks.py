"""`launch.py bench` measures trainings of several ranks beside those of one, on the same planes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import launch
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.host.optimizers import host_optimizer
from engine.tools.bench import plan_training, steps
from engine.tools.bench.steps import RANDOM, Planes, Trained
from tests.support.folders import make_config
from tests.support.tiny import tiny_config
from tests.support.worker_groups import forked_workers  # noqa: F401  a fixture


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("engine.tools.cli.bench.CEILING_SECONDS", {"cpu": 0.01})
    monkeypatch.setattr("engine.runtime.measure.machine_rates.PARAMETERS", {"cpu": 1 << 16})


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("gpu_resident", [0, 2])
def test_two_ranks_and_one_are_measured(tmp_path, capsys, monkeypatch, gpu_resident):
    plain = plan_training.choose

    def choose(job, target):
        found = plain(job, target)
        choices = found.choices.changed(gpu_resident_units=gpu_resident, blocks_kept_in_slots=0)
        return replace(found, choices=choices)

    monkeypatch.setattr(plan_training, "choose", choose)
    preset = tmp_path / "preset.yaml"
    make_config(tmp_path, **{"engine.gpus": 2}).save(preset)
    more = ["--then", "engine.gpus=1", "--then", "train.batch_size=8"]
    command = ["bench", str(preset), "--streamed-only", "--seconds", "0.1", "--json", *more]
    assert launch.main(command) == 0
    found = [each["streamed"] for each in json.loads(capsys.readouterr().out)["trainings"]]
    assert [each["choices"]["ranks"] for each in found] == [2, 1, 2]
    assert [each["choices"]["gpu_resident_units"] for each in found] == [gpu_resident] * 3
    assert [each["busy"].get("COLLECTIVE", 0) > 0 for each in found] == [True, False, True]
    assert [each["tokens_per_step"] for each in found] == [4 * 32, 4 * 32, 8 * 32]
    assert found[0]["losses"][0] == pytest.approx(found[1]["losses"][0], abs=0.5)
    assert launch.main([*command, "--set", "train.batch_size=5"]) == 2
    assert "train.batch_size" in capsys.readouterr().err


def test_each_rank_has_its_share_of_the_cores(monkeypatch):
    """Otherwise rank 0 would have all of them, and its updates would leave the others behind."""
    threads: list[int | None] = []

    def noting(states, settings, own=None):
        threads.append(own)
        return host_optimizer(states, settings, own)

    monkeypatch.setattr(steps, "host_optimizer", noting)
    monkeypatch.setattr(steps, "default_threads", lambda: 6)
    backend = CpuBackend()
    planes = Planes.open(tiny_config("llama"), backend, RANDOM, False, Trained(is_shared=True))
    try:
        for ranks in (1, 2, 1):
            planes.use("adamw", PlanChoices().changed(ranks=ranks))
    finally:
        planes.close()
        backend.close()
    assert threads[1:] == [None, 3, None]
