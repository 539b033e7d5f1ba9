"""What the app asks of the engine. What loads torch is imported at its first call: that takes
seconds, and the page must not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.config.changes import Change
from engine.config.settings import ModelConfig, TrainConfig
from engine.data.mapping import preview
from engine.fit.report import estimate
from engine.talk.conversation import Message, Sampling, Source
from engine.train.run import resume_run, start_run


class Run(Protocol):
    """What the session needs of `engine.train.run.Run`."""

    id: str

    def execute(self) -> Any: ...

    def request(self, command: str | Change) -> None: ...

    def close(self) -> None: ...


def _export_run(runs_dir: Path, run_id: str, target: Path, **options: Any) -> Any:
    from engine.checkpoints.export import export_run

    return export_run(runs_dir, run_id, target, **options)


def _load_tokenizer(source: str) -> Any:
    from engine.model.pretrained_files import load_tokenizer

    return load_tokenizer(source)


def _warm_up(model: ModelConfig) -> None:
    from engine.model.build import build_model
    from engine.model.pretrained_files import load_config
    from engine.train import prepare  # noqa: F401  (loaded for the first Start)

    build_model(load_config(model.source), model)


@dataclass(frozen=True)
class EngineCalls:
    """The engine's functions that the session calls; tests give their own."""

    start_run: Callable[..., Run] = start_run
    resume_run: Callable[..., Run] = resume_run
    export_run: Callable[..., Any] = _export_run
    estimate: Callable[..., Any] = estimate
    preview: Callable[..., dict[str, Any]] = preview
    load_tokenizer: Callable[[str], Any] = _load_tokenizer
    warm_up: Callable[[ModelConfig], None] = _warm_up
    """Imports and tries once, on a model, what the first Start and Talk need, so that they do not
    wait for it.
    """


# ------------------------------------------------------------------ conversations


class Talker(Protocol):
    """What Talk needs of `engine.talk.talkers.Talker`."""

    label: str
    voice: Any
    held_bytes: int

    def answer(self, messages: list[Message], sampling: Sampling) -> Generator[int, None, None]: ...

    def close(self) -> None: ...


def _voice_of(config: TrainConfig) -> Any:
    from engine.talk.voice import Voice

    return Voice.of(config)


def _folder_of(folder: str, label: str = "") -> Source:
    from engine.talk.talk_sources import folder_of

    return folder_of(folder, label)


def _fit_together(sources: list[Source]) -> bool:
    from engine.talk.talk_sources import TOGETHER, how_they_fit

    return how_they_fit(sources) == TOGETHER


def _load(source: Source, progress: Callable[..., None]) -> Talker:
    from engine.talk.talkers import load

    return load(source, progress)


def _borrow(paused: Any, config: TrainConfig, label: str) -> Talker:
    from engine.talk.talkers import borrow

    return borrow(paused, config, label)


@dataclass(frozen=True)
class TalkCalls:
    """The engine's functions that Talk calls; tests give their own."""

    voice_of: Callable[[TrainConfig], Any] = _voice_of
    """How weights are spoken to, without loading them."""
    folder_of: Callable[..., Source] = _folder_of
    fit_together: Callable[[list[Source]], bool] = _fit_together
    """Whether the weights of all can be in memory at once; raises FitError where one of them cannot
    be alone.
    """
    load: Callable[[Source, Callable[..., None]], Talker] = _load
    borrow: Callable[[Any, TrainConfig, str], Talker] = _borrow
    """The weights of a run that is paused in this process."""
