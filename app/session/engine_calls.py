"""What the app asks of the engine. What loads torch is imported at its first call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from app.session.detached import start_detached
from engine.config.changes import Change
from engine.config.settings import ModelConfig


class Run(Protocol):
    """What the session needs of `engine.train.run.Run`."""

    id: str

    def execute(self) -> Any: ...

    def request(self, command: str | Change) -> None: ...

    def close(self) -> None: ...


def _later(module: str, name: str) -> Callable[..., Any]:
    """A function of the engine, imported when it is first called: torch takes seconds, and the page must not wait."""
    return lambda *args, **kwargs: getattr(importlib.import_module(module), name)(*args, **kwargs)


@dataclass(frozen=True)
class EngineCalls:
    """The engine's functions that the session calls; tests give their own."""

    start_run: Callable[..., Run] = _later("engine.train.run", "start_run")
    start_detached: Callable[..., str] = start_detached
    resume_run: Callable[..., Run] = _later("engine.train.run", "resume_run")
    export_run: Callable[..., Any] = _later("engine.checkpoints.export", "export_run")
    estimate: Callable[..., Any] = _later("engine.fit.report", "estimate")
    preview: Callable[..., dict[str, Any]] = _later("engine.data", "preview")
    load_tokenizer: Callable[..., Any] = _later("engine.model.build", "load_tokenizer")

    @staticmethod
    def warm_up(model: ModelConfig) -> None:
        """Import and try once, on `model`, what the first Start and Talk need, so that they do not wait for it."""
        importlib.import_module("engine.train.prepare")
        build, load = (getattr(importlib.import_module("engine.model.build"), name) for name in ("build_model", "load_config"))
        build(load(model.source), model)
