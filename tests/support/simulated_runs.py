"""Made-up losses by which the verdict is judged: healthy runs of many kinds, and runs that diverge
or overfit from a known step on.

`python -m tests.support.simulated_runs` judges 1,000 healthy runs, and 200 of each fault. It prints
how many get an alarm and how late, and takes some minutes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from app.verdict.judge import verdict
from engine.runs.record.evaluations import RowLosses
from engine.runs.record.events import (
    EvalFinished,
    Event,
    Record,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.record.snapshot import RunSnapshot

EVERY = 5
"""Runs are judged after every so many steps and every evaluation. An alarm about losses lasts at
least ten steps or until the next evaluation, so that hardly any is missed.
"""
SEED = 5
"""The rules were tuned on runs of the seeds 1 to 4."""


@dataclass
class Simulated:
    """A `Simulated` is a run that was made up."""

    kind: str
    losses: np.ndarray
    """losses[steps] are those of training."""
    rates: np.ndarray
    """rates[steps] are the learning rates."""
    evals: dict[int, RowLosses] = field(default_factory=dict)
    """These are the evaluations by step; step 0 is before training."""
    onset: int = 0
    """The fault begins after this step; 0 means that there is none."""


Draw = np.random.Generator


# ---------------------------------------------------------------------- training losses


def _trend(draw: Draw, steps: np.ndarray) -> np.ndarray:
    """Returns a loss[steps] that falls like those of real runs: an exponential, a power law, or the
    slight fall of a fine-tuned model.
    """
    shape = draw.integers(3)
    if shape == 0:
        floor, height = draw.uniform(0.02, 2.5), draw.uniform(1, 5)
        return floor + height * np.exp(-steps / draw.uniform(8, 120))
    if shape == 1:
        floor, height = draw.uniform(0.2, 2.0), draw.uniform(1, 4)
        return floor + height * (1 + steps / draw.uniform(3, 30)) ** -draw.uniform(0.3, 1.0)
    start, gain = draw.uniform(0.8, 2.5), draw.uniform(0.08, 0.4)
    return start * (1 - gain * (1 - np.exp(-steps / draw.uniform(10, 100))))


def _correlated(draw: Draw, count: int, share: float) -> np.ndarray:
    """Returns noise[count] of variance 1, of which each value keeps `share` of the one before."""
    noise = draw.standard_normal(count)
    for place in range(1, count):
        noise[place] = share * noise[place - 1] + (1 - share**2) ** 0.5 * noise[place]
    return noise


def _smooth(draw: Draw, trend: np.ndarray) -> np.ndarray:
    return trend * (1 + draw.uniform(0.002, 0.02) * draw.standard_normal(len(trend)))


def _noisy(draw: Draw, trend: np.ndarray) -> np.ndarray:
    tails = draw.standard_t(4, len(trend)) / 2**0.5
    return np.maximum(0.01, trend * (1 + draw.uniform(0.05, 0.2) * tails))


def _wandering(draw: Draw, trend: np.ndarray) -> np.ndarray:
    noise = _correlated(draw, len(trend), draw.uniform(0.2, 0.6))
    return trend * np.exp(draw.uniform(0.02, 0.1) * noise)


def _mixed(draw: Draw, trend: np.ndarray) -> np.ndarray:
    """Each step takes its rows from one of two or three sources, of which some are harder."""
    count = int(draw.integers(2, 4))
    levels = draw.uniform(0.5, 2.0, count)
    shares = draw.dirichlet(np.full(count, 3.0))
    harder = levels[draw.choice(count, len(trend), p=shares)]
    return trend * harder * (1 + draw.uniform(0.01, 0.1) * draw.standard_normal(len(trend)))


def _tiny_data(draw: Draw, trend: np.ndarray) -> np.ndarray:
    """Few rows are learned by heart: the loss falls to nearly nothing, and varies by its size."""
    steps = np.arange(1, len(trend) + 1)
    fall = draw.uniform(1, 4) * np.exp(-steps / draw.uniform(15, 60)) + draw.uniform(0.005, 0.05)
    return fall * np.exp(draw.uniform(0.05, 0.3) * draw.standard_normal(len(trend)))


def _spiked(draw: Draw, trend: np.ndarray) -> np.ndarray:
    """Some spikes stand out, from which the loss recovers within a few steps."""
    losses = _smooth(draw, trend)
    for _ in range(int(draw.integers(1, 5))):
        begin, lasts = int(draw.integers(5, len(trend) - 10)), int(draw.integers(1, 7))
        decay = np.exp(-np.arange(lasts) / 2)
        losses[begin : begin + lasts] *= 1 + draw.uniform(0.5, 6) * decay
    return losses


HEALTHY: dict[str, Callable[[Draw, np.ndarray], np.ndarray]] = {
    "smooth": _smooth,
    "noisy": _noisy,
    "wandering": _wandering,
    "mixed": _mixed,
    "tiny data": _tiny_data,
    "spiked": _spiked,
}


def _rates(draw: Draw, count: int) -> np.ndarray:
    """Returns rates[count]: a warm-up, then a cosine or a constant rate."""
    warm = int(draw.integers(0, count // 4))
    steps = np.arange(count)
    rates = np.minimum(1.0, steps / max(1, warm))
    if draw.random() < 0.6:
        progress = np.clip((steps - warm) / max(1, count - warm), 0, 1)
        rates = np.where(steps < warm, rates, 0.5 * (1 + np.cos(np.pi * progress)))
    return 1e-3 * rates


# ---------------------------------------------------------------------- validation losses


def _evaluated(draw: Draw, level: np.ndarray, every: int) -> dict[int, RowLosses]:
    """Returns evaluations whose true losses follow level[steps]. Rows differ much from each other;
    a step changes all of them together, groups of them, and each by itself.
    """
    rows = int(draw.integers(5, 80))
    tokens = draw.integers(4, 200, rows)
    own = np.exp(0.5 * draw.standard_normal(rows))
    groups = draw.integers(0, 5, rows)
    together, grouped, alone = (
        draw.uniform(0, 0.01),
        draw.uniform(0, 0.04),
        draw.uniform(0.02, 0.15),
    )
    found = {}
    for step in range(0, len(level), every):
        change = 1 + together * draw.standard_normal()
        change = change + grouped * draw.standard_normal(5)[groups]
        change = change + alone * draw.standard_normal(rows)
        found[step] = RowLosses(
            tuple(np.maximum(0.001, level[step] * own * change).tolist()), tuple(tokens)
        )
    return found


def healthy(draw: Draw, kind: str, count: int = 300) -> Simulated:
    """Makes up a run without a fault."""
    steps = np.arange(1, count + 1)
    trend = _trend(draw, steps)
    losses = HEALTHY[kind](draw, trend)
    level = np.concatenate([[trend[0] * 1.02], trend]) * draw.uniform(1.0, 1.3)
    if kind == "tiny data":
        # Whatever the training loss does, the validation one stops at some level.
        level = np.maximum(level, draw.uniform(1.0, 1.4) * level.min())
    evals = _evaluated(draw, level, int(draw.integers(10, 50))) if draw.random() < 0.8 else {}
    return Simulated(kind, losses, _rates(draw, count), evals)


def diverging(draw: Draw, count: int = 300) -> Simulated:
    """Makes up a run whose loss rises for good: ever faster, to a level, or evenly."""
    made = healthy(draw, str(draw.choice(["smooth", "noisy", "wandering", "mixed"])), count)
    onset = int(draw.integers(60, count - 80))
    after = np.arange(1, count - onset + 1)
    level = float(np.median(made.losses[onset - 20 : onset]))
    how = draw.integers(3)
    if how == 0:
        rise = level * np.expm1(after / draw.uniform(5, 40))
    elif how == 1:
        rise = max(level, 1.0) * draw.uniform(1.5, 6) * (1 - np.exp(-after / draw.uniform(2, 20)))
    else:
        rise = max(level, 1.0) * after / draw.uniform(5, 30)
    shaken = 1 + 0.2 * draw.standard_normal(len(after))
    made.losses[onset:] += np.minimum(rise, 1e6) * np.maximum(0.3, shaken)
    return Simulated(f"diverging {how}", made.losses, made.rates, {}, onset)


def overfitting(draw: Draw, count: int = 300) -> Simulated:
    """Makes up a run whose validation loss rises from some step on, while its training loss
    falls.
    """
    made = healthy(draw, str(draw.choice(["smooth", "wandering", "tiny data"])), count)
    onset = int(draw.integers(30, count // 2))
    steps = np.arange(count + 1)
    level = draw.uniform(0.8, 3) * (1 + np.exp(-steps / (onset / 3)))
    level = np.where(
        steps > onset, level * (1 + draw.uniform(0.3, 2) * (steps - onset) / count), level
    )
    return Simulated(
        "overfitting",
        made.losses,
        made.rates,
        _evaluated(draw, level, int(draw.integers(8, 20))),
        onset,
    )


# ---------------------------------------------------------------------- judging


def followed(made: Simulated, every: int = 1) -> Iterator[RunSnapshot]:
    """Yields the run's snapshot after every so many steps, and after every evaluation."""
    snapshot = RunSnapshot()
    seq = 0

    def apply(event: Event) -> None:
        nonlocal seq
        seq += 1
        snapshot.apply(Record("made-up", seq, 1e9 + seq, event))

    apply(RunStarted(total_steps=len(made.losses)))
    apply(StateChanged("running"))
    for step in range(len(made.losses) + 1):
        if step:
            loss, rate = float(made.losses[step - 1]), float(made.rates[step - 1])
            apply(StepFinished(step, loss=loss, learning_rate=rate, seconds=0.1, tokens=1000))
        rows = made.evals.get(step)
        if rows is not None:
            loss = float(np.average(rows.losses, weights=rows.tokens))
            tokens = int(sum(rows.tokens))
            apply(EvalFinished(step, loss, tokens, 0.0, list(rows.losses), list(rows.tokens)))
        if step and (rows is not None or step % every == 0):
            yield snapshot


