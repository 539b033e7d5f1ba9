"""Evaluates a run: its trained model beside its base model, on the run's own validation
rows and on tasks of lm-evaluation-harness.

One side is loaded after the other. Each part is kept in the run's folder when it is done, so that
an evaluation that was broken off goes on behind its last part.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from engine import safe_files
from engine.config.export_choice import ExportFrom
from engine.data.batches.loader import PreparedData
from engine.errors import CheckpointError, RunError
from engine.progress import Progress, labeled, no_progress
from engine.runs.record.following import Follower, catch_up
from engine.runs.record.run_folder import RunFolder, open_run
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.benchmark_results import append_benchmarks, latest, read_benchmarks
from engine.runs.summaries.evaluation_figures import figures_of
from engine.runs.summaries.evaluation_results import (
    LOSS,
    MATCHED,
    OF_ROWS,
    Began,
    Ended,
    Evaluation,
    Line,
    Noted,
    Side,
    TaskDone,
    Wanted,
    append_evaluation,
    read_evaluations,
)
from engine.runs.summaries.listing import summarize
from engine.tools.chat.chat_engines import ChatEngine, borrow, load
from engine.tools.chat.chat_sources import folder_of, how_they_fit
from engine.tools.chat.conversation import Source, base_of, best_of, checkpoint_of
from engine.tools.evaluate.harness import (
    AskedTasks,
    MeasuredWeights,
    ask,
    open_tasks,
    refuse_programs,
    refuse_without_harness,
    results_of,
)
from engine.tools.evaluate.validation import ValidationRows, validation_rows
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.checkpoints.saved_on_disk import saved_steps
from engine.training.export.model_card import CARD, with_results
from engine.training.loop.paused_calls import PausedCalls

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


@dataclass(frozen=True)
class AskedEvaluation:
    """What to evaluate, and how."""

    wanted: Wanted
    of: ExportFrom | None = None
    """Weights of the trained side; without it they are the run's export or, where there is none,
    what an export would take.
    """
    allows_code: bool = False
    """Tasks of a user's own may run programs."""


@dataclass(frozen=True)
class _Chosen:
    """The trained weights: where they are, and their description."""

    source: Source
    measured: MeasuredWeights


@dataclass
class _Work:
    """An evaluation under way."""

    folder: RunFolder
    chosen: _Chosen
    evaluation: Evaluation
    data: PreparedData | None
    tasks: AskedTasks
    progress: Progress
    lent: PausedCalls | None
    index: TaskManager | None = None
    """The harness's list of tasks; None where none is asked."""


def evaluate_run(
    runs_dir: str | os.PathLike[str],
    run_id: str,
    asked: AskedEvaluation,
    progress: Progress = no_progress,
    allows: Callable[[str], bool] = lambda _: False,
    lent: PausedCalls | None = None,
) -> Evaluation:
    """Evaluates the best or the last weights of a run, according to `asked`, and returns what was
    found, which is also kept in the run's folder. Where the same evaluation of the same weights was
    broken off, it goes on.

    `lent` are the calls of a run that is paused in this process: its current weights are evaluated.
    `allows` gets a sentence on the programs that a user's own tasks would run, and returns whether
    they may. Raises RunError for a run that is under way, for one without weights and, where tasks
    are asked, without lm-evaluation-harness; DataError for tasks that cannot be run and rows that
    cannot be read; and FitError where memory is short.
    """
    wanted = asked.wanted
    if wanted.tasks:
        refuse_without_harness()
    folder = open_run(runs_dir, run_id)
    if lent is None and folder.is_running() and not _is_paused(folder):
        raise RunError(f"Run {run_id} goes on; evaluate it when it is paused or over.")
    chosen = _chosen(folder, asked.of) if lent is None else _lent(folder, lent)
    tasks = AskedTasks(
        wanted.tasks,
        Path(wanted.include) if wanted.include else None,
        wanted.limit,
        wanted.shots,
        wanted.chat,
        wanted.most_tokens,
        asked.allows_code,
    )
    index = None
    if wanted.tasks:
        tasks = refuse_programs(tasks, allows)
        index = open_tasks(tasks)
        wanted = _with_digest(wanted, tasks.include)
    data = None
    if wanted.validation or wanted.answers:
        data = validation_rows(folder.config, progress)
    evaluation = _begun(folder, chosen.measured, wanted, data)
    work = _Work(folder, chosen, evaluation, data, tasks, progress, lent, index)
    for side in evaluation.sides:
        if work.evaluation.missing(side):
            _evaluate(work, side)
    _keep(work, Ended(evaluation.began.id))
    if chosen.measured.weights == "export":
        _add_to_card(folder, chosen.measured)
    return evaluation


