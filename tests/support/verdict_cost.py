"""`python -m tests.support.verdict_cost` prints how long a verdict takes, by a run's length."""

from __future__ import annotations

import time

import numpy as np

from app.verdict.judge import verdict
from engine.runs.record.events import EvalFinished, MemorySampled, Record, RunStarted, StepFinished
from engine.runs.record.snapshot import RunSnapshot

STEPS = (300, 5_000, 50_000)
TIMES = 50
"""The least of so many times counts, since other programs only add to it."""
GIB = 1 << 30


def made(count: int) -> RunSnapshot:
    """Returns a healthy run with noise, with a GPU, of this many steps."""
    draw = np.random.default_rng(0)
    steps = np.arange(1, count + 1)
    losses = 1 + 4 * np.exp(-8 * steps / count) + 0.1 * draw.standard_normal(count)
    snapshot = RunSnapshot()
    events = [RunStarted(device="cuda", total_steps=count + 10)]
    for step, loss in zip(steps.tolist(), losses.tolist()):
        waited = {"h2d": 0.02, "optimizer": 0.01}
        events.append(
            StepFinished(step, loss=loss, learning_rate=1e-3, seconds=1.0, exposed=waited)
        )
        if step % 2 == 0:
            card = {"gpu_total": 80 * GIB, "gpu_peak": 60 * GIB, "gpu_driver": 62 * GIB}
            rss = 30 * GIB + 1000 * step
            events.append(MemorySampled(step, host_rss=rss, host_total=64 * GIB, **card))
        if step % 100 == 0:
            events.append(EvalFinished(step, loss=loss, loss_tokens=1000))
    for number, event in enumerate(events):
        snapshot.apply(Record("made-up", number, 1e9 + number, event))
    return snapshot


def main() -> None:
    """Prints the milliseconds of each length."""
    for count in STEPS:
        snapshot = made(count)
        seconds = []
        for _ in range(TIMES):
            begun = time.process_time()
            verdict(snapshot, "running")
            seconds.append(time.process_time() - begun)
        print(f"{count:,} steps: {1000 * min(seconds):.2f} ms", flush=True)


if __name__ == "__main__":
    main()
