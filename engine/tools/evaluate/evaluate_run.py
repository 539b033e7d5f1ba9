"""Benchmarks of a run's weights. The results are kept in the run's folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine import safe_files
from engine.config.export_choice import ExportFrom
from engine.errors import RunError
from engine.progress import Progress, labeled, no_progress
from engine.runs.record.following import Follower, catch_up
from engine.runs.record.run_folder import RunFolder, open_run
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.benchmark_results import (
    BenchmarkResult,
    append_benchmarks,
    latest,
    read_benchmarks,
)
from engine.tools.chat.chat_engines import ChatEngine, load
from engine.tools.chat.chat_sources import folder_of, how_they_fit
from engine.tools.chat.conversation import Source, best_of, checkpoint_of
from engine.tools.evaluate.harness import (
    AskedTasks,
    MeasuredWeights,
    ask,
    open_tasks,
    refuse_programs,
    refuse_without_harness,
    results_of,
)
from engine.training.checkpoints.saved_on_disk import saved_steps
from engine.training.export.model_card import CARD, with_benchmarks


@dataclass(frozen=True)
class _Chosen:
    """The weights that are measured: where they are, and their description."""

    source: Source
    measured: MeasuredWeights


def evaluate_run(
    runs_dir: str | os.PathLike[str],
    run_id: str,
    asked: AskedTasks,
    of: ExportFrom | None = None,
    progress: Progress = no_progress,
    allows: Callable[[str], bool] = lambda _: False,
) -> list[BenchmarkResult]:
    """Runs tasks on the best or the last weights of a run, according to `of`, and returns the
    results, which are also kept in the run's folder. Without `of`, it uses the run's export or,
    where there is none, the weights that an export would take. `allows` gets a sentence on the
    programs that tasks of a user's folder would run, and returns whether they may.

    Raises RunError without lm-evaluation-harness, for a run that is under way and for one without
    weights, DataError for tasks that cannot be run, and FitError where memory is short.
    """
    refuse_without_harness()
    folder = open_run(runs_dir, run_id)
    if folder.is_running():
        raise RunError(f"Run {run_id} goes on; evaluate it when it is over.")
    chosen = _chosen(folder, of)
    asked = refuse_programs(asked, allows)
    tasks = open_tasks(asked)
    with contextlib.ExitStack() as owned:

        def loaded() -> ChatEngine:
            how_they_fit([chosen.source])
            chat_engine = load(chosen.source, labeled(progress, "Loading the weights"))
            owned.callback(chat_engine.close)
            return chat_engine

        found = ask(tasks, asked, loaded, progress)
    results = results_of(found, asked, chosen.measured, time.time())
    append_benchmarks(folder.path, results)
    if chosen.measured.weights == "export":
        _add_to_card(folder, chosen.measured)
    return results


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


def _add_to_card(folder: RunFolder, measured: MeasuredWeights) -> None:
    """Writes the results of the run's export into its model card, if it has one. What a person
    wrote there stays. A card that cannot be written is left unchanged.
    """
    card = folder.export_path / CARD
    of_export = MeasuredWeights("export", measured.step, measured.dtype)
    results = [
        one
        for one in latest(read_benchmarks(folder.path).results)
        if MeasuredWeights(one.weights, one.step, one.dtype) == of_export
    ]
    with contextlib.suppress(OSError, ValueError):
        text = safe_files.read_text(card, folder.root)
        safe_files.write_whole(card, with_benchmarks(text, results), folder.root)