def _is_paused(folder: RunFolder) -> bool:
    run = summarize(folder)
    return run is not None and run.state == "paused"


def _chosen(folder: RunFolder, of: ExportFrom | None) -> _Chosen:
    """Returns which weights are measured. Raises RunError if the run has none."""
    config, runs = folder.config, folder.path.parent
    if of is None and safe_files.is_file(folder.export_path / "config.json", folder.root):
        source = folder_of(str(folder.checked_export()), f"The export of run {folder.id}")
        snapshot = RunSnapshot()
        catch_up(snapshot, Follower(folder.events_path))
        measured = MeasuredWeights("export", snapshot.exported_step, source.config.model.dtype)
        return _Chosen(source, measured)
    saved = saved_steps(folder.checkpoints_path, folder.best_path)
    if saved.trained_on is None:
        raise RunError(f"Run {folder.id} has no weights: it has no export and no checkpoint.")
    if of is None:
        step = saved.exported(config.output.export_from)
        of = "best" if step == saved.best else "last"
    step = saved.best if of == "best" else saved.newest
    if step is None:
        kept = f"it has the {'last' if of == 'best' else 'best'} ones"
        raise RunError(f"The {of} weights of run {folder.id} are not kept; {kept}.")
    source_of = best_of if of == "best" else checkpoint_of
    source = source_of(runs, folder.id, config, step, f"Step {step:,} of run {folder.id}")
    return _Chosen(source, MeasuredWeights(of, step, config.model.dtype))


def _lent(folder: RunFolder, lent: PausedCalls) -> _Chosen:
    """Returns the current weights of a run that is paused in this process."""
    step = lent.do(lambda prepared: prepared.step)
    label = f"Step {step:,} of run {folder.id}"
    source = checkpoint_of(folder.path.parent, folder.id, folder.config, None, label)
    return _Chosen(source, MeasuredWeights("last", step, folder.config.model.dtype))


def _base(folder: RunFolder, dtype: str) -> _Chosen:
    """Returns the weights of the base model, in the dtype of the trained ones."""
    config = folder.config.with_values({"model.dtype": dtype})
    return _Chosen(base_of(config), MeasuredWeights("base", None, dtype))


# ---------------------------------------------------------------------- the record


def _begun(
    folder: RunFolder, measured: MeasuredWeights, wanted: Wanted, data: PreparedData | None
) -> Evaluation:
    """Returns the latest evaluation if it was broken off and wanted the same of the same weights
    and rows, or else a new one.
    """
    began = Began(
        uuid.uuid4().hex,
        wanted,
        measured.weights,
        measured.step,
        measured.dtype,
        "" if data is None else data.fingerprint,
        time.time(),
        "" if data is None else _changed(folder, data.fingerprint),
    )
    before = read_evaluations(folder.path).latest
    if before is not None and not before.is_over:
        as_before = structs.replace(began, id=before.began.id, time=before.began.time)
        if as_before == before.began:
            return before
    append_evaluation(folder.path, began)
    return Evaluation(began)


def _with_digest(wanted: Wanted, include: Path | None) -> Wanted:
    """Returns what is wanted, with a digest of the user's own tasks: others are another job."""
    if include is None:
        return wanted
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(include.rglob("*.yaml")):
        digest.update(file.read_bytes())
    return structs.replace(wanted, task_files=digest.hexdigest())


