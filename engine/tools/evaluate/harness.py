"""lm-evaluation-harness, which reads the tasks, asks their questions, and counts the answers.

The package `lm_eval` is imported inside functions: it is optional, and loads for seconds.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.data.sources.hub_connection import from_hub_or_cache
from engine.errors import DataError, RamstreamError, RunError, first_line
from engine.progress import Progress
from engine.runs.summaries.benchmark_results import BenchmarkResult, WhichWeights
from engine.tools.chat.chat_engines import ChatEngine
from engine.tools.evaluate.known_tasks import INSTALL
from engine.tools.evaluate.task_code import (
    metrics_of_the_harness,
    programs_of,
    programs_text,
    sandbox_templates,
)

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

PACKAGE = "lm_eval"
_NEAR = 3
"""Number of names like an unknown one that an error lists."""
_MOST_VALUES = 20_000
"""Number of samples of a task whose single results are kept, at most."""
_DIGITS = 6


@dataclass(frozen=True)
class AskedTasks:
    """The tasks to run, and how."""

    names: tuple[str, ...]
    include: Path | None = None
    """Folder with a user's own tasks."""
    limit: int | None = None
    """Number of samples of each task at most; None for all."""
    shots: int | None = None
    """Number of solved examples before each question; None leaves that to the task."""
    chat: bool = False
    """The questions are written with the model's chat template."""
    most_tokens: int | None = None
    """Tokens of a row at most; None leaves that to the model."""
    allows_code: bool = False
    """The tasks may run programs of their own."""


@dataclass(frozen=True)
class MeasuredWeights:
    """The weights of a run that are measured."""

    weights: WhichWeights
    step: int | None
    dtype: str


def has_harness() -> bool:
    """Returns whether lm-evaluation-harness is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def refuse_without_harness() -> None:
    """Raises RunError if lm-evaluation-harness is not installed."""
    if not has_harness():
        raise RunError(
            f"lm-evaluation-harness, which asks the tasks, is not installed: {INSTALL} installs it."
        )


def refuse_programs(asked: AskedTasks, allows: Callable[[str], bool]) -> AskedTasks:
    """Returns the tasks, with the permission to run programs where they need it. `allows` gets a
    sentence with these programs, and returns whether they may run.

    Raises DataError where they may not.
    """
    if asked.include is None or asked.allows_code or not asked.include.is_dir():
        return asked
    programs = programs_of(asked.include, asked.names, metrics_of_the_harness())
    if not programs:
        return asked
    runs = f"The tasks in {asked.include} run programs of their own: {programs_text(programs)}"
    if not allows(f"{runs}. They may do whatever you may do on this machine."):
        raise DataError(
            f"--include: {runs[0].lower()}{runs[1:]}; read them, then add "
            "--confirm-run-unsafe-code to run them."
        )
    return replace(asked, allows_code=True)


def open_tasks(asked: AskedTasks) -> TaskManager:
    """Returns the harness's list of tasks, to which those of a user's folder are added.

    Raises DataError for a folder that is none and for names that it does not know.
    """
    if asked.include is not None and not asked.include.is_dir():
        raise DataError(f"--include: {asked.include} is not a folder of task files.")
    try:
        tasks = _tasks_of(asked)
    except Exception as error:  # the files are a person's own
        raise DataError(
            f"The task files in {asked.include or 'lm-evaluation-harness'} cannot be read "
            f"({first_line(error)})."
        ) from error
    for name in asked.names:
        if name not in tasks.all_tasks:
            near = difflib.get_close_matches(name, tasks.all_tasks, _NEAR)
            like = f"like it are {', '.join(near)}" if near else "--include adds tasks of your own"
            raise DataError(f"There is no task {name}; {like}.")
    return tasks


def _tasks_of(asked: AskedTasks) -> TaskManager:
    """Returns the list of a user's tasks if all that are asked for are there, or else of all tasks.
    The harness has 14,000 files of its own, whose reading takes five seconds.
    """
    from lm_eval.tasks import TaskManager

    if asked.include is None:
        return TaskManager()
    own = TaskManager(include_path=str(asked.include), include_defaults=False)
    if set(asked.names) <= set(own.all_subtasks):  # a group may have tasks of the harness
        return own
    return TaskManager(include_path=str(asked.include))


def ask(
    tasks: TaskManager,
    asked: AskedTasks,
    load: Callable[[], ChatEngine],
    progress: Progress,
    before_answers: Callable[[ChatEngine], None],
) -> dict[str, Any]:
    """Runs all tasks, and returns what the harness found, as `results_of` reads it. `load` loads
    the weights once the tasks are read; `before_answers` is called with them before they write any.

    Raises DataError for tasks that cannot be read, and the errors of `load` and of the engine.
    """
    from lm_eval.evaluator import simple_evaluate

    from engine.tools.evaluate.streamed_lm import StreamedLM

    lm = StreamedLM(load, progress, asked.most_tokens, before_answers)
    named = ", ".join(asked.names)
    sandbox_templates()

    def evaluate() -> dict[str, Any] | None:
        return simple_evaluate(
            model=lm,
            tasks=list(asked.names),
            num_fewshot=asked.shots,
            limit=asked.limit,
            apply_chat_template=asked.chat,
            fewshot_as_multiturn=asked.chat,
            task_manager=tasks,
            log_samples=True,
            confirm_run_unsafe_code=asked.allows_code,
        )

    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # it warns of what was asked for
    try:
        with _same_random_states():
            found = from_hub_or_cache(f"of {named}", evaluate)
    except RamstreamError:
        raise
    except Exception as error:
        if lm.is_asked:
            raise
        # Tasks are programs and data of others, and may fail in any way.
        raise DataError(f"{named} cannot be asked ({first_line(error)}).") from error
    if found is None:
        raise DataError(f"{named} gave no results; name other tasks.")
    return found


@contextlib.contextmanager
def _same_random_states() -> Iterator[None]:
    """Returns a context after which random numbers go on as before it: the harness sets the seeds
    of the whole process, in which a run may be paused.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    plain, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(of_numpy)


