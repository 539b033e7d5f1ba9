"""Trainings on random answers, by the objectives that compare answers."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from engine.config.preference_settings import Objective
from engine.data.batches.packing import one_each, two_each
from engine.data.batches.pair_rows import MarkedRows, PairRows
from engine.data.batches.rows import DocumentTokens, MicroBatch, Order, batches
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.loop.reference_logps import diverged_by, kl_estimate, sequence_logps


def random_answers(
    objective: Objective, count: int, length: int, vocabulary: int, seed: int = 0
) -> PairRows | MarkedRows:
    """Returns `count` pairs of random answers or, for KTO, answers of which every second one is
    marked as desirable. Every sequence has `length` tokens, and all but the first are of the
    answer.
    """
    sequences = objective.sequences * count
    generator = np.random.default_rng(seed)
    ids = (vocabulary * generator.random(sequences * length) ** 4).astype(np.int32)
    trained = np.ones(sequences * length, dtype=bool)
    starts = np.arange(0, sequences * length + 1, length)
    trained[starts[:-1]] = False
    order = Order(seed, shuffle=False)
    rows: PairRows | MarkedRows
    if objective.sequences == 2:
        unknown = np.full(sequences, np.nan)
        rows = PairRows(
            DocumentTokens(ids, trained, starts, unknown), two_each(sequences), 0, order
        )
    else:
        marks = np.arange(sequences) % 2.0
        rows = MarkedRows(
            DocumentTokens(ids, trained, starts, marks), one_each(sequences), 0, order
        )
    rows.learn(objective)
    return rows


@dataclass
class AnswersOfSteps:
    """The same answers for each step of a training."""

    rows: PairRows | MarkedRows
    size: int
    """Rows of a micro-batch."""
    reference_seconds: float | None = None
    """Seconds in which the reference log-probabilities were computed, after kernels were compiled;
    None where none are needed.
    """

    def batches(self) -> list[MicroBatch]:
        """Returns the micro-batches of a step."""
        return batches(self.rows, len(self.rows), self.size, 1)

    def compare(self, engine: StreamingEngine) -> None:
        """Computes the reference log-probabilities, as a run does before its first step. This is
        done twice, and the second time counts.
        """
        if not self.rows.lacks_reference_logps:
            return
        for _ in range(2):
            began = time.perf_counter()
            columns = [
                sequence_logps(engine, rows, (self.size, 0), _go_on) for rows in self.rows.compared
            ]
            self.reference_seconds = time.perf_counter() - began
        self.rows.set_reference_logps(np.concatenate(columns, axis=1))

    def of_step(self, engine: StreamingEngine, found: list[MicroBatch]) -> list[MicroBatch]:
        """Returns the micro-batches `found` of a step that begins now. With KTO, all earlier steps
        are applied first, and a pass over KL completions gives the estimate of the divergence.
        """
        if not isinstance(self.rows, MarkedRows):
            return found
        engine.drain()
        sizes = len(self.rows), self.size
        kl_completions = batches(self.rows.kl_completions, *sizes, 1)
        diverged = kl_estimate(engine, kl_completions, _go_on)
        return [diverged_by(batch, diverged) for batch in found]


def _go_on() -> None:
    """Does nothing: a pass is never ended early."""
