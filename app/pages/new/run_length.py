"""What the length of a run means: passes over the data, steps and hours. All functions are pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.labels import in_predicted_time
from engine.config.data_settings import DataConfig
from engine.config.setting_warnings import warning_about_passes
from engine.config.settings import TrainConfig
from engine.text import counted


@dataclass(frozen=True)
class Sample:
    """Measurements of the first rows of the data, made for a preview."""

    rows: int
    skipped: int
    """Number of rows that give nothing to train on."""
    lengths: tuple[int, ...]
    """Tokens of each document, before it is cut."""
    percent_filled: float | None
    """Percentage of a packed row's positions that are tokens; None without packing."""
    is_all: bool
    """Whether no rows follow."""

    @classmethod
    def of(cls, preview: Mapping[str, Any]) -> Sample:
        """Takes it from a preview of `engine.data`."""
        return cls(
            rows=preview["rows_measured"],
            skipped=preview["rows_skipped"],
            lengths=tuple(preview["lengths"]),
            percent_filled=preview["percent_filled"],
            is_all=not preview["has_more"],
        )


@dataclass(frozen=True)
class RunLength:
    """Length of a run in passes and in steps."""

    passes: float
    steps: float
    rows: int
    """Number of rows of the data that are trained on."""
    validation: int = 0
    """Number of further rows, which are kept for validation."""

    @property
    def warning(self) -> str | None:
        return warning_about_passes(self.passes, self.rows)


def run_length(config: TrainConfig, sample: Sample, rows: float | None) -> RunLength | None:
    """Returns the length of a run. rows: number of rows in the data, if that is known.

    The first rows stand for the others: how many are skipped, and how long their documents are.
    Returns None where the number of rows is not known, or no row can be trained on.
    """
    rows = sample.rows if sample.is_all else rows
    data, train = config.data, config.train
    if rows is None or not sample.lengths:
        return None
    kept = data.validation_count(round(rows))
    usable = 1 - sample.skipped / sample.rows
    trained = (rows - kept) * usable
    validation = round(kept * usable)
    of_a_pass = trained * _batch_rows_of_a_row(sample, data) / config.objective.sequences
    steps_of_a_pass = max(1.0, of_a_pass / train.batch_size)
    if trained < 1:
        return None
    if train.steps is not None:
        passes = train.steps / steps_of_a_pass
        return RunLength(passes, train.steps, round(trained), validation)
    passes = train.epochs or 0.0
    return RunLength(passes, passes * steps_of_a_pass, round(trained), validation)


def _batch_rows_of_a_row(sample: Sample, data: DataConfig) -> float:
    """Returns how many rows of a batch one row of the data becomes."""
    documents = len(sample.lengths) / max(1, sample.rows - sample.skipped)
    if sample.percent_filled is None:
        return documents
    kept: Sequence[int] = [min(length, data.max_seq_len) for length in sample.lengths]
    filled = data.max_seq_len * sample.percent_filled / 100
    return documents * statistics.fmean(kept) / filled if filled else documents


def run_length_text(config: TrainConfig, found: RunLength | None, seconds: float | None) -> str:
    """Returns the line below the length, in the other unit, or an empty text. seconds: those of the
    run as predicted, None where no rates are known.
    """
    if found is None:
        return ""
    time = f" · {in_predicted_time(seconds)}" if seconds else ""
    rows = "your only row" if found.rows == 1 else f"your {counted(found.rows, 'row')}"
    passes = f"{in_passes(found.passes)} over {rows}"
    steps = counted(max(1, round(found.steps)), "step")
    length = (steps, passes) if config.train.steps is not None else (passes, steps)
    return f"{' ≈ '.join(length)}{time}{_about_validation(found)}"


def _about_validation(found: RunLength) -> str:
    """Returns why fewer rows are trained than the data have."""
    if not found.validation:
        return ""
    total = found.rows + found.validation
    are = "is" if found.validation == 1 else "are"
    return f". {found.validation:,} of {total:,} rows {are} kept for validation."


def in_passes(passes: float) -> str:
    """Returns a number of passes over the data as text, such as "3 passes"."""
    if passes < 0.01:
        return "less than 0.01 passes"
    number = f"{passes:,.0f}" if passes >= 20 else f"{float(f'{passes:.2g}'):g}"
    return f"{number} {'pass' if number == '1' else 'passes'}"