def results_of(
    found: Mapping[str, Any], asked: AskedTasks, of: MeasuredWeights, time: float, evaluation: str
) -> list[BenchmarkResult]:
    """Returns a result for each metric of each task and group in what the harness found at `time`,
    in Unix seconds, for the `evaluation` with this id.
    """
    harness = importlib.metadata.version(PACKAGE)
    results = []
    for task, metrics in {**found["results"], **found.get("groups", {})}.items():
        samples = found.get("n-samples", {}).get(task, {}).get("effective")
        for name, value in metrics.items():
            metric, comma, filtered = name.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            higher = found.get("higher_is_better", {}).get(task, {}).get(metric)
            results.append(
                BenchmarkResult(
                    task=task,
                    metric=metric if filtered == "none" else f"{metric} ({filtered})",
                    value=_number(value),
                    error=_number(metrics.get(f"{metric}_stderr,{filtered}")),
                    higher_is_better=higher if isinstance(higher, bool) else None,
                    shots=_count(found.get("n-shot", {}).get(task)),
                    limit=asked.limit,
                    samples=_count(metrics.get("sample_len") if samples is None else samples),
                    weights=of.weights,
                    step=of.step,
                    dtype=of.dtype,
                    chat=asked.chat,
                    time=time,
                    harness=harness,
                    task_version=str(found.get("versions", {}).get(task, "")),
                    values=_values(found.get("samples", {}).get(task, ()), name, _number(value)),
                    evaluation=evaluation,
                )
            )
    return results


def _values(
    samples: Sequence[Mapping[str, Any]], name: str, mean: float | None
) -> tuple[float, ...]:
    """Returns the metric `name` of each sample, if it is a number whose `mean` is the result."""
    metric, _, filtered = name.partition(",")
    found = [_number(one.get(metric)) for one in samples if one.get("filter") == filtered]
    values = tuple(value for value in found if value is not None)
    if mean is None or not values or len(values) < len(found) or len(values) > _MOST_VALUES:
        return ()
    is_mean = math.isclose(math.fsum(values) / len(values), mean, rel_tol=1e-6, abs_tol=1e-9)
    return tuple(round(value, _DIGITS) for value in values) if is_mean else ()


def _number(value: Any) -> float | None:
    """Returns a number that is finite, or None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int else None
