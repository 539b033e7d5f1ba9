"""Runs at the edge of the memory that the fit report computes."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.paths import PROGRAM_ROOT
from engine.planning.fit.requirements import FitStatus
from engine.runs.record.events import FitReported
from engine.runs.record.following import EVENTS_FILE, replay
from engine.runs.summaries.listing import list_runs
from tests.support.cgroups import memory_limit, run_within
from tests.support.folders import make_config, make_model

MIB = 1 << 20
NEAR = 48 * MIB
"""The limits differ from the prediction by this much, since the program's own memory varies."""


FAR_TOO_LITTLE = 1 << 30


def judged_under_a_limit(tmp_path, device: str) -> None:
    """Checks a run under a memory limit of the kernel: just above the predicted need it completes,
    and just below it is refused.
    """
    make_model(tmp_path / "model", hidden_size=1024, intermediate_size=3072, num_hidden_layers=3)
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

    _, report = run(FAR_TOO_LITTLE)  # it is refused, which says what it needs
    need = sum(item["bytes"] for item in report["host"]["items"])
    assert need > FAR_TOO_LITTLE
    enough, _ = run(need + NEAR)
    assert enough.returncode == 0, enough.stderr
    refused, report = run(need - NEAR)
    assert report["verdict"] == FitStatus.DOES_NOT_FIT
    assert refused.returncode not in (0, -9, 137)
    assert "does not fit" in refused.stderr
    assert "RAM" in refused.stderr
