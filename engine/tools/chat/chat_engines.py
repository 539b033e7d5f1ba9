"""Answers in a conversation, from weights that are in memory.

The weights come from the model with which a run began, a checkpoint, an exported folder or a paused
run. Those of a paused run are neither copied nor changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.config.settings import TrainConfig
from engine.data.tokens.trained_ends import ends_of_run
from engine.errors import FitError, GpuMemoryError
from engine.model.hub.hub import fetch
from engine.progress import Progress, labeled, no_progress
from engine.runs.record.following import Follower, catch_up
from engine.runs.record.run_folder import open_run
from engine.runs.record.snapshot import RunSnapshot
from engine.runtime.sampling.answers import AnswerLimits
from engine.runtime.sampling.drawing import Drawing
from engine.runtime.sampling.generate import Sampler
from engine.tools.chat.chat_sources import ADVICE
from engine.tools.chat.conversation import Message, Sampling, Source
from engine.tools.chat.prompt_builder import PromptBuilder
from engine.training.loop.paused_calls import PausedCalls
from engine.training.weights.adapter_weights import initialize_adapters
from engine.training.weights.open_for_sampling import OpenedModel, open_checkpoint, open_model
from engine.training.weights.weights import initialize, load_pretrained


@dataclass
class ChatEngine:
    """Holds weights in memory and answers one conversation at a time.

    `call` runs work on the model, on the thread that owns the model.
    """

    label: str
    prompt_builder: PromptBuilder
    call: Callable[[Callable[[], Any]], Any]
    sampler: Callable[[], Sampler]
    held_bytes: int = 0
    """Bytes of RAM of the weights if they were loaded for this chat engine, else 0."""
    _owned: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def is_borrowed(self) -> bool:
        """Whether the weights are those of a paused run, which can be resumed between two calls."""
        return not self.held_bytes

    def slow_note(self) -> str:
        """Returns a sentence where these weights answer without a cache, else "". No answer may be
        in progress. Raises the errors of `answer`.
        """
        sampler = self.sampler()
        with self._memory_in_words():
            return self.call(lambda: sampler.slow_note)

    def answer(self, messages: list[Message], sampling: Sampling) -> Generator[int, None, None]:
        """Yields the token ids of the next answer as they are sampled.

        Closing the iterator ends the answer and frees its cache. Raises DataError for a
        conversation that the model cannot be given, FitError if memory runs out, and RunError once
        a paused run continues.
        """
        ids = self.prompt_builder.prompt(messages)
        tokens = self.sampler().stream(
            ids,
            AnswerLimits(
                sampling.max_new_tokens, self.prompt_builder.ends, self.prompt_builder.longest
            ),
            Drawing(sampling.temperature, sampling.top_p, seed=sampling.seed),
        )
        try:
            while True:
                with self._memory_in_words():
                    token = self.call(lambda: next(tokens, None))
                if token is None:
                    return
                yield token
        finally:
            tokens.close()

    @contextlib.contextmanager
    def _memory_in_words(self) -> Iterator[None]:
        """Turns a GPU's lack of memory into FitError."""
        try:
            yield
        except GpuMemoryError as error:
            in_use = f" ({error.in_use})" if error.in_use else ""
            raise FitError(
                f"The GPU ran out of memory{in_use} while "
                f"{self.label} answered; begin a new chat, or unload and close other programs."
            ) from error

    def close(self) -> None:
        """Frees the memory; no answer may be in progress."""
        self._owned.close()


def load(source: Source, progress: Progress = no_progress, many_rows: bool = False) -> ChatEngine:
    """Loads weights into memory; files that are not in the hub's cache are downloaded first.
    `many_rows` says whether many answers are drawn at once.

    If `progress` raises an exception, loading ends. Raises RamstreamError for weights that cannot
    be loaded.
    """
    with contextlib.ExitStack() as owned:
        if source.kind in ("checkpoint", "best"):
            weights = "best" if source.kind == "best" else "last"
            opened = owned.enter_context(
                open_checkpoint(source.runs_dir, source.run_id, source.step, progress, weights)
            )
        else:
            opened = owned.enter_context(_opened(source, progress))
        try:
            engine = opened.engine(many_rows)
        except torch.OutOfMemoryError:
            raise FitError(
                f"The GPU has too little free memory for {source.label}; {ADVICE}."
            ) from None
        owned.callback(engine.close)
        sampler = Sampler(engine)
        trained = _trained_ends(source, opened.tokenizer)
        prompt_builder = PromptBuilder(
            source.config, opened.model.config, opened.tokenizer, trained
        )
        return ChatEngine(
            source.label,
            prompt_builder,
            lambda work: work(),
            lambda: sampler,
            opened.host_states.ram.nbytes,
            owned.pop_all(),
        )


@contextlib.contextmanager
def _opened(source: Source, progress: Progress) -> Iterator[OpenedModel]:
    """Opens a model in the state in which a run would begin with it."""
    config = source.config
    if config.model.init == "pretrained":
        progress = _downloaded(source, progress)
    with open_model(config) as opened:
        if config.model.init == "random":
            initialize(
                opened.model, opened.host_states, config.train.seed, opened.backend.device, progress
            )
        else:
            place, seed = config.model.source, config.train.seed
            load_pretrained(opened.model, place, opened.host_states, progress, seed)
        initialize_adapters(opened.model, opened.host_states, config.train.seed)
        yield opened


def _downloaded(source: Source, progress: Progress) -> Progress:
    """Downloads weights into the hub's cache; returns the `Progress` of the loading that follows.

    Files that exist at the start are not counted, so that the remaining time is that of the others.
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
    return labeled(progress, f"Loading the weights: {source.label}")


def _trained_ends(source: Source, tokenizer: Any) -> tuple[str, ...]:
    """Returns the tokens that the run of some weights has trained to end an answer, according to
    its record. Other weights are of no run.
    """
    if source.kind not in ("checkpoint", "best"):
        return ()
    snapshot = RunSnapshot()
    catch_up(snapshot, Follower(open_run(source.runs_dir, source.run_id).events_path))
    return ends_of_run(snapshot.data, source.config.data, tokenizer)


def borrow(paused: PausedCalls, config: TrainConfig, label: str) -> ChatEngine:
    """Returns a chat engine that uses the current weights of a run that is paused in this process.

    The run's own thread computes each token. Raises RunError if the run is not paused.
    """
    prompt_builder = PromptBuilder(
        config, *paused.do(lambda p: (p.model.config, p.tokenizer, p.data.ends))
    )
    # A new sampler is created each time: a chat engine that kept one would keep the planes of a
    # run that is over.
    return ChatEngine(
        label,
        prompt_builder,
        lambda work: paused.do(lambda _: work()),
        lambda: paused.do(lambda p: p.sampler),
    )
