"""A run in a terminal: a progress bar, which is drawn from the run's own record. Ctrl-C makes the
run stop and save.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from engine.config.settings import TrainConfig
from engine.data.sources.open_source import refuse_missing_file
from engine.errors import ConfigError, DataError, DeviceError, FitError, ModelError
from engine.paths import program_command
from engine.planning.fit.predictions import QUANTITIES
from engine.runs.record.events import (
    BestKept,
    CheckpointWritten,
    Comparison,
    DataPrepared,
    EvalFinished,
    Event,
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
from engine.runs.record.run_folder import open_run
from engine.text import counted, in_gb, in_gib, in_percent, in_seconds
from engine.tools.cli.bars import SteadyBar
from engine.tools.cli.check_report import block_inputs_text, kernels_text
from engine.tools.cli.end_signals import EndSignals, write_line
from engine.training.checkpoints.saved_on_disk import saved_steps
from engine.training.loop.run import Run, resume_run, start_run
from engine.training.weights.usable_start import refuse_unusable

IN_BYTES = ("download", "load_model", "allocate", "checkpoint")
"""Jobs whose progress is measured in bytes."""
BAD_INPUT = {error.__name__ for error in (ConfigError, DataError, ModelError, FitError)}
"""Errors for bad input to a run."""


@dataclass(frozen=True)
class TrainCommand:
    """The run that the command line asks for: of `preset`, a resume of the run `resume`, or a run
    that starts from the weights of the run `start_from`, whose settings it takes if there is no
    preset.
    """

    preset: Path | None
    overrides: Sequence[str]
    runs_dir: Path
    resume: str | None = None
    start_from: str | None = None

    def with_overrides(self, more: Sequence[str]) -> TrainCommand:
        """Returns the command with further settings, which override those before."""
        return replace(self, overrides=[*self.overrides, *more])


def run_in_terminal(command: TrainCommand) -> int:
    """Trains the run of the command; returns the exit code, as `show_run` does. Raises ConfigError
    for bad input, and DataError for a data file that does not exist.
    """
    return show_run(asked_run(command), command.runs_dir)


def asked_run(command: TrainCommand) -> Run:
    """Returns the run of a command, ready to execute. Raises as `run_in_terminal` does."""
    preset, overrides, runs_dir = command.preset, command.overrides, command.runs_dir
    if command.resume is not None:
        if preset is not None:
            raise ConfigError(
                "--resume",
                "a resumed run keeps its own settings; leave the preset out, and change single "
                "settings with --set.",
            )
        return resume_run(runs_dir, command.resume, overrides)
    if command.start_from is not None:
        return start_run(trained_on(runs_dir, command.start_from, preset, overrides), runs_dir)
    if preset is None:
        raise ConfigError(
            "train",
            "no preset is given; name a YAML preset, or use --resume RUN_ID or --from RUN_ID.",
        )
    config = TrainConfig.load(preset, overrides)
    for part, _ in config.data.parts():
        # A run would find this too, but only after torch and transformers are imported.
        refuse_missing_file(part.only_source)
    refuse_unusable(config)
    return start_run(config, runs_dir)


def show_run(run: Run, runs_dir: Path) -> int:
    """Executes a run and shows it; returns the exit code.

    The code is 0 if the run finished or was stopped, 2 if the model, data or settings cannot be
    used, and 1 if the run failed for another reason, or its export did. The first Ctrl-C (or
    SIGTERM, or a closed terminal) stops and saves the run; the second ends the process at once.
    """
    screen = _Screen(run)
    run.recorder.subscribe(screen.show)
    try:
        with EndSignals(screen.interrupt, run.expect_stop):
            ended = run.execute()
    finally:
        screen.close()
    if ended.state == "failed":
        _print_line(f"ramstream: {ended.reason}", sys.stderr)
        if ended.error_type == DeviceError.__name__:
            _end_without_device()
        return 2 if ended.error_type in BAD_INPUT else 1
    if ended.export_failed:
        _print_line(f"ramstream: {ended.reason}", sys.stderr)
        _print_line(
            f"Export it with: {program_command()} export {run.id} FOLDER{_runs_option(runs_dir)}"
        )
        if ended.error_type == DeviceError.__name__:
            _end_without_device()
        return 1
    _print_line(ended.reason)
    if ended.state == "stopped":
        _print_line(_how_it_goes_on(run, runs_dir))
    return 0


def _saves(run: Run) -> bool:
    """Returns whether a run writes checkpoints."""
    try:
        return run.folder.config.output.checkpoint != "none"
    except ConfigError:
        return True  # the run ends for this very reason, and says so


def _how_it_goes_on(run: Run, runs_dir: Path) -> str:
    """Returns a line with the command that continues a run that was stopped, or trains on from
    it.
    """
    saved = saved_steps(run.folder.checkpoints_path)
    what, option = "Resume it", "--resume"
    if saved.is_weights_alone:
        what, option = "Train on from its weights", "--from"
    elif saved.newest is None:
        what = "Begin it again"
    return f"{what} with: {program_command()} train {option} {run.id}{_runs_option(runs_dir)}"


def _runs_option(runs_dir: Path) -> str:
    return "" if runs_dir == Path("runs") else f" --runs-dir {runs_dir}"


def _end_without_device() -> None:
    """Ends the process with exit code 1 if it has used CUDA.

    CUDA objects of a lost device abort the process when they are freed at its end, with a trace
    that hides the sentence before it. Everything that lasts is on the disk by now.
    """
    # A run that never reached its device may not have imported torch.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        os._exit(1)


def trained_on(
    runs_dir: Path, run_id: str, preset: Path | None, overrides: Sequence[str]
) -> TrainConfig:
    """Returns the settings of a new run that starts from the newest weights of run `run_id`.

    They are those of `preset`, or else of that run. Raises RunError if there is no such run, and
    ConfigError for bad input.
    """
    folder = open_run(runs_dir, run_id)
    config = folder.config if preset is None else TrainConfig.load(preset)
    values = {"model.start_from": str(folder.path.resolve())}
    return config.with_values(values).with_overrides(overrides)


def _print_line(text: str, file: TextIO | None = None) -> None:
    """Prints a line, even if nothing reads the pipe or terminal any more.

    The end of a run must not depend on its output being read.
    """
    file = file or sys.stdout
    try:
        print(text, file=file, flush=True)
    except OSError:
        # Later output is discarded, so that it cannot fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


STEP_IS_FINISHED = (
    "Ranks on several nodes finish the step under way before it is saved; if their processes are "
    "ended sooner, what was trained since the newest checkpoint is not saved."
)


class _Screen:
    """Shows the records of a run as they arrive."""

    def __init__(self, run: Run):
        self._run = run
        self._bar: tqdm | None = None
        self._job: tuple[str, tqdm] | None = None
        saving = " and saving" if _saves(run) else ""
        again = "press Ctrl-C again to leave at once"
        self._stopping = f"\nStopping after this step{saving}; {again}."
        _print_line(f"Run {run.id} in {run.folder.path}")

    def interrupt(self, _number: int, is_urgent: bool) -> None:
        """Queues a request when a signal arrives; a signal handler must not wait for locks."""
        self._run.stop(is_urgent)
        write_line(self._stopping)
        if is_urgent and self._run.finishes_its_step:
            write_line(STEP_IS_FINISHED)

    def show(self, record: Record) -> None:
        """Shows one record; the recorder calls this."""
        event = record.event
        if isinstance(event, StepFinished) and self._bar is not None:
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
            self._bar = SteadyBar(
                total=event.total_steps,
                initial=event.resumed_step or 0,
                unit="step",
                dynamic_ncols=True,
            )
        elif isinstance(event, FitReported):
            for sentence in (event.report["headline"], *event.report["reasons"]):
                self._write(sentence)
        elif isinstance(event, DataPrepared):
            self._show_data(event.summary)
        elif isinstance(event, JobProgressed):
            if event.total:
                self._show_job(event)
        else:
            line = self._line_of(event)
            if line:
                self._write(line)

    def _show_data(self, summary: dict[str, Any]) -> None:
        percent = f"{summary['percent_trained']} %"
        if not summary["percent_trained"] and summary["train_loss_tokens"]:
            percent = "under 0.1 %"
        self._write(
            f"Data: {summary['train_examples']:,} examples as {summary['format']} in "
            f"{summary['train_rows']:,} rows, {summary['train_tokens']:,} tokens, "
            f"{percent} of them trained; {summary['eval_examples']:,} for validation"
        )
        read = [f"{column} -> {meaning}" for column, meaning in summary["columns"].items()]
        read += [f"{column} is not used" for column in summary["unused_columns"]]
        self._write(f"Columns: {', '.join(read)}")
        for warning in summary["warnings"]:
            self._write(f"Note: {warning}")

    def _line_of(self, event: Event) -> str:
        """Returns the line that shows an event, "" for one that is not shown."""
        line = ""
        match event:
            case PlanBuilt():
                line = f"Plan: {plan_text(event.choices)}"
            case ForecastChecked(moment="end"):
                line = f"Measured, of what was predicted: {prediction_check_text(event.quantities)}"
            case EvalFinished():
                when = f"Step {event.step}" if event.step else "Before the first step"
                line = f"{when}: validation loss {event.loss:.4f}"
                before = self._run.recorder.snapshot.validation.before
                if before is not None and event.step and event.loss > before.loss:
                    line += f", above the {before.loss:.4f} before training"
            case ExactMatchMeasured():
                line = (
                    f"Answers right {event.moment} training: {event.correct} of "
                    f"{event.total} ({in_percent(event.correct, event.total)})"
                )
            case CheckpointWritten():
                alone = " of weights alone," if event.holds == "weights" else ""
                line = (
                    f"Step {event.step}: checkpoint{alone} of {in_gb(event.bytes)} saved in "
                    f"{in_seconds(event.seconds)}, for which training waited at most "
                    f"{in_seconds(event.waited_seconds)}"
                )
            case BestKept():
                line = (
                    f"Step {event.step}: the best weights so far, {in_gb(event.bytes)}, kept "
                    f"in {in_seconds(event.seconds)}"
                )
            case ExportWritten():
                line = f"Model written to {self._run.folder.path / event.path}"
            # Lines of level error are details of a fault; the sentence that explains it comes last.
            case LogLine() if event.level != "error":
                line = f"{event.level}: {event.text}"
            case StateChanged() if event.lacks_space_for != "found":
                line = event.reason
        return line

    def _show_job(self, event: JobProgressed) -> None:
        """Shows a bar for work that takes longer than a moment, and removes it when the work is
        done.
        """
        if self._job is not None and self._job[0] == event.job:
            bar = self._job[1]
        else:
            self._close_job()
            bar = SteadyBar(
                total=event.total,
                initial=event.done,
                desc=job_text(event),
                unit="B" if event.job in IN_BYTES else "",
                unit_scale=True,
                leave=False,
                delay=1.0,
                dynamic_ncols=True,
            )
            self._job = (event.job, bar)
        bar.set_description(job_text(event), refresh=False)
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


def job_text(event: JobProgressed) -> str:
    """Returns a text for a job: "Load model", "Download, 3 of 7 files", or the job's own
    message.
    """
    name = event.job.replace("_", " ").capitalize()
    if event.message and event.job in IN_BYTES:
        return f"{name}, {event.message}"
    return event.message or name


_UPDATES = {
    "gradients_on_gpu": "gradients kept on the GPU",
    "moments_after_weights": "moments updated after all weights",
}


def plan_text(choices: dict[str, Any]) -> str:
    """Returns the choices of a plan in one line, leaving out those that are missing."""
    rows = counted(choices["micro_batch_size"], "row")
    parts = [f"{counted(choices['micro_batches'], 'micro-batch')} of {rows}"]
    if "rounds" in choices:
        parts.append(counted(choices["rounds"], "round"))
    if choices.get("nodes_per_replica", 1) > 1:
        each = counted(choices["ranks"] // choices["nodes_per_replica"], "rank")
        parts.append(f"divided among {choices['nodes_per_replica']} nodes of {each} each")
    elif choices.get("replicas", 1) > 1:
        each = counted(choices["ranks"], "rank")
        parts.append(f"on {choices['replicas']} nodes of {each} each")
    if choices.get("gpu_resident_units"):
        parts.append(f"{counted(choices['gpu_resident_units'], 'unit')} living on the GPU")
    if choices.get("disk_offloaded_units"):
        parts.append(f"moments of {counted(choices['disk_offloaded_units'], 'unit')} on the disk")
    if choices.get("disk_offloaded_block_inputs"):
        parts.append(f"{choices['disk_offloaded_block_inputs']:,} block inputs on the disk")
    parts.append(f"{counted(choices['blocks_kept_in_slots'], 'block')} kept in slots")
    if "blocks_without_recompute" in choices:
        parts.append(
            f"{counted(choices['blocks_without_recompute'], 'block')} with activations kept"
        )
    parts.append(block_inputs_text(choices))
    parts += [words for name, words in _UPDATES.items() if choices.get(name)]
    if choices.get("compiled") is not None:
        parts.append(kernels_text(choices))
    if choices.get("device_updated_units"):
        parts.append(f"{counted(len(choices['device_updated_units']), 'unit')} updated on the GPU")
    if choices.get("predicted_seconds"):
        parts.append(f"{in_seconds(choices['predicted_seconds'])} a step predicted")
    return ", ".join(parts)


def prediction_check_text(quantities: Mapping[str, Comparison]) -> str:
    """Returns one line that compares the measurements of a run with the predictions."""
    parts = []
    for name, pair in quantities.items():
        as_text = in_seconds if name.endswith("_seconds") else in_gib
        measured, predicted, error = pair["measured"], pair["predicted"], pair["error"]
        if measured is None:
            continue
        part = f"{QUANTITIES.get(name, name)} {as_text(measured)}"
        if error is not None and predicted is not None:
            part += f" of {as_text(predicted)} ({100 * error:+.1f} %)"
        parts.append(part)
    return ", ".join(parts)
