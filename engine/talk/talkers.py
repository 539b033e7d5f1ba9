"""A talker is weights in memory that answer a conversation.

They are a model's as a run began, a checkpoint's, an exported folder's, or those of a paused run,
which are neither copied nor disturbed.
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


@dataclass
class Talker:
    """A `Talker` is weights in memory that answer, one conversation at a time.

    `call` runs every piece of work on the model, on the thread that owns it.
    """

    label: str
    voice: Voice
    call: Callable[[Callable[[], Any]], Any]
    sampler: Callable[[], Sampler]
    held_bytes: int = 0
    """The loaded weights take this many bytes of RAM."""
    _owned: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def answer(self, messages: list[Message], sampling: Sampling) -> Generator[int, None, None]:
        """Yields the token ids of the next answer as they are drawn.

        Closing the iterator ends the answer and frees its cache. Raises DataError for a
        conversation that cannot be asked, FitError where memory runs out, and RunError once a
        paused run goes on.
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
            in_use = f" ({error.in_use})" if error.in_use else ""
            raise FitError(
                f"The GPU ran out of memory{in_use} while "
                f"{self.label} answered; begin a new chat, or unload and close other programs."
            ) from error
        finally:
            tokens.close()

    def close(self) -> None:
        """Frees the memory; no answer may be under way."""
        self._owned.close()


def load(source: Source, progress: Progress = untold) -> Talker:
    """Loads weights into memory; those that the hub's cache lacks are downloaded first.

    An exception that `progress` raises ends the loading. Raises RamstreamError for weights that
    cannot be loaded.
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
    """Opens a model as a run would begin with it."""
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
    """Downloads weights into the hub's cache; returns the `Progress` of the loading that follows.

    Files that are there at the start are not counted, so that the time left is that of the others.
    """
    model = source.config.model.source
    before: float | None = None

    def downloading(done: float, total: float, _: str = "") -> None:
        nonlocal before
        if before is None:
            before = done
        progress(done - before, total - before, f"Downloading {model}")

    fetch(model, True, downloading, lambda: progress(0, 0))
    if before is None:
        return progress
    return saying(progress, f"Loading the weights: {source.label}")


def borrow(paused: PausedCalls, config: TrainConfig, label: str) -> Talker:
    """Returns a talker with the weights of a run that is paused in this process, as they are.

    The run's own thread computes each token. Raises RunError where the run is not paused.
    """
    voice = Voice(config, *paused.do(lambda p: (p.model.config, p.tokenizer)))
    # The sampler is asked for anew each time: a talker that held it would hold the planes of a run
    # that is over.
    return Talker(
        label,
        voice,
        lambda work: paused.do(lambda _: work()),
        lambda: paused.do(lambda p: p.sampler),
    )
