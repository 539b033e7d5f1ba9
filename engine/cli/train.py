"""Training in a terminal: a progress bar over the run's own record, and Ctrl-C as a request to stop
and save.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from tqdm import tqdm

from engine.cli.check import kernels_in_words
from engine.config.settings import TrainConfig
from engine.errors import ConfigError, DataError, FitError, ModelError, RunError
from engine.fit.predicted import QUANTITIES
from engine.runs.events import (
    CheckpointWritten,
    DataPrepared,
    EvalFinished,
    ExactMatchMeasured,
    ExportWritten,
    FitReported,
    ForecastChecked,
    JobProgressed,
    LogLine,
    PlanBuilt,
    Record,
    RunStarted,
    StateChanged,
    StepFinished,
)
from engine.runs.following import EVENTS_FILE, last_of_kind
from engine.runs.listing import RunSummary, list_runs
from engine.train.run import Run, resume_run, start_run
from engine.words import counted, in_gib, in_seconds

IN_BYTES = ("download", "load_model", "allocate", "checkpoint")
"""Jobs whose progress is counted in bytes."""
BAD_INPUT = {error.__name__ for error in (ConfigError, DataError, ModelError, FitError)}


def run_in_terminal(
    preset: Path | None, overrides: list[str], runs_dir: Path, resume: str | None
) -> int:
    """Train `preset`, or go on with run `resume`; exit code 0 when finished or stopped, 2 when
    model, data or settings cannot be used, 1 when the run failed otherwise.

    The first Ctrl-C (or SIGTERM, or a terminal that closes) stops and saves; the second leaves now.
    Raises ConfigError for bad input.
    """
    if resume is not None:
        if preset is not None or overrides:
            raise ConfigError(
                "--resume", "a resumed run keeps its own settings; leave the preset and --set out."
            )
        run = resume_run(runs_dir, resume)
    elif preset is None:
        raise ConfigError("train", "no preset is given; name a YAML preset or use --resume RUN_ID.")
    else:
        run = start_run(TrainConfig.load(preset, overrides), runs_dir)
    screen = _Screen(run)
    run.recorder.subscribe(screen.show)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if (
        signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    ):  # nohup leaves it ignored, and so it stays
        numbers.append(signal.SIGHUP)
    previous = {s: signal.signal(s, screen.interrupt) for s in numbers}
    try:
        ended = run.execute()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        screen.close()
    if ended.state == "failed":
        _say(f"ramstream: {ended.reason}", sys.stderr)
        return 2 if ended.error_type in BAD_INPUT else 1
    _say(ended.reason)
    if ended.state == "stopped":
        _say(
            f"Resume it with: python launch.py train --resume {run.id}"
            + ("" if runs_dir == Path("runs") else f" --runs-dir {runs_dir}")
        )
    return 0


def _say(text: str, file: TextIO | None = None) -> None:
    """Print, also into a pipe or terminal that nobody reads any more: the run's end does not depend
    on that.
    """
    file = file or sys.stdout
    try:
        print(text, file=file, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


class _Screen:
    """Shows a run's records as they come."""

    def __init__(self, run: Run):
        self._run = run
        self._bar: tqdm | None = None
        self._job: tuple[str, tqdm] | None = None
        self._interrupts = 0
        _say(f"Run {run.id} in {run.folder.path}")

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Signal handler. A handler must not wait for locks, so it only queues the request."""
        self._interrupts += 1
        if self._interrupts > 1:
            os._exit(128 + number)
        self._run.request("stop")
        with contextlib.suppress(OSError):  # the terminal may be what is gone
            os.write(
                2, b"\nStopping after this step and saving; press Ctrl-C again to leave at once.\n"
            )

    def show(self, record: Record) -> None:
        event = record.event
        if isinstance(event, StepFinished):
            self._bar.set_postfix_str(
                f"loss {event.loss:.4f}  {event.tokens_per_second:,.0f} tokens/s", refresh=False
            )
            self._bar.update(event.step - self._bar.n)
        elif isinstance(event, RunStarted):
            at = "" if event.resumed_step is None else f", resumed at step {event.resumed_step}"
            self._write(
                f"{event.parameters:,} parameters on {event.device_name}, {event.total_steps} "
                f"steps{at}"
            )
            self._bar = tqdm(
                total=event.total_steps,
                initial=event.resumed_step or 0,
                unit="step",
                dynamic_ncols=True,
            )
        else:
            self._tell(event)

    def _tell(self, event: Any) -> None:
        if isinstance(event, DataPrepared):
            s = event.summary
            self._write(
                f"Data: {s['train_examples']:,} examples as {s['format']} in {s['train_rows']:,} "
                f"rows, {s['train_tokens']:,} tokens, {s['percent_trained']} % of them trained; "
                f"{s['eval_examples']:,} held out"
            )
            read = [f"{column} -> {meaning}" for column, meaning in s["columns"].items()]
            read += [f"{column} is not used" for column in s["unused_columns"]]
            self._write(f"Columns: {', '.join(read)}")
            for warning in s["warnings"]:
                self._write(f"Note: {warning}")
        elif isinstance(event, FitReported):
            for sentence in (event.report["headline"], *event.report["reasons"]):
                self._write(sentence)
        elif isinstance(event, PlanBuilt):
            self._write(f"Plan: {plan_in_words(event.choices)}")
        elif isinstance(event, ForecastChecked) and event.moment == "end":
            self._write(f"Measured, of what was predicted: {forecast_in_words(event.quantities)}")
        elif isinstance(event, EvalFinished):
            self._write(f"Step {event.step}: evaluation loss {event.loss:.4f}")
        elif isinstance(event, ExactMatchMeasured):
            self._write(
                f"Held-out exact match {event.moment} training: {event.correct} of {event.total} "
                f"({100 * event.correct / event.total:.0f} %)"
            )
        elif isinstance(event, CheckpointWritten):
            self._write(
                f"Step {event.step}: checkpoint of {event.bytes / 1e9:.2f} GB saved in "
                f"{event.seconds:.1f} s"
            )
        elif isinstance(event, ExportWritten):
            self._write(f"Model written to {self._run.folder.path / event.path}")
        elif (
            isinstance(event, LogLine) and event.level != "error"
        ):  # details of a fault; its sentence comes last
            self._write(f"{event.level}: {event.text}")
        elif isinstance(event, StateChanged) and event.reason and event.lacks_space_for != "found":
            self._write(event.reason)
        elif isinstance(event, JobProgressed) and event.total:
            self._show_job(event)

    def _show_job(self, event: JobProgressed) -> None:
        """A bar of its own for work that takes longer than a moment; it goes when the work is done."""
        if self._job is None or self._job[0] != event.job:
            self._close_job()
            unit = "B" if event.job in IN_BYTES else ""
            self._job = (
                event.job,
                tqdm(
                    total=event.total,
                    initial=event.done,
                    desc=job_in_words(event),
                    unit=unit,
                    unit_scale=True,
                    leave=False,
                    delay=1.0,
                    dynamic_ncols=True,
                ),
            )
        bar = self._job[1]
        bar.set_description(job_in_words(event), refresh=False)
        bar.update(event.done - bar.n)
        if event.done >= event.total:
            self._close_job()

    def _close_job(self) -> None:
        if self._job is not None:
            self._job[1].close()
        self._job = None

    def _write(self, text: str) -> None:
        tqdm.write(text)

    def close(self) -> None:
        self._close_job()
        if self._bar is not None:
            self._bar.close()


def job_in_words(event: JobProgressed) -> str:
    """Load model; Download, 3 of 7 files; or what a job itself says of what it does."""
    name = event.job.replace("_", " ").capitalize()
    return (
        f"{name}, {event.message}"
        if event.message and event.job in IN_BYTES
        else event.message or name
    )


def plan_in_words(choices: dict[str, Any]) -> str:
    """The plan's choices in a line; what they do not name is left out."""
    c = choices
    parts = [
        f"{counted(c['micro_batches'], 'micro-batch')} of {counted(c['micro_batch_size'], 'row')}",
        counted(c["rounds"], "round") if "rounds" in c else "",
        f"{counted(c['resident_blocks'], 'block')} resident",
        f"{counted(c['kept_blocks'], 'block')} with activations kept" if "kept_blocks" in c else "",
        f"boundaries on the {'host' if c['host_boundaries'] else 'device'}",
        kernels_in_words(c) if c.get("compiled") is not None else "",
        f"{counted(len(c['device_homes']), 'unit')} updated on the GPU"
        if c.get("device_homes")
        else "",
        f"{in_seconds(c['predicted_seconds'])} a step predicted"
        if c.get("predicted_seconds")
        else "",
    ]
    return ", ".join(part for part in parts if part)


