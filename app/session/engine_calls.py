"""Functions of the engine that the app calls, through two value classes, which tests can replace.

Modules that load torch are imported at the first call: the import takes seconds, and the page must
not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.config.changes import Change
from engine.config.data_settings import DataConfig
from engine.config.settings import ModelConfig, TrainConfig
from engine.data.batches.preview import check_first_rows, preview
from engine.data.tokens.column_survey import count_rows
from engine.machine.read_machine import Machine
from engine.model.build.find_shape import adapted_shape
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.report import FitReport, estimate
from engine.runs.summaries.evaluation_results import Evaluation, Wanted
from engine.tools.chat.conversation import Message, Sampling, Source
from engine.tools.serve.answer_request import AnswerRequest
from engine.training.export.push import push
from engine.training.loop.run import resume_run, start_run
from engine.training.weights.usable_start import downloads_weights, refuse_out_of_reach


def _estimate(config: TrainConfig, machine: Machine) -> FitReport:
    return estimate(config, machine, shape_of_run(config), adapted=adapted_shape)


class Run(Protocol):
    """Members of `engine.training.loop.run.Run` that the session uses."""

    id: str

    def execute(self) -> Any: ...

    def request(self, command: str | Change) -> None: ...

    def stop(self, is_urgent: bool) -> None: ...

    def follow(self, report: Callable[[str], None]) -> None: ...

    def close(self) -> None: ...


def _export_run(runs_dir: Path, run_id: str, target: Path, **options: Any) -> Any:
    from engine.training.export.export import export_run

    return export_run(runs_dir, run_id, target, **options)


def _evaluate_run(runs_dir: Path, run_id: str, wanted: Wanted, **options: Any) -> Evaluation:
    from engine.tools.evaluate.evaluate_run import AskedEvaluation, evaluate_run

    asked = AskedEvaluation(wanted, options.pop("of"))
    return evaluate_run(runs_dir, run_id, asked, **options)


def _load_tokenizer(source: str) -> Any:
    from engine.model.build.pretrained_files import load_tokenizer

    return load_tokenizer(source)


def _warm_up(model: ModelConfig) -> None:
    from engine.model.build.build import build_model
    from engine.model.build.pretrained_files import load_config
    from engine.training.loop import prepare  # noqa: F401  it is loaded for the first Start

    build_model(load_config(model.source), model)


@dataclass(frozen=True)
class EngineCalls:
    """Functions of the engine that the session calls; tests pass their own."""

    start_run: Callable[..., Run] = start_run
    resume_run: Callable[..., Run] = resume_run
    export_run: Callable[..., Any] = _export_run
    push: Callable[..., str] = push
    evaluate_run: Callable[..., Evaluation] = _evaluate_run
    estimate: Callable[[TrainConfig, Machine], FitReport] = _estimate
    preview: Callable[..., dict[str, Any]] = preview
    check_data: Callable[[DataConfig], None] = check_first_rows
    """Raises DataError if the first rows of data on this machine cannot be read."""
    refuse_out_of_reach: Callable[..., None] = refuse_out_of_reach
    """Raises ModelError for a model that is neither here nor to be had now."""
    downloads_weights: Callable[[TrainConfig], bool] = downloads_weights
    """Returns whether a run would first download weights."""
    count_rows: Callable[[DataConfig], float | None] = count_rows
    load_tokenizer: Callable[[str], Any] = _load_tokenizer
    warm_up: Callable[[ModelConfig], None] = _warm_up
    """Imports the modules that the first Start and Chat need and runs a model once, so that Start
    and Chat need not wait for that.
    """


# ------------------------------------------------------------------ conversations


class ChatEngine(Protocol):
    """Members of `engine.tools.chat.chat_engines.ChatEngine` that Chat uses."""

    @property
    def label(self) -> str: ...

    @property
    def prompt_builder(self) -> Any: ...

    @property
    def held_bytes(self) -> int: ...

    def slow_note(self) -> str: ...

    def answer(self, messages: list[Message], sampling: Sampling) -> Generator[int, None, None]: ...

    def close(self) -> None: ...


def _prompt_builder_of(config: TrainConfig) -> Any:
    from engine.tools.chat.prompt_builder import PromptBuilder

    return PromptBuilder.of(config)


def _folder_of(folder: str, label: str = "") -> Source:
    from engine.tools.chat.chat_sources import folder_of

    return folder_of(folder, label)


def _fit_together(sources: list[Source]) -> bool:
    from engine.tools.chat.chat_sources import TOGETHER, how_they_fit

    return how_they_fit(sources) == TOGETHER


def _load(source: Source, progress: Callable[..., None]) -> ChatEngine:
    from engine.tools.chat.chat_engines import load

    return load(source, progress)


class ServedModel(Protocol):
    """Members of `engine.tools.serve.served_model.ServedModel` that the app uses."""

    label: str
    held_bytes: int

    @property
    def prompt_builder(self) -> Any: ...

    @property
    def asked(self) -> int: ...

    def slow_note(self) -> str: ...

    def prompts(self, request: AnswerRequest) -> list[list[int]]: ...

    def reply(self, request: AnswerRequest, prompts: list[list[int]]) -> Any: ...

    def ask(
        self,
        request: AnswerRequest,
        prompts: list[list[int]],
        take: Callable[[int, Any], None],
        post: Callable[[Callable[[], None]], Any],
    ) -> list[Any]: ...

    def cancel(self, asked: Any) -> None: ...

    def answer(self, messages: list[Message], sampling: Sampling) -> Generator[int, None, None]: ...

    def close(self) -> None: ...


def _serve(chat_engine: Any) -> ServedModel:
    from engine.tools.serve.served_model import ServedModel

    return ServedModel(chat_engine)


def _borrow(paused: Any, config: TrainConfig, label: str) -> ChatEngine:
    from engine.tools.chat.chat_engines import borrow

    return borrow(paused, config, label)


@dataclass(frozen=True)
class ChatCalls:
    """Functions of the engine that Chat and serving call; tests pass their own."""

    prompt_builder_of: Callable[[TrainConfig], Any] = _prompt_builder_of
    """Returns the prompt format of weights without loading them."""
    folder_of: Callable[..., Source] = _folder_of
    fit_together: Callable[[list[Source]], bool] = _fit_together
    """Returns whether the weights of all sources fit in memory at once. Raises FitError if those of
    one source do not fit even alone.
    """
    load: Callable[[Source, Callable[..., None]], ChatEngine] = _load
    borrow: Callable[[Any, TrainConfig, str], ChatEngine] = _borrow
    """Lends the weights of a run that is paused in this process; the run's own thread computes each
    token.
    """
    serve: Callable[[ChatEngine], ServedModel] = _serve
    """Returns weights in memory with a thread that answers many at once from them."""
