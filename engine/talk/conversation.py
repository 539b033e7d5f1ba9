"""A conversation as plain data: who answers, what is said and how an answer is drawn. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.config.settings import TrainConfig

Message = dict[str, str]
"""{role: system, user or assistant; content}."""


@dataclass(frozen=True)
class Source:
    """Weights that can be loaded. kind: `base` (as the run of `config` began), `checkpoint` (`step`
    of run `run_id`, None for its newest) or `folder` (a Hugging Face folder, which `config` names).
    """

    kind: str
    label: str = field(compare=False)
    config: TrainConfig
    runs_dir: str = ""
    run_id: str = ""
    step: int | None = None


def base_of(config: TrainConfig) -> Source:
    """The model of a run as it was before the first step."""
    what = (
        config.model.source
        if config.model.init == "pretrained"
        else f"{config.model.source}, random weights"
    )
    return Source("base", f"Before training: {what}", config)


def checkpoint_of(
    runs_dir: str | os.PathLike[str], run_id: str, config: TrainConfig, step: int | None, label: str
) -> Source:
    return Source("checkpoint", label, config, os.fspath(runs_dir), run_id, step)


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn; temperature 0 always takes the likeliest token."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def take_turns(
    answers: dict[str, Iterator[int]],
    on_token: Callable[[str, int], None],
    stopped: Callable[[], bool],
) -> None:
    """A token of each of the answers in turn, `on_token(name, token)`, until all have ended or
    `stopped()`. Closes them.
    """
    going = dict(answers)
    try:
        while going:
            for name, tokens in list(going.items()):
                if stopped():
                    return
                token = next(tokens, None)
                if token is None:
                    del going[name]
                else:
                    on_token(name, token)
    finally:
        for tokens in answers.values():
            tokens.close()
