"""Long runs of the starter, and how their memory grows (`python -m tests.browser.soak`)."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import MemorySampled
from engine.runs.record.following import EVENTS_FILE, replay

STEADY_SHARE = 0.01
EDGE = 0.1
"""Share of the samples that the first and the last level are medians of."""


@dataclass(frozen=True)
class Growth:
    """It says by how many bytes a process grew over a number of steps, from a level in bytes."""

    level: float
    nbytes: float
    steps: int

    @property
    def share(self) -> float:
        return self.nbytes / self.level


def growth_after(record: Path, step: int) -> Growth:
    """Returns how a run's process grew after `step`, by the samples of memory in its record. The
    first and the last level are medians.
    """
    events = [entry.event for entry in replay(record)]
    samples = [e for e in events if isinstance(e, MemorySampled) and e.step >= step]
    edge = max(3, round(EDGE * len(samples)))
    assert len(samples) >= 2 * edge, f"there are only {len(samples)} samples after step {step}"
    first, last = samples[:edge], samples[-edge:]
    level = statistics.median(sample.host_rss for sample in first)
    return Growth(
        level,
        statistics.median(sample.host_rss for sample in last) - level,
        round(
            statistics.median(sample.step for sample in last)
            - statistics.median(sample.step for sample in first)
        ),
    )


def train_on_the_command_line(steps: int, folder: Path, *settings: str) -> Path:
    """Trains the starter for `steps` steps in a process of its own; returns the path of its
    record.
    """
    command = [sys.executable, "launch.py", "train", "presets/starter.yaml"]
    for setting in (f"train.steps={steps}", *settings):
        command += ["--set", setting]
    subprocess.run(
        [*command, "--runs-dir", folder],
        cwd=PROGRAM_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return only_record(folder)


def only_record(runs: Path) -> Path:
    """Returns the path of the record of the only run in a folder."""
    (record,) = runs.glob(f"*/{EVENTS_FILE}")
    return record
