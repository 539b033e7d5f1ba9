"""`launch.py bench` measures trainings of several ranks beside those of one, on the same planes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import launch
from engine.bench import plan_training
from tests.support.crews import forked_followers  # noqa: F401  a fixture
from tests.support.folders import make_config


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("engine.cli.bench.CEILING_SECONDS", {"cpu": 0.01})
    monkeypatch.setattr("engine.measuring.ceilings.PARAMETERS", {"cpu": 1 << 16})


@pytest.mark.parametrize("settled", [0, 2])
def test_two_ranks_and_one_are_measured(tmp_path, capsys, monkeypatch, settled):
    plain = plan_training.choose

    def choose(job, target):
        found = plain(job, target)
        choices = replace(found.choices, settled_units=settled, resident_blocks=0)
        return replace(found, choices=choices)

    monkeypatch.setattr(plan_training, "choose", choose)
    preset = tmp_path / "preset.yaml"
    make_config(tmp_path, **{"engine.gpus": 2}).save(preset)
    more = ["--then", "engine.gpus=1", "--then", "train.batch_size=8"]
    command = ["bench", str(preset), "--streamed-only", "--seconds", "0.1", "--json", *more]
    assert launch.main(command) == 0
    found = [each["streamed"] for each in json.loads(capsys.readouterr().out)["trainings"]]
    assert [each["choices"]["ranks"] for each in found] == [2, 1, 2]
    assert [each["choices"]["settled_units"] for each in found] == [settled] * 3
    assert [each["busy"].get("EXCHANGE", 0) > 0 for each in found] == [True, False, True]
    assert [each["tokens_per_step"] for each in found] == [4 * 32, 4 * 32, 8 * 32]
    assert found[0]["losses"][0] == pytest.approx(found[1]["losses"][0], abs=0.5)
    assert launch.main([*command, "--set", "train.batch_size=5"]) == 2
    assert "train.batch_size" in capsys.readouterr().err
