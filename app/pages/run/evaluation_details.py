"""What the view Evaluate shows of a run: what can be evaluated and how long it takes, the figures
of the base model and of the trained one, and their answers side by side.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

from app.labels import in_digits, in_loss, in_share, in_time
from app.pages.run.did_it_help import did_it_help
from app.shared.run_names import name_of_start
from engine import safe_files
from engine.config.export_choice import ExportFrom
from engine.config.settings import TrainConfig
from engine.errors import RamstreamError
from engine.paths import program_command
from engine.runs.record.evaluations import FEWEST_ROWS
from engine.runs.record.run_folder import RunFolder
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.benchmark_results import read_benchmarks
from engine.runs.summaries.blind_votes import Pair, Tally, pairs_of, sides_of, tally
from engine.runs.summaries.evaluation_figures import (
    Figure,
    benchmark_figures,
    evaluation_figures,
)
from engine.runs.summaries.evaluation_results import (
    Evaluation,
    Evaluations,
    Wanted,
    read_evaluations,
)
from engine.tools.evaluate.known_tasks import INSTALL, KNOWN_TASKS
from engine.training.checkpoints.saved_on_disk import saved_steps

MOST_ROWS = 200
"""Largest number of rows in the table: those that were measured last."""
FORWARD = 3.0
"""A model reads a token this much faster than it trains on one: a training step also goes back."""
SHORT_SECONDS = 5
"""Seconds below which a time is told roughly, since loading the models takes about as long."""
MOST_DIGITS, LOSS_DIGITS = 6, 3
FIRST_ANSWERS, FIRST_LIMIT = 10, 200
"""Number of prompts to answer side by side, and of samples of a task, at first."""
_WHOSE = {
    "export": "Exported model",
    "best": "Best model",
    "last": "Newest weights",
    "base": "Base model",
}


def evaluation_details(
    folder: RunFolder,
    snapshot: RunSnapshot,
    is_paused_here: bool,
    is_under_way: bool,
    limit: int | None,
) -> dict[str, Any]:
    """Returns the `form`, whether training `helped`, the `figures` with their `caption` and `note`,
    and the `answers`; each is None or empty where there is none. `unfinished` says how much of an
    evaluation that was broken off is done, unless it `is_under_way`; `problem` says what cannot be
    read. The times of tasks are those of `limit` samples or, without it, of as many as were asked
    before.
    """
    found = read_evaluations(folder.path)
    benchmarks = read_benchmarks(folder.path)
    latest = found.latest
    of_rows = _newest(found, lambda one: bool(evaluation_figures(one)))
    answered = _newest(found, lambda one: bool(one.answered))
    figures = [] if of_rows is None else evaluation_figures(of_rows)
    figures += benchmark_figures(benchmarks.results)
    problems = [found.problem, benchmarks.problem]
    if len(figures) > MOST_ROWS:
        problems.append(f"The latest {MOST_ROWS} of {len(figures):,} results are shown.")
    is_broken_off = latest is not None and not latest.is_over and not is_under_way
    form = _form(folder, snapshot, latest, answered, is_paused_here)
    asked = form["chosen"]["limit"] if limit is None else limit
    pace = FORWARD * _speed(snapshot)
    told = of_rows or latest  # tasks may have been asked alone
    note = "" if told is None else told.note
    helped = did_it_help(figures, _value, _began_with(folder), _loss_before(snapshot))
    return {
        "form": form | {"goes_on": is_broken_off, "tasks": _tasks(answered, pace, asked or None)},
        "helped": None if helped is None else vars(helped),
        "figures": [figure_row(figure) for figure in figures[:MOST_ROWS]],
        "caption": "" if of_rows is None else _caption(of_rows),
        "note": note,
        "unfinished": _unfinished(latest) if latest is not None and is_broken_off else "",
        "answers": None if answered is None else _answers(answered),
        "problem": " ".join(filter(None, problems)),
        "command": {"label": "Without a browser", "text": _command(folder)},
    }


def _began_with(folder: RunFolder) -> str:
    """Returns the name of the run whose weights this one began with; empty if it began with its
    base model.
    """
    config = _config(folder)
    return "" if config is None else name_of_start(config.model.start_from or "")


def _loss_before(snapshot: RunSnapshot) -> float | None:
    """Returns the validation loss of the weights that the run began with, if it is known."""
    evals = snapshot.evals
    return evals.loss[0] if len(evals) and evals.step[0] == 0 else None


def _newest(found: Evaluations, has: Callable[[Evaluation], bool]) -> Evaluation | None:
    """Returns the newest evaluation that has something."""
    return next(filter(has, reversed(found.found)), None)


def _command(folder: RunFolder) -> str:
    runs = str(folder.path.resolve().parent)
    return f"{program_command()} {shlex.join(['eval', folder.id, '--runs-dir', runs])}"


# ---------------------------------------------------------------------- the form


def _form(
    folder: RunFolder,
    snapshot: RunSnapshot,
    latest: Evaluation | None,
    answered: Evaluation | None,
    is_paused_here: bool,
) -> dict[str, Any]:
    rows = _count(snapshot.data.get("eval_examples"))
    weights = [] if is_paused_here else _weights(folder, snapshot.exported_step)
    speed = FORWARD * _speed(snapshot)
    wanted = Wanted(tasks=(), answers=FIRST_ANSWERS, limit=FIRST_LIMIT)
    if latest is not None:
        wanted = latest.began.wanted
    limit = FIRST_LIMIT if wanted.limit is None and not wanted.tasks else wanted.limit
    return {
        "can_evaluate": is_paused_here or bool(weights),
        "weights": weights,
        "rows": rows,
        "about_rows": _about_rows(rows, snapshot, speed),
        "about_answers": _about_answers(answered),
        "has_harness": _has_harness(),
        "install": INSTALL,
        "chosen": {
            "validation": bool(rows) and (latest is None or wanted.validation),
            "answers": bool(rows) and (latest is None or bool(wanted.answers)),
            "count": wanted.answers or FIRST_ANSWERS,
            "blind": wanted.is_blind,
            "tasks": [task.name for task in KNOWN_TASKS if task.name in wanted.tasks],
            "own": wanted.own,
            "limit": limit,
            "chat": wanted.chat,
        },
    }


def _has_harness() -> bool:
    from importlib.util import find_spec

    return find_spec("lm_eval") is not None


def _weights(folder: RunFolder, exported: int | None) -> list[dict[str, str]]:
    """Returns the trained weights that can be evaluated: first those of the export, which are of
    the step `exported`, or what one would take.
    """
    weights = []
    if safe_files.is_file(folder.export_path / "config.json", folder.root):
        step = "" if exported is None else f", step {exported:,}"
        weights.append({"value": "", "label": _WHOSE["export"] + step})
    saved = saved_steps(folder.checkpoints_path, folder.best_path)
    order = ("best", "last") if _export_from(folder) == "best" else ("last", "best")
    steps: dict[int, str] = {}
    for value in order:
        kept = saved.best if value == "best" else saved.newest
        if kept is not None:
            steps.setdefault(kept, value)
    for kept, value in steps.items():
        weights.append({"value": value, "label": f"{_WHOSE[value]}, step {kept:,}"})
    return weights


def _export_from(folder: RunFolder) -> ExportFrom:
    config = _config(folder)
    return "last" if config is None else config.output.export_from


def _config(folder: RunFolder) -> TrainConfig | None:
    """Returns the settings, or None if they do not load."""
    try:
        return folder.config
    except RamstreamError:
        return None


def _speed(snapshot: RunSnapshot) -> float:
    """Returns how many tokens a second the run trained, or NaN where that is not known."""
    speeds = sorted(snapshot.steps.tokens_per_second)
    return speeds[len(speeds) // 2] if speeds else math.nan


def _about_rows(rows: int, snapshot: RunSnapshot, speed: float) -> str:
    if not rows:
        return "This run has no validation rows."
    seconds = 2 * _count(snapshot.data.get("eval_tokens")) / speed if speed else math.nan
    return " · ".join(filter(None, (f"{rows:,} rows", _about_time(seconds))))


def _about_answers(answered: Evaluation | None) -> str:
    """Returns how long answers took last time, since that is not known before."""
    if answered is None:
        return ""
    return f"{_about_time(sum(one.seconds for one in answered.answered.values()))} last time"


def _about_time(seconds: float) -> str:
    if not math.isfinite(seconds):
        return ""
    return f"about {in_time(seconds)}" if seconds > SHORT_SECONDS else "a few seconds"


def _tasks(answered: Evaluation | None, speed: float, limit: int | None) -> list[dict[str, str]]:
    """Returns the tasks that are offered, with how long both models take for `limit` samples."""
    written = [] if answered is None else list(answered.answered.values())
    tokens = sum(one.tokens for one in written)
    pace = sum(one.seconds for one in written) / tokens if tokens else math.nan
    tasks = []
    for task in KNOWN_TASKS:
        read, write = task.work(limit)
        seconds = 2 * (read / speed if speed else math.nan)
        if write:
            seconds += 2 * write * pace
        tasks.append({"name": task.name, "about": task.about, "time": _about_time(seconds)})
    return tasks


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


# ---------------------------------------------------------------------- the figures


def figure_row(figure: Figure) -> dict[str, str]:
    """Returns a row of the table of figures."""
    count = "" if figure.count is None else f"{figure.count:,} {figure.of}"
    interval = figure.interval
    between = ""
    if interval is not None:
        between = f"{_signed(figure, interval.low)} to {_signed(figure, interval.high)}"
    return {
        "name": figure.name,
        "about": ", ".join(filter(None, (count, figure.how))),
        "base": _value(figure, figure.base),
        "trained": _value(figure, figure.trained),
        "difference": _change(figure),
        "interval": between,
        "word": _word(figure),
        "tone": {True: "good", False: "bad", None: "calm"}[figure.is_better],
    }


def _word(figure: Figure) -> str:
    if figure.difference is None or figure.higher_is_better is None:
        return ""
    if figure.interval is None:
        is_few = figure.count is not None and figure.count < FEWEST_ROWS
        return f"too few {figure.of} to tell" if is_few else ""
    return {True: "better", False: "worse", None: "may be chance"}[figure.is_better]


def _value(figure: Figure, value: float | None) -> str:
    if figure.unit == "loss":
        return in_loss(value)
    if value is None or figure.unit != "share":
        return in_digits(value)
    return in_share(value)


def _change(figure: Figure) -> str:
    """Returns the difference; that of two shares is in percentage points."""
    if figure.difference is None:
        return "–"
    text = _signed(figure, figure.difference)
    return f"{text} points" if figure.unit == "share" else text


def _signed(figure: Figure, value: float) -> str:
    """Returns a difference with its sign, and as many digits as its interval leaves certain."""
    scale = 100 if figure.unit == "share" else 1
    if figure.interval is None and figure.unit != "number":
        digits = 0 if figure.unit == "share" else LOSS_DIGITS
        return _with_sign(value, f"{scale * abs(value):,.{digits}f}")
    width = abs(figure.difference or value)
    if figure.interval is not None:
        width = (figure.interval.high - figure.interval.low) / 2
    digits = 2 if not 0 < width < math.inf else max(0, 1 - math.floor(math.log10(scale * width)))
    return _with_sign(value, f"{scale * abs(value):,.{min(digits, MOST_DIGITS)}f}")


def _with_sign(value: float, text: str) -> str:
    sign = "+" if value > 0 else "−"
    return text if not float(text.replace(",", "")) else sign + text


def _caption(latest: Evaluation) -> str:
    """Returns which weights the figures of the rows are of."""
    began = latest.began
    step = "" if began.step is None else f", step {began.step:,}"
    return f"{_WHOSE[began.weights]}{step}, in {began.dtype}{_day(began.time)}"


def _day(seconds: float) -> str:
    """Returns a date as the end of a list, or nothing for a time that no calendar has."""
    try:
        return time.strftime(", %Y-%m-%d", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return ""


def _unfinished(latest: Evaluation) -> str:
    done, total = latest.parts_done()
    return f"{done} of {total} parts are done. Continue does the rest."


# ---------------------------------------------------------------------- answers


def _answers(latest: Evaluation) -> dict[str, Any] | None:
    pairs = list(pairs_of(latest))
    if not pairs:
        return None
    count = tally(latest)
    rows: Sequence[dict[str, Any]]
    if latest.is_hidden:
        rows = [_hidden_row(latest, pair) for pair in pairs]
    else:
        rows = [_open_row(latest, pair) for pair in pairs]
    return {
        "id": latest.began.id,
        "is_hidden": latest.is_hidden,
        "rows": rows,
        "left": count.left,
        "sentence": "" if latest.is_hidden or not latest.began.wanted.is_blind else _counted(count),
    }


def _hidden_row(latest: Evaluation, pair: Pair) -> dict[str, Any]:
    """Returns a row of which nobody is told the sides."""
    answers = {"base": pair.base.answer, "trained": pair.trained.answer}
    left, right = sides_of(latest, pair.number)
    return {
        "number": pair.number,
        "prompt": pair.base.prompt,
        "expected": pair.base.expected,
        "left": answers[left],
        "right": answers[right],
        "is_open": not pair.is_same and pair.number not in latest.votes,
    }


def _open_row(latest: Evaluation, pair: Pair) -> dict[str, Any]:
    return {
        "prompt": pair.base.prompt,
        "expected": pair.base.expected,
        "base": pair.base.answer,
        "trained": pair.trained.answer,
        "is_base_right": pair.base.answer == pair.base.expected,
        "is_trained_right": pair.trained.answer == pair.trained.expected,
        "preferred": latest.votes.get(pair.number, ""),
    }


def _counted(count: Tally) -> str:
    """Returns what the votes say."""
    sentence = (
        f"You preferred the trained model {_times(count.trained)}, the base model "
        f"{_times(count.base)}, and neither {_times(count.same)}."
    )
    return f"{sentence} {count.left:,} were not voted on." if count.left else sentence


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")
