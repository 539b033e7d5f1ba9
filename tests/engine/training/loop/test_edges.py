"""The fit verdict is exact: with just enough memory a run completes; with a little less it is
refused.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.planning.fit.requirements import FitStatus
from engine.training.loop import planning
from engine.training.loop.run import start_run
from tests.support.edges import MIB, judged_under_a_limit
from tests.support.folders import make_config

HELD = 512 * MIB
"""The program's own memory is fixed at this value, since it varies from run to run."""


@pytest.mark.slow("it makes two runs, for six seconds")
def test_a_run_completes_with_just_enough_ram_and_is_refused_with_a_mebibyte_less(
    tmp_path, monkeypatch
):
    config = make_config(tmp_path, **{"train.steps": 2, "train.warmup_steps": 1})
    asked: list[tuple] = []
    estimate, read_machine = planning.estimate, planning.read_machine
    free = [1 << 34]
    monkeypatch.setattr(planning, "sample_host_memory", lambda: (HELD, free[0]))
    monkeypatch.setattr(planning, "private_memory", lambda: HELD)
    monkeypatch.setattr(
        planning, "read_machine", lambda path: replace(read_machine(path), ram_available=free[0])
    )
    monkeypatch.setattr(
        planning, "estimate", lambda *arguments: asked.append(arguments) or estimate(*arguments)
    )

    def run(ram: int):
        free[0] = ram - HELD
        return start_run(config, tmp_path / "runs").execute()

    assert run(1 << 34).state == "finished"
    job, machine, *rest = asked[-1]
    low, high = 0, (1 << 34) // MIB
    while high - low > 1:
        middle = (low + high) // 2
        fits = (
            estimate(job, replace(machine, ram_available=middle * MIB), *rest).status
            != FitStatus.DOES_NOT_FIT
        )
        low, high = (low, middle) if fits else (middle, high)
    enough = run(high * MIB)
    assert enough.state == "finished", enough.reason
    refused = run(low * MIB)
    assert (refused.state, refused.error_type) == ("failed", "FitError")
    assert "does not fit" in refused.reason and "RAM" in refused.reason


@pytest.mark.slow("three runs of a model of 1 GiB take half a minute")
def test_the_kernel_holds_a_run_to_what_it_said_it_needs(tmp_path):
    judged_under_a_limit(tmp_path, "cpu")
