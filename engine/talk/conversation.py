"""A conversation is plain data: who answers, what is said, and how an answer is drawn.

No torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from engine.config.settings import TrainConfig

Message = dict[str, str]
"""A message has a `role`, which is system, user or assistant, and a `content`."""


@dataclass(frozen=True)
class Source:
    """A `Source` tells which weights to load.

    Its `kind` is `base` (the weights with which the run of `config` began), `checkpoint` (that of
    `step` of run `run_id`, the newest for None) or `folder` (a Hugging Face folder, which `config`
    names).
    """

    kind: str
    label: str = field(compare=False)
    config: TrainConfig
    runs_dir: str = ""
    run_id: str = ""
    step: int | None = None


def base_of(config: TrainConfig) -> Source:
    """Returns the model of a run as it was before the first step."""
    what = config.model.source
    if config.model.init != "pretrained":
        what += ", random weights"
    return Source("base", f"Before training: {what}", config)


def checkpoint_of(
    runs_dir: str | os.PathLike[str], run_id: str, config: TrainConfig, step: int | None, label: str
) -> Source:
    """Returns a checkpoint of a run, the newest one where `step` is None."""
    return Source("checkpoint", label, config, os.fspath(runs_dir), run_id, step)


@dataclass(frozen=True)
class Sampling:
    """An answer is drawn with these settings; temperature 0 always takes the likeliest token."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def take_turns(
    answers: dict[str, Generator[int, None, None]],
    on_token: Callable[[str, int], None],
    stopped: Callable[[], bool],
) -> None:
    """Draws a token of each answer in turn and calls `on_token(name, token)`.

    It ends when all answers have ended or `stopped()` is true, and then closes the answers.
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
