"""`fastest` finds the candidate with the shortest step among many. No torch.

It is a best-first search. Each candidate begins with a time that is too short, the bound, which a
closed form gives in microseconds. The candidate with the shortest time so far is looked at again:
the optimizer of each unit is placed, which adds the waits for updates; and when it comes first once
more, its plan is simulated. The search ends with a simulated candidate that comes first, or after a
few simulations; most candidates are never looked at twice.

The closed form is wrong by a few per cent where the bus limits a step, and about equally wrong for
candidates of one kind: those with one batch split, or within it with as many units on the device.
So what a simulation finds corrects the times of its kind, and the next one to be simulated is often
of another.

The best batch split is found first, then the best use of memory within it. Times are compared after
a handicap: predictions are less exact than a per cent, and where steps take equally long, some
choices are better than others for other reasons.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from engine.planning.fit.fill_memory import Candidate
from engine.planning.fit.step_times import StepTimes, TimedCandidate
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import MainGrad

SPLITS_SIMULATED = 3
"""Most plans that are simulated to find the best batch split."""
USES_SIMULATED = 4
"""Most plans that are simulated to find the best use of memory."""
SHORTEST = 0.95
"""Least factor from the closed form to a simulation that is expected of a kind of step of which no
plan has been simulated.
"""
ROUNDS_COST = 1.002
"""Factor by which a step with several rounds counts as longer, since it reads all weights again."""
GPU_RESIDENT_COST = 1.01
"""Factor by which a step counts as longer if no unit lives on the device; the more do, the smaller.
Those take no RAM, and nothing of theirs crosses the bus. Predictions are less exact than that.
"""
ALL_GPU_RESIDENT_GAIN = 1.05
"""Factor by which a step counts as shorter if the whole model lives on the device and units are
short. No other lane then takes the interpreter from the thread that launches the blocks, which no
prediction counts.
"""
SHORT_UNIT_SECONDS = 0.03
"""A unit is short if its forward and backward of a micro-batch take less than this. With longer
ones, the thread that launches blocks is far ahead of the device (an H200, 3.1 billion parameters: a
unit takes 15 ms with 16 x 1,024 tokens, and steps are up to 5 % longer than predicted; with
96 x 1,024 in two micro-batches it takes 45 ms, and they are up to 2 % longer).
"""
SHARDS_GAIN = 0.95
"""Factor by which a step must be shorter for shards of accumulators to be kept, which are added up
in every round, where each device has room for whole accumulators, which are added up once: no GPU
has measured both. Against a vertical step, four GPUs gained more than was predicted.
"""


class Found(NamedTuple):
    """The result of `fastest`."""

    best: TimedCandidate
    near: tuple[TimedCandidate, ...]
    """Candidates with the best batch splits, that of `best` among them."""


def fastest(
    candidates: Sequence[Candidate], times: StepTimes, units: int, simulates: bool
) -> Found:
    """Returns the fastest of the candidates, with its time. There must be one.

    units: number of units of the model. simulates: False takes the times of the closed form.
    """
    found = _fastest(candidates, times, units, simulates)
    kind = found.best.choices.gradients.main_grad
    whole = [each for each in candidates if each.choices.gradients.main_grad == MainGrad.DEVICE]
    if kind != MainGrad.SHARDS or not whole:
        return found
    if found.best.seconds < SHARDS_GAIN * _fastest(whole, times, units, simulates).best.seconds:
        return found
    others = [each for each in candidates if each.choices.gradients.main_grad != MainGrad.SHARDS]
    return _fastest(others, times, units, simulates)


def _fastest(
    candidates: Sequence[Candidate], times: StepTimes, units: int, simulates: bool
) -> Found:
    near = _SplitSearch(candidates, times, units).best(SPLITS_SIMULATED if simulates else 0)
    if not simulates:
        return Found(near[0], near)
    alike = [each for each in candidates if each.split_key == near[0].split_key]
    return Found(_MemorySearch(alike, times, units).best(USES_SIMULATED)[0], near)


class _Stage(IntEnum):
    """How exactly the time of a candidate is known."""

    BOUND = 0
    PLACED = 1
    SIMULATED = 2


class _Entry(NamedTuple):
    """A candidate in the queue."""

    score: float
    """Seconds times its handicap; what is looked at next has the lowest."""
    order: int
    stage: _Stage
    timed: TimedCandidate


class _Search:
    """The candidates in the order of their scores."""

    def __init__(self, candidates: Iterable[Candidate], times: StepTimes, units: int):
        self._times = times
        self._units = units
        self._order = itertools.count()
        self._placed: set[tuple[float, int, PlanChoices]] = set()
        self._longer: dict[Hashable, float] = {}
        """Least factor from the closed form to a simulation, for each kind of step."""
        self._queue = [
            self._entry(_Stage.BOUND, TimedCandidate(times.bound(each), *each))
            for each in candidates
        ]
        heapq.heapify(self._queue)

    def handicap(self, timed: TimedCandidate) -> float:
        """Returns the factor that the seconds of a step are multiplied with to be compared."""
        raise NotImplementedError

    def kind(self, timed: TimedCandidate) -> Hashable:
        """Returns what the closed form is about equally wrong for."""
        raise NotImplementedError

    def best(self, most_simulated: int) -> tuple[TimedCandidate, ...]:
        """Returns the fastest candidates, the best first: those that were simulated.
        most_simulated: most plans that are simulated; with 0, one candidate is returned.
        """
        simulated: list[_Entry] = []
        while self._queue:
            entry = heapq.heappop(self._queue)
            if entry.stage == _Stage.BOUND:
                self._place(entry.timed)
            elif not most_simulated:
                return (entry.timed,)
            elif entry.stage == _Stage.SIMULATED:
                break
            else:
                simulated.append(self._simulate(entry.timed))
                if len(simulated) == most_simulated:
                    break
        return tuple(entry.timed for entry in sorted(simulated))

    def _place(self, bound: TimedCandidate) -> None:
        """Decides where the optimizers of a candidate run, and puts it back."""
        placed = self._times.placed(Candidate(bound.size, bound.choices))
        if bound.choices.updates.update_buffers > placed.choices.updates.update_buffers:
            return  # another candidate uses the memory of the buffers that nothing needs
        # More buffers than the device needs to keep up change nothing.
        same = placed.choices.changed(update_buffers=0)
        if (placed.seconds, placed.size, same) not in self._placed:
            self._placed.add((placed.seconds, placed.size, same))
            heapq.heappush(self._queue, self._entry(_Stage.PLACED, placed))

    def _simulate(self, placed: TimedCandidate) -> _Entry:
        """Simulates the step of a candidate, puts it back, and corrects the scores of others."""
        found = self._times.simulated(placed)
        kind = self.kind(placed)
        longer = found.seconds / placed.seconds
        self._longer[kind] = min(longer, self._longer.get(kind, longer))
        for place, each in enumerate(self._queue):
            if each.stage == _Stage.PLACED and self.kind(each.timed) == kind:
                self._queue[place] = self._entry(_Stage.PLACED, each.timed)
        entry = self._entry(_Stage.SIMULATED, found)
        self._queue.append(entry)
        heapq.heapify(self._queue)
        return entry

    def _entry(self, stage: _Stage, timed: TimedCandidate) -> _Entry:
        expected = 1.0
        if stage == _Stage.BOUND:
            expected = SHORTEST
        elif stage == _Stage.PLACED:
            expected = self._longer.get(self.kind(timed), SHORTEST)
        score = expected * timed.seconds * self.handicap(timed)
        return _Entry(score, next(self._order), stage, timed)


class _SplitSearch(_Search):
    """Compares batch splits."""

    def handicap(self, timed: TimedCandidate) -> float:
        return ROUNDS_COST if timed.choices.batching.rounds > 1 else 1.0

    def kind(self, timed: TimedCandidate) -> Hashable:
        return timed.split_key


class _MemorySearch(_Search):
    """Compares uses of memory within a batch split."""

    def handicap(self, timed: TimedCandidate) -> float:
        choices = timed.choices
        resident = choices.placement.gpu_resident_units / self._units
        uses = self._units * choices.batching.micro_batches
        is_short = timed.seconds < SHORT_UNIT_SECONDS * uses
        if resident == 1 and is_short:
            return 1 / ALL_GPU_RESIDENT_GAIN
        return 1 + (GPU_RESIDENT_COST - 1) * (1 - resident)

    def kind(self, timed: TimedCandidate) -> Hashable:
        choices = timed.choices
        return (
            choices.placement.gpu_resident_units,
            choices.updates.update_chunks if choices.updates.device_updated_units else 0,
            choices.activations.disk_offloaded_block_inputs > 0,
        )
