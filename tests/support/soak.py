"""A long run in one process: `python -m tests.support.soak --minutes 120`.

Trains a tiny model on the CPU for that long, with evaluations and checkpoints, and samples this
process meanwhile. At its end host memory must be flat within 1 % after the warm-up, open files and
threads constant but for those of a checkpoint that is being written, and the record, replayed in
full, equal to the live snapshot. The tiny model's rows are all alike: to train the starter, whose
packed rows differ, there is `python -m tests.browser.soak`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Hashable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psutil

from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import MemorySampled, StepFinished
from engine.runs.record.following import EVENTS_FILE, replay
from engine.runs.record.snapshot import RunSnapshot
from engine.training.loop.run import Run, start_run
from tests.support.folders import make_config

STEADY_SHARE = 0.01
WARM_UP = 0.25
"""Share of the time in which caches fill, allocators grow to their size and the snapshot's tables
get full.
"""
CHECKPOINT_EVERY = 1000
EDGE = 0.1
"""Share of the samples after the warm-up that the first and the last level are medians of."""


Opened: TypeAlias = tuple[int, str]
"""The descriptor of an open file, and its path."""


@dataclass(frozen=True)
class Sample:
    seconds: float
    step: int
    rss: int
    files: int
    threads: int


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


class Standing:
    """Counts what this process has, but for what belongs to a checkpoint that is written now. What
    is still there two checkpoints later is counted, since it has outlived its own.
    """

    def __init__(self) -> None:
        self._since: dict[Hashable, int] = {}
        """The step at which each thing of a checkpoint that is still there was first seen."""

    def count(self, there: Set[Hashable], of_checkpoints: Set[Hashable], step: int) -> int:
        """Returns how many of the things that are `there` at `step` count. It is asked at each
        sample.
        """
        self._since = {each: self._since.get(each, step) for each in of_checkpoints}
        young = {e for e, since in self._since.items() if step - since < 2 * CHECKPOINT_EVERY}
        return len(there - young)


def threads_now(process: psutil.Process) -> tuple[set[int], set[int]]:
    """Returns the threads of this process, and those of them that write a checkpoint. The system
    tells the first; Python tells names.
    """
    # Writers that start or end while the system is asked are known from before or after.
    known = threading.enumerate()
    there = {thread.id for thread in process.threads()}
    named = {*known, *threading.enumerate()}
    return there, {thread.native_id for thread in named if is_writer(thread.name)}


def files_now(checkpoints: Path) -> tuple[set[Opened], set[Opened]]:
    """Returns the files that this process has open, and those of them that are files of a
    checkpoint.
    """
    there = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            there.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return there, {opened for opened in there if checkpoints in Path(opened[1]).parents}


def is_writer(name: str) -> bool:
    """Tells whether a thread of this name writes a checkpoint."""
    return name in ("checkpoint", "copy-planes") or name.startswith("checkpoint_")


class Watcher(threading.Thread):
    """Samples this process until the time is over, then asks the run to stop."""

    def __init__(self, run: Run, minutes: float):
        super().__init__(name="soak")
        self._run, self._end = run, 60 * minutes
        self._every = max(1.0, self._end / 500)
        self.samples: list[Sample] = []
        self.over = threading.Event()

    def run(self) -> None:
        process, began = psutil.Process(), time.monotonic()
        files, threads = Standing(), Standing()
        checkpoints = self._run.folder.checkpoints_path.resolve()
        while not self.over.wait(self._every):
            seconds = time.monotonic() - began
            steps = self._run.recorder.snapshot.steps
            if len(steps):
                step = steps.step[-1]
                self.samples.append(
                    Sample(
                        seconds,
                        step,
                        process.memory_info().rss,
                        files.count(*files_now(checkpoints), step),
                        threads.count(*threads_now(process), step),
                    )
                )
            if seconds >= self._end:
                self._run.request("stop")
                return


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        config = make_config(
            root,
            **{
                "train.steps": 10**8,
                "train.schedule": "constant",
                "train.learning_rate": 1e-3,
                "output.checkpoint_every": CHECKPOINT_EVERY,
                "output.eval_every": 500,
            },
        )
        run = start_run(config, root / "runs")
        watcher = Watcher(run, arguments.minutes)
        watcher.start()
        ended = run.execute()
        watcher.over.set()
        watcher.join()
        print(ended.reason)
        record = run.folder.events_path
        size, began = record.stat().st_size, time.monotonic()
        replayed, steps = RunSnapshot(), []
        for entry in replay(record):
            replayed.apply(entry)
            if isinstance(entry.event, StepFinished):
                steps.append(entry.event.step)
        took = time.monotonic() - began
        print(
            f"Record: {replayed.last_seq:,} lines, {size / 2**20:.1f} MiB, replayed in {took:.1f} s"
        )
        problems = [] if ended.state == "stopped" else [f"the run ended as {ended.state}"]
        if replayed != run.recorder.snapshot:
            problems.append("the record, replayed, is not the live snapshot")
        if steps != list(range(1, replayed.step + 1)):
            problems.append("the record does not hold every step once")
    problems += judge(watcher.samples)
    print("\n".join(f"FAILED: {problem}" for problem in problems) or "All hold.")
    return 1 if problems else 0


def judge(samples: list[Sample]) -> list[str]:
    """Print the table; what does not hold, a sentence each."""
    print(f"{'minute':>8}{'step':>10}{'RSS MiB':>10}{'files':>7}{'threads':>9}")
    for s in samples[:: max(1, len(samples) // 20)]:
        print(
            f"{s.seconds / 60:>8.1f}{s.step:>10,}{s.rss / 2**20:>10.2f}{s.files:>7}{s.threads:>9}"
        )
    kept = [sample for sample in samples if sample.seconds >= WARM_UP * samples[-1].seconds]
    if len(kept) < 20:
        return [f"there are only {len(kept)} samples after the warm-up; run for longer"]
    edge = max(3, round(EDGE * len(kept)))
    first, last = kept[:edge], kept[-edge:]
    level, growth = (
        statistics.median(s.rss for s in first),
        statistics.median(s.rss for s in last) - statistics.median(s.rss for s in first),
    )
    steps = statistics.median(s.step for s in last) - statistics.median(s.step for s in first)
    print(
        f"RSS after the warm-up: {level / 2**20:.2f} MiB, then {growth / 2**20:+.2f} MiB over "
        f"{steps:,.0f} steps ({growth / max(1, steps):.0f} bytes a step, "
        f"{100 * growth / level:.2f} %)"
    )
    problems = []
    if abs(growth) > STEADY_SHARE * level:
        problems.append(
            f"host memory is not flat within {STEADY_SHARE:.0%}: it went from {level / 2**20:.2f} "
            f"by {growth / 2**20:+.2f} MiB"
        )
    for name, values in (
        ("open files", [s.files for s in kept]),
        ("threads", [s.threads for s in kept]),
    ):
        usual = statistics.mode(values)
        # Files of other work, such as an evaluation or a sample, are open for a moment.
        stray = sum(value != usual for value in values)
        ends = {
            statistics.mode(v)
            for v in (
                [getattr(s, name.split()[-1]) for s in first],
                [getattr(s, name.split()[-1]) for s in last],
            )
        }
        print(f"{name.capitalize()}: {usual} ({stray} of {len(values)} samples have others)")
        if len(ends) > 1 or stray > len(values) / 10:
            problems.append(f"{name} are not constant: {sorted(set(values))}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
