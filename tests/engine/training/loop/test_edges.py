"""The fit verdict is exact: with just enough memory a run completes; with a little less it is
refused.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.paths import PROGRAM_ROOT
from engine.planning.fit.requirements import Verdict
from engine.runs.record.events import FitReported
from engine.runs.record.following import EVENTS_FILE, replay
from engine.runs.summaries.listing import list_runs
from engine.training.loop import planning
from engine.training.loop.run import start_run
from tests.support.cgroups import memory_limit, run_within
from tests.support.folders import make_config, make_model

MIB = 1 << 20
HELD = 512 * MIB
"""The program's own memory is fixed at this value, since it varies from run to run."""


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
            estimate(job, replace(machine, ram_available=middle * MIB), *rest).verdict
            != Verdict.DOES_NOT_FIT
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


NEAR = 48 * MIB
"""The limits differ from the prediction by this much, since the program's own memory varies."""


def judged_under_a_limit(tmp_path, device: str) -> None:
    """Checks a run under a memory limit of the kernel: just above the predicted need it completes,
    and just below it is refused.
    """
    make_model(tmp_path / "model", hidden_size=1024, intermediate_size=3072, num_hidden_layers=6)
    # No setting is chosen by the available memory.
    config = make_config(
        tmp_path,
        **{
            "train.steps": 2,
            "train.warmup_steps": 1,
            "engine.device": device,
            "engine.slots": 2,
            "engine.activation_checkpointing": "full",
            "engine.blocks_kept_in_slots": 0,
            "engine.rounds": 1,
            "engine.kernels": "eager",
        },
    )
    config.save(tmp_path / "run.yaml")

    def run(limit: int):
        with memory_limit(limit) as group:
            ended = run_within(
                group,
                [
                    sys.executable,
                    str(PROGRAM_ROOT / "launch.py"),
                    "train",
                    str(tmp_path / "run.yaml"),
                    "--runs-dir",
                    str(tmp_path / "runs"),
                ],
            )
        events = [
            record.event
            for record in replay(Path(list_runs(tmp_path / "runs")[0].path) / EVENTS_FILE)
        ]
        report = next(event.report for event in events if isinstance(event, FitReported))
        return ended, report

    free, report = run(1 << 36)
    need = sum(item["bytes"] for item in report["host"]["items"])
    assert free.returncode == 0 and need > 1 << 30
    enough, _ = run(need + NEAR)
    assert enough.returncode == 0, enough.stderr
    refused, report = run(need - NEAR)
    assert report["verdict"] == Verdict.DOES_NOT_FIT
    assert (
        refused.returncode not in (0, -9, 137)
        and "does not fit" in refused.stderr
        and "RAM" in refused.stderr
    )
