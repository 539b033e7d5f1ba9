"""The seconds of a candidate's step, found in three ways, each slower and more exact than the one
before. No torch.

1. `bound`: the closed form, as if the step waited for no update and for no moments on the disk.
2. `placed`: the closed form with the waits for updates, once it is decided where the optimizer of
   each unit runs (`engine.planning.fit.optimizer_placement`).
3. `simulated`: the plan is written and simulated op by op.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.machine.link_rates import of_rank
from engine.machine.rates import Rates
from engine.planning.fit.cost_model import Cost, MicroBatch, step_seconds
from engine.planning.fit.device_memory import Sizer
from engine.planning.fit.fill_memory import Candidate
from engine.planning.fit.optimizer_placement import (
    place_optimizers,
    wait_for_block_inputs,
    wait_for_disk,
)
from engine.planning.fit.simulate_step import estimated_seconds
from engine.planning.schedule.choices import PlanChoices


@dataclass(frozen=True)
class TimedCandidate:
    """A candidate with the predicted seconds of its step. `size` is the rows of a micro-batch."""

    seconds: float
    size: int
    choices: PlanChoices

    @property
    def split_key(self) -> tuple[int, int]:
        """As that of a `Candidate`."""
        return Candidate(self.size, self.choices).split_key


class StepTimes:
    """Predicts the steps of one job on one machine."""

    def __init__(self, sizer: Sizer, rates: Rates):
        self._sizer = sizer
        self._rates = rates
        self._costs: dict[int, Cost] = {}
        self._placed: dict[Candidate, TimedCandidate] = {}

    def bound(self, candidate: Candidate) -> float:
        """Returns the seconds of a step that waits for no update."""
        return self._closed_form(candidate, waited=0.0)

    def placed(self, candidate: Candidate) -> TimedCandidate:
        """Returns the candidate with the units whose optimizers run on the device, and the seconds
        of its step with the waits for updates.
        """
        if candidate not in self._placed:
            self._placed[candidate] = self._place(candidate)
        return self._placed[candidate]

    def _place(self, candidate: Candidate) -> TimedCandidate:
        size, choices = candidate
        placement = place_optimizers(self._cost(size), choices, self._sizer.device)
        waited = placement.waited
        if choices.placement.disk_offloaded_units:
            waited = max(waited, wait_for_disk(self._cost(size), choices))
        if placement.units:
            choices = choices.changed(device_updated_units=placement.units)
        else:
            choices = choices.changed(
                device_updated_units=(),
                moments_after_weights=placement.moments_after_weights,
                update_buffers=0,
            )
        seconds = self._closed_form(Candidate(size, choices), waited)
        return TimedCandidate(seconds, size, choices)

    def simulated(self, candidate: TimedCandidate) -> TimedCandidate:
        """Returns the candidate with the seconds of its simulated step."""
        sizer = self._sizer
        seconds = estimated_seconds(
            sizer.shape,
            candidate.choices,
            self._rates,
            self._micro_batch(candidate.size),
            sizer.device,
        )
        return replace(candidate, seconds=seconds)

    def _closed_form(self, candidate: Candidate, waited: float) -> float:
        """Returns the seconds of a step in closed form. waited: those in which the first forward
        pass waits for updates.
        """
        cost = self._cost(candidate.size)
        waited += wait_for_block_inputs(cost, candidate.choices)
        return step_seconds(cost, candidate.choices, waited)

    def _micro_batch(self, size: int) -> MicroBatch:
        sizer = self._sizer
        varlen = sizer.shape.varlen(sizer.packed, sizer.device)
        rows = MicroBatch(size, sizer.row_length, varlen, sizer.tile_tokens)
        return rows.learning(sizer.job.config.objective, sizer.loss_chunk)

    def _cost(self, size: int) -> Cost:
        if size not in self._costs:
            sizer = self._sizer
            rates = of_rank(self._rates, sizer.job.ranks)
            self._costs[size] = Cost(sizer.shape, rates, self._micro_batch(size), sizer.compiled)
        return self._costs[size]