def alarms(made: Simulated, every: int = 1) -> dict[str, int]:
    """Returns the alarms that a run gets, with the step of each when it was first raised."""
    found: dict[str, int] = {}
    for snapshot in followed(made, every):
        shown = verdict(snapshot, "running")
        for each in (shown.main, *shown.also):
            if each.is_alarm:
                found.setdefault(each.rule.removeprefix("possibly "), snapshot.step)
    return found


def false_alarms(made: Simulated, every: int = 1) -> dict[str, int]:
    """Returns the alarms of a healthy run. That tiny data are memorized is true, and not false."""
    found = alarms(made, every)
    if made.kind == "tiny data":
        found.pop("memorizes", None)
    return found


def many(make: Callable[[Draw, int], Simulated], count: int, seed: int) -> Iterator[Simulated]:
    """Yields so many runs, each from a seed of its own."""
    for number in range(count):
        yield make(np.random.default_rng([seed, number]), number)


def any_healthy(draw: Draw, number: int) -> Simulated:
    """Makes up a healthy run of each kind in turn."""
    return healthy(draw, list(HEALTHY)[number % len(HEALTHY)])


def main(count: int) -> None:
    """Prints how many healthy runs get an alarm, and how late faults are found."""
    reported: Counter[tuple[str, str]] = Counter()
    alarmed = 0
    for made in many(any_healthy, count, SEED):
        found = false_alarms(made, EVERY)
        alarmed += bool(found)
        reported.update((made.kind, rule) for rule in found)
    print(f"healthy: {alarmed} of {count} get an alarm; {dict(reported)}", flush=True)
    for name, make in (("diverging", diverging), ("overfitting", overfitting)):
        delays, early = [], 0
        for made in many(lambda draw, _, make=make: make(draw), count // 5, SEED + 1):
            step = alarms(made, EVERY).get(name)
            early += step is not None and step <= made.onset
            if step is not None and step > made.onset:
                delays.append(step - made.onset)
        middle, late = np.percentile(delays, [50, 90]) if delays else (0, 0)
        print(
            f"{name}: found {len(delays)} of {count // 5}, {early} too early; steps after onset: "
            f"median {middle:.0f}, nine of ten within {late:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