def forecast_in_words(quantities: dict[str, dict[str, float | None]]) -> str:
    """What was measured of a run, and what was predicted of it, in a line."""
    parts = []
    for name, pair in quantities.items():
        words = in_seconds if name.endswith("_seconds") else in_gib
        if pair["measured"] is not None:
            of = (
                f" of {words(pair['predicted'])} ({100 * pair['error']:+.1f} %)"
                if pair["error"] is not None
                else ""
            )
            parts.append(f"{QUANTITIES.get(name, name)} {words(pair['measured'])}{of}")
    return ", ".join(parts)


def runs_as_text(runs_dir: Path, as_json: bool) -> str:
    """All runs, newest first: a table, or JSON, which also has what was predicted and measured of
    each run.
    """
    runs = list_runs(runs_dir)
    if as_json:
        return json.dumps(
            [asdict(run) | {"forecast": _forecast(run)} for run in runs], indent=2, default=str
        )
    if not runs:
        return f"There are no runs in {runs_dir} yet."
    rows = [("run", "state", "step", "loss", "started", "name")]
    for run in runs:
        started = (
            datetime.fromtimestamp(run.created).strftime("%Y-%m-%d %H:%M") if run.created else ""
        )
        rows.append(
            (
                run.id,
                run.state,
                f"{run.step}/{run.total_steps}",
                "" if run.loss is None else f"{run.loss:.4f}",
                started,
                run.name,
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def _forecast(run: RunSummary) -> dict[str, Any]:
    """Empty for a run whose record has none, or cannot be read: `reason` says that."""
    try:
        return forecast_of(Path(run.path))
    except RunError:
        return {}


def forecast_of(folder: Path) -> dict[str, Any]:
    """The latest comparison in a run folder's record: ``{quantity: {predicted, measured, error}}``;
    empty where there is none, as in records of older versions. Raises RunError when the record
    cannot be read.
    """
    record = last_of_kind(folder / EVENTS_FILE, ForecastChecked.kind)
    return record.event.quantities if record is not None else {}
