"""Sampling runs on the same streamed blocks as training.

`Decoding` takes rows at any time and draws a token for each in every step, so rows of different
lengths share the sweeps over the weights. How it computes them, in this order of preference:

- in one cache for all rows (`static_decoder`), where a trial has shown that the model's logits are
  those without a cache;
- with the caches that the model's own code makes (`model_decoders`), likewise;
- without a cache, also for a row whose cache does not fit into the memory for caches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from engine.data.tokens.trained_ends import ids_of
from engine.errors import CacheError
from engine.model.build.pretrained_files import ids_of_end, load_generation_config
from engine.planning.fit.sampling_memory import (
    CacheCost,
    CacheRoom,
    cache_room,
    host_cache_room,
    pass_bytes_of_config,
)
from engine.runtime.device.graph_recorder import Recorder
from engine.runtime.sampling.answers import AnswerLimits, Found, Row, SampledToken
from engine.runtime.sampling.drawing import GREEDY, MOST_TOP_LOGPROBS, Drawing
from engine.runtime.sampling.kv_cache import NoCache, try_cache
from engine.runtime.sampling.model_decoders import GroupedDecoder, UncachedDecoder
from engine.runtime.sampling.rows_cache import try_rows_cache
from engine.runtime.sampling.static_decoder import StaticDecoder
from engine.runtime.step.streaming_engine import StreamingEngine

Decoder = StaticDecoder | GroupedDecoder | UncachedDecoder


class Decoding:
    """Rows that are being answered. It is used by one thread, and no weights may change while any
    row is under way.
    """

    def __init__(self, engine: StreamingEngine, decoder: Decoder):
        self._decoder = decoder
        self._uncached = UncachedDecoder(engine)
        """Takes rows for which the other one has no memory."""
        self._waiting: list[Row] = []
        self._count = 0

    def add(
        self,
        prompt: Sequence[int],
        limits: AnswerLimits,
        drawing: Drawing = GREEDY,
        top_logprobs: int = 0,
    ) -> int:
        """Adds a prompt (token ids), and returns the number of its row. The answer is empty if its
        limits leave no room. `top_logprobs` is the number of likeliest tokens that come with each
        drawn one, 20 at most.
        """
        if not prompt:
            raise ValueError("a prompt has at least one token")
        row = Row(self._count, list(prompt), limits, drawing, min(top_logprobs, MOST_TOP_LOGPROBS))
        self._count += 1
        if row.has_room:
            self._waiting.append(row)
        return row.number

    def cancel(self, number: int) -> None:
        """Ends a row; no token of it follows. Rows that are over are left alone."""
        self._waiting = [row for row in self._waiting if row.number != number]
        for decoder in (self._decoder, self._uncached):
            for row in decoder.rows:
                if row.number == number:
                    decoder.drop(row)

    @property
    def is_idle(self) -> bool:
        """Whether no row is waiting or under way."""
        return not (self._waiting or self._decoder.rows or self._uncached.rows)

    def step(self) -> list[SampledToken]:
        """Draws the next token of every row under way. Where a model is fed by groups, some rows
        may get none in a step.
        """
        self._admit()
        sampled: list[SampledToken] = []
        for decoder in (self._decoder, self._uncached):
            if not decoder.rows:
                continue
            found = self._advance(decoder)
            if found is None:
                # The answers continue without a cache, and nothing of it stays in memory.
                rows = decoder.rows
                decoder.close()
                self._uncached.admit(rows)
                continue
            for row, token, logprob, top in found:
                one = row.take(token, logprob, top)
                sampled.append(one)
                if one.finish is not None:
                    decoder.drop(row)
        return sampled

    @staticmethod
    def _advance(decoder: Decoder) -> Found | None:
        """Advances a decoder; returns None if its cache fails. The error, whose frames hold the
        cache, is gone then.
        """
        try:
            return decoder.advance()
        except CacheError:
            return None

    def _admit(self) -> None:
        too_long = [row for row in self._waiting if not self._decoder.can_ever_take(row)]
        if too_long:
            self._waiting = [row for row in self._waiting if row not in too_long]
            self._uncached.admit(too_long)
        self._decoder.admit(self._waiting)

    def close(self) -> None:
        """Frees all memory."""
        self._waiting.clear()
        self._decoder.close()
        self._uncached.close()


class Sampler:
    """Draws answers from the weights of `engine`. It tries the model's caches once, when they are
    first needed.
    """

    def __init__(self, engine: StreamingEngine):
        self.engine = engine

    @cached_property
    def rows_cost(self) -> CacheCost | NoCache:
        """Memory that a row of a `RowsCache` takes, or why this model cannot use one."""
        return try_rows_cache(self.engine)

    @cached_property
    def cache_cost(self) -> CacheCost | NoCache:
        """Memory that a row of the model's own cache takes, or why it cannot be used."""
        return try_cache(self.engine)

    @property
    def slow_note(self) -> str:
        """A sentence for people where answers are drawn without a cache; empty elsewhere."""
        if not isinstance(self.rows_cost, NoCache) or not isinstance(self.cache_cost, NoCache):
            return ""
        family = self.engine.model.config.model_type
        return (
            f"Answers of {family} models are slow, since every token is computed from all tokens "
            f"before it: the key-value cache of this model cannot be used ({self.cache_cost.why})."
        )

    @property
    def way(self) -> str:
        """How answers are drawn, in words."""
        if not isinstance(self.rows_cost, NoCache):
            return "with one cache for all rows"
        if not isinstance(self.cache_cost, NoCache):
            return f"with the caches of the model's own code ({self.rows_cost.why})"
        return f"without a cache ({self.cache_cost.why})"

    @cached_property
    def _recorder(self) -> Recorder | None:
        """Records steps. Each recorder leaves some memory of its stream to the device's libraries,
        so there is only one.
        """
        backend = self.engine.backend
        return backend.recorder() if backend.device.type == "cuda" else None

    @contextlib.contextmanager
    def decoding(self, looks_ahead: bool = True) -> Iterator[Decoding]:
        """Opens a `Decoding` on the current weights, and frees its memory in the end. If it
        `looks_ahead`, a step may go on between two calls, so nobody else may use the engine.
        """
        with self.engine.on_same_weights():
            opened = Decoding(self.engine, self._decoder(looks_ahead))
            try:
                yield opened
            finally:
                opened.close()

    def _decoder(self, looks_ahead: bool) -> Decoder:
        if not isinstance(self.rows_cost, NoCache):
            room = self._cache_room(self.rows_cost)
            return StaticDecoder(self.engine, self.rows_cost, room, self._recorder, looks_ahead)
        if not isinstance(self.cache_cost, NoCache):
            return GroupedDecoder(self.engine, self.cache_cost, self._cache_room(self.cache_cost))
        return UncachedDecoder(self.engine)

    def _cache_room(self, cost: CacheCost) -> CacheRoom:
        """Returns the memory for caches."""
        free = self.engine.backend.free_memory()
        if self.engine.backend.device.type == "cpu":
            return host_cache_room(free)
        text = self.engine.model.config.get_text_config()
        item = torch.finfo(getattr(torch, self.engine.model.dtype)).bits // 8
        return cache_room(free, cost.per_token, pass_bytes_of_config(text, item))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        limits: AnswerLimits,
        drawing: Drawing = GREEDY,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Continues each prompt (token ids) up to its limits, and returns the new ids, end tokens
        left out. Each row draws with a seed of its own: that of `drawing` plus its number.
        `on_token(row, token)` is called for each new token; an exception from it stops the
        sampling.
        """
        answers: list[list[int]] = [[] for _ in prompts]
        if not any(limits.longest(len(prompt)) > len(prompt) for prompt in prompts):
            return answers
        with self.decoding() as decoding:
            for number, prompt in enumerate(prompts):
                decoding.add(prompt, limits, drawing.with_seed(drawing.seed + number))
            while not decoding.is_idle:
                for sampled in decoding.step():
                    if sampled.finish == "stop":
                        continue
                    answers[sampled.row].append(sampled.token)
                    if on_token is not None:
                        on_token(sampled.row, sampled.token)
        return answers

    def stream(
        self, prompt: Sequence[int], limits: AnswerLimits, drawing: Drawing = GREEDY
    ) -> Generator[int, None, None]:
        """Yields the answer that `generate` gives to one prompt, a token at a time. Other callers
        may use the engine between two tokens. Closing the iterator frees the cache.
        """
        if limits.longest(len(prompt)) <= len(prompt):
            return
        with self.decoding(looks_ahead=False) as decoding:
            decoding.add(prompt, limits, drawing)
            while not decoding.is_idle:
                for sampled in decoding.step():
                    if sampled.finish != "stop":
                        yield sampled.token


def longest_row(config: Any) -> int | None:
    """Returns the most tokens that a row may have, prompt and answer together; None where the model
    does not say. As by vLLM, linearly scaled positions are as many more.
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if longest is not None and rope.get("rope_type") == "linear":
        return int(longest * rope["factor"])
    return longest


def end_tokens(config: Any, tokenizer: Any, source: str, trained: Iterable[str] = ()) -> set[int]:
    """Returns the token ids that end an answer: those of the generation config, of the model's
    config and of the tokenizer, and the tokens that were `trained` to end one.
    """
    found = set(ids_of(tokenizer, trained))
    for owner in (load_generation_config(source), config.get_text_config(), tokenizer):
        found.update(ids_of_end(owner))
    return found
