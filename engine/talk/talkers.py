"""Talking to weights: a model's as a run began, a checkpoint's, an exported folder's, or those of a
paused run, which are neither copied nor disturbed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.checkpoints.open_for_sampling import OpenedModel, open_checkpoint, open_model
from engine.checkpoints.weights import initialise, load_pretrained
from engine.config.settings import TrainConfig
from engine.errors import FitError, GpuMemoryError
from engine.model.hub import fetch
from engine.progress import Progress, saying, untold
from engine.runtime.generate import AnswerLimits, Drawing, Sampler
from engine.talk.conversation import Message, Sampling, Source
from engine.talk.talk_sources import ADVICE
from engine.talk.voice import Voice
from engine.train.paused_calls import PausedCalls

# ---------------------------------------------------------------------- talkers


@dataclass
class Talker:
    """Weights in memory that answer, one conversation at a time. `call` runs every piece of work on
    the model.
    """

    label: str
    voice: Voice
    call: Callable[[Callable[[], Any]], Any]
    sampler: Callable[[], Sampler]
    held_bytes: int = 0
    """Of RAM, by the weights that it has loaded."""
    _owned: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def answer(self, messages: list[Message], sampling: Sampling) -> Generator[int, None, None]:
        """Token ids of the next answer as they are drawn; closing the iterator ends it and frees
        its cache. Raises DataError for a conversation that cannot be asked, FitError where memory
        runs out, and RunError once a paused run goes on.
        """
        ids = self.voice.prompt(messages)
        tokens = self.sampler().stream(
            ids,
            AnswerLimits(sampling.max_new_tokens, self.voice.ends, self.voice.longest),
            Drawing(sampling.temperature, sampling.top_p, sampling.seed),
        )
        try:
            while True:
                token = self.call(lambda: next(tokens, None))
                if token is None:
                    return
                yield token
        except GpuMemoryError as error:
            raise FitError(
                f"The GPU ran out of memory{f' ({error.in_use})' if error.in_use else ''} while "
                f"{self.label} answered; begin a new chat, or unload and close other programs."
            ) from error
        finally:
            tokens.close()

    def close(self) -> None:
        """Give the memory back; nothing may be answering."""
        self._owned.close()


def load(source: Source, progress: Progress = untold) -> Talker:
    """Bring weights into memory, from the hub where they are not in its cache yet. What `progress`
    raises gives up. Raises RamstreamError for what cannot be loaded.
    """
    with contextlib.ExitStack() as owned:
        if source.kind == "checkpoint":
            opened = owned.enter_context(
                open_checkpoint(source.runs_dir, source.run_id, source.step, progress)
            )
        else:
            opened = owned.enter_context(_opened(source, progress))
        try:
            engine = opened.engine()
        except torch.OutOfMemoryError:
            raise FitError(
                f"The GPU has too little free memory for {source.label}; {ADVICE}."
            ) from None
        owned.callback(engine.close)
        sampler = Sampler(engine)
        voice = Voice(source.config, opened.model.config, opened.tokenizer)
        return Talker(
            source.label,
            voice,
            lambda work: work(),
            lambda: sampler,
            opened.store.allocated_bytes,
            owned.pop_all(),
        )


@contextlib.contextmanager
def _opened(source: Source, progress: Progress) -> Iterator[OpenedModel]:
    """A model as a run would begin with it."""
    config = source.config
    if config.model.init == "pretrained":
        progress = _downloaded(source, progress)
    with open_model(config) as opened:
        if config.model.init == "random":
            initialise(
                opened.model, opened.store, config.train.seed, opened.backend.device, progress
            )
        else:
            load_pretrained(opened.model, config.model.source, opened.store, progress)
        yield opened


def _downloaded(source: Source, progress: Progress) -> Progress:
    """Bring weights into the hub's cache; how the loading that follows is told. What is there when
    it begins is not counted, so that the time left is that of what comes.
    """
    first: list[float] = []

    def downloading(done: float, total: float, _: str = "") -> None:
        first.extend([] if first else [done])
        progress(done - first[0], total - first[0], f"Downloading {source.config.model.source}")

    fetch(source.config.model.source, True, downloading, lambda: progress(0, 0))
    return saying(progress, f"Loading the weights: {source.label}") if first else progress


def borrow(paused: PausedCalls, config: TrainConfig, label: str) -> Talker:
    """The weights of a run that is paused in this process, as they are: each token is computed by
    the run's own thread. Raises RunError where it is not paused.
    """
    voice = Voice(config, *paused.do(lambda p: (p.model.config, p.tokenizer)))
    # The sampler is asked for anew each time: whoever held it would hold the planes of a run that
    # is over.
    return Talker(
        label,
        voice,
        lambda work: paused.do(lambda _: work()),
        lambda: paused.do(lambda p: p.sampler),
    )