def _changed(folder: RunFolder, fingerprint: str) -> str:
    """Returns a sentence where the rows are no longer those that the run was trained on."""
    with contextlib.suppress(CheckpointError):
        newest = newest_checkpoint(folder.checkpoints_path)
        trained_on = None if newest is None else newest.state.get("data")
        if trained_on is not None and trained_on != fingerprint:
            return (
                "The data have changed since the training, so some of these rows may have been "
                "trained."
            )
    return ""


# ---------------------------------------------------------------------- the parts


def _evaluate(work: _Work, side: Side) -> None:
    """Does the parts of one side that are missing."""
    chosen = work.chosen if side == "trained" else _base(work.folder, work.chosen.measured.dtype)
    name = "Base model" if side == "base" else "Trained"

    def progress(done: float, total: float, message: str = "") -> None:
        lower = f"{message[:1].lower()}{message[1:]}"
        work.progress(done, total, f"{name}: {lower}" if message else "")

    with contextlib.ExitStack() as owned:

        @functools.cache
        def loaded() -> ChatEngine:
            chat_engine = _loaded(work, side, chosen.source, progress)
            owned.callback(chat_engine.close)
            return chat_engine

        for part in work.evaluation.missing(side):
            if part in OF_ROWS:
                if part != LOSS:
                    _note_slow(work, loaded())
                _measure_rows(work, side, part, loaded(), progress)
            else:
                _ask_task(work, side, part, chosen.measured, loaded, progress)


def _loaded(work: _Work, side: Side, source: Source, progress: Progress) -> ChatEngine:
    if work.lent is not None and side == "trained":
        return borrow(work.lent, source.config, source.label)
    how_they_fit([source])
    return load(source, labeled(progress, "Loading the weights"), many_rows=True)


def _measure_rows(
    work: _Work, side: Side, part: str, chat_engine: ChatEngine, progress: Progress
) -> None:
    assert work.data is not None  # a part is about its rows
    began = work.evaluation.began
    rows = ValidationRows(began.id, side, work.data, progress)
    found: Line | None
    if part == LOSS:
        found = rows.loss(chat_engine)
    elif part == MATCHED:
        found = rows.matched(chat_engine, began.wanted.prompts)
    else:
        found = rows.answered(chat_engine, began.wanted.answers)
    if found is not None:
        _keep(work, found)


def _ask_task(
    work: _Work,
    side: Side,
    task: str,
    measured: MeasuredWeights,
    loaded: Callable[[], ChatEngine],
    progress: Progress,
) -> None:
    assert work.index is not None  # tasks are asked for
    asked = replace(work.tasks, names=(task,))

    def of_task(done: float, total: float, message: str = "") -> None:
        progress(done, total, f"{task}, {message[:1].lower()}{message[1:]}")

    found = ask(work.index, asked, loaded, of_task, partial(_note_slow, work))
    id = work.evaluation.began.id
    append_benchmarks(work.folder.path, results_of(found, asked, measured, time.time(), id))
    _keep(work, TaskDone(id, side, task))


def _note_slow(work: _Work, chat_engine: ChatEngine) -> None:
    """Keeps a sentence where these weights answer slowly, before they do. Both sides are of one
    model, so one sentence is enough.
    """
    note = "" if work.evaluation.noted else chat_engine.slow_note()
    if note:
        _keep(work, Noted(work.evaluation.began.id, note))


def _add_to_card(folder: RunFolder, measured: MeasuredWeights) -> None:
    """Writes the results of the run's export into its model card, if it has one. What a person
    wrote there stays. A card that cannot be written is left unchanged.
    """
    card = folder.export_path / CARD
    of_export = MeasuredWeights("export", measured.step, measured.dtype)
    results = [
        one
        for one in latest(read_benchmarks(folder.path).results)
        if one.weights == "base" or MeasuredWeights(one.weights, one.step, one.dtype) == of_export
    ]
    figures = figures_of(read_evaluations(folder.path), measured.step)
    with contextlib.suppress(OSError, ValueError):
        text = safe_files.read_text(card, folder.root)
        safe_files.write_whole(card, with_results(text, results, figures), folder.root)


def _keep(work: _Work, line: Line) -> None:
    """Keeps what is done, on the disk and in the evaluation."""
    append_evaluation(work.folder.path, line)
    work.evaluation.take(line)
