"""Answers of random tokens are trained here by the objectives that compare answers."""

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
    """Returns so many pairs of random answers or, for KTO, answers of which every second one is
    marked as good. Every line has `length` tokens, and all but the first are of the answer.
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
    """An `AnswersOfSteps` gives each step of a training the same answers."""

    rows: PairRows | MarkedRows
    size: int
    """A micro-batch has so many rows."""
    reference_seconds: float | None = None
    """What the answers are compared with was found in so many seconds, after kernels were compiled;
    None where nothing was looked for.
    """

    def batches(self) -> list[MicroBatch]:
        """Returns the micro-batches of a step."""
        return batches(self.rows, len(self.rows), self.size, 1)

    def compare(self, engine: StreamingEngine) -> None:
        """Finds what the answers are compared with, as a run does before its first step. It is done
        twice, and the second time counts.
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
        are applied first, and a pass tells how much likelier other answers have become.
        """
        if not isinstance(self.rows, MarkedRows):
            return found
        engine.drain()
        sizes = len(self.rows), self.size
        kl_completions = batches(self.rows.kl_completions, *sizes, 1)
        diverged = kl_estimate(engine, kl_completions, _go_on)
        return [diverged_by(batch, diverged) for batch in found]


def _go_on() -> None:
    """Nothing ends a pass early."""
