"""What the list of runs shows of a run's evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.runs.summaries.benchmark_results import read_benchmarks
from engine.runs.summaries.evaluation_figures import (
    LOSS,
    RIGHT,
    Figure,
    benchmark_figures,
    evaluation_figures,
)
from engine.runs.summaries.evaluation_results import read_evaluations


@dataclass(frozen=True)
class EvaluationSummary:
    """The latest figures of a run's trained model, beside its base model."""

    loss: Figure | None = None
    right: Figure | None = None
    """Share of validation prompts that are answered exactly as expected."""
    tasks: tuple[Figure, ...] = ()
    """First metric of each task that was asked."""


NOT_EVALUATED = EvaluationSummary()


def read_summary(path: Path) -> EvaluationSummary:
    """Returns the summary of the run folder `path`. What cannot be read is left out."""
    of_rows: dict[str, Figure] = {}
    for evaluation in read_evaluations(path).found:
        figures = evaluation_figures(evaluation)
        of_rows |= {figure.name: figure for figure in figures if figure.trained is not None}
    tasks: dict[str, Figure] = {}
    for figure in benchmark_figures(read_benchmarks(path).results):
        tasks.setdefault(figure.name.partition(":")[0], figure)
    return EvaluationSummary(of_rows.get(LOSS), of_rows.get(RIGHT), tuple(tasks.values()))
