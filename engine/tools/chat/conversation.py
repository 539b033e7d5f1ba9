"""A conversation as plain data: which weights answer, the messages, and how answers are sampled.

This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from engine.config.settings import TrainConfig

Message = dict[str, str]
"""A message with a `role` (system, user or assistant) and a `content`."""


@dataclass(frozen=True)
class Source:
    """Weights to load.

    Its `kind` is `base` (the model that the run of `config` names, as it was published),
    `checkpoint` (the one of `step` in run `run_id`, or the newest if `step` is None), `best` (the
    best weights that this run has kept) or `folder` (a Hugging Face folder, which `config` names).
    """

    kind: str
    label: str = field(compare=False)
    config: TrainConfig
    runs_dir: str = ""
    run_id: str = ""
    step: int | None = None


def base_of(config: TrainConfig) -> Source:
    """Returns a source for a run's base model: the one that its settings name, as no run has
    trained it. A run that continues another one began with other weights.
    """
    what = config.model.source
    if config.model.init != "pretrained":
        what += ", random weights"
    return Source("base", f"Base model: {what}", config)


def checkpoint_of(
    runs_dir: str | os.PathLike[str], run_id: str, config: TrainConfig, step: int | None, label: str
) -> Source:
    """Returns a source for a checkpoint of a run, the newest one if `step` is None."""
    return Source("checkpoint", label, config, os.fspath(runs_dir), run_id, step)


def best_of(
    runs_dir: str | os.PathLike[str], run_id: str, config: TrainConfig, step: int, label: str
) -> Source:
    """Returns a source for the best weights that a run has kept, those of `step`."""
    return Source("best", label, config, os.fspath(runs_dir), run_id, step)


@dataclass(frozen=True)
class Sampling:
    """Settings with which an answer is sampled; temperature 0 always takes the most likely
    token.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def take_turns(
    answers: dict[str, Generator[int, None, None]],
    on_token: Callable[[str, int], None],
    stopped: Callable[[], bool],
) -> None:
    """Samples a token of each answer in turn and calls `on_token(name, token)`.

    It returns when all answers have ended or `stopped()` is true, after closing the answers.
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
