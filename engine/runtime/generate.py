"""Sampling through the same streamed blocks that train: greedy, temperature, top-p.

A prompt passes through the blocks once and then one token at a time, with the model's own key-value
cache. Where a model's cache cannot be trusted, or a row's would not fit, each token is one pass
over all tokens so far: slow, and the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from engine.errors import CacheError
from engine.model.pretrained_files import load_generation_config
from engine.runtime.kv_cache import CacheCost, try_cache
from engine.runtime.streaming_engine import StreamingEngine

_TOKENS_AT_ONCE = 16384


@dataclass
class _Answers:
    """The rows so far, and what ends each."""

    rows: list[list[int]]
    max_new_tokens: int
    max_length: int | None
    end_tokens: set[int]
    on_token: Callable[[int, int], None] | None
    new: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.new = [[] for _ in self.rows]

    def longest(self, k: int) -> int:
        """Tokens that row `k` comes to at most."""
        most = len(self.rows[k]) - len(self.new[k]) + self.max_new_tokens
        return most if self.max_length is None else min(most, self.max_length)

    def goes_on(self, k: int) -> bool:
        return len(self.rows[k]) < self.longest(k)

    def take(self, k: int, token: int) -> bool:
        """Add a token to row `k`; whether the row goes on."""
        if token in self.end_tokens:
            return False
        self.rows[k].append(token)
        self.new[k].append(token)
        if self.on_token is not None:
            self.on_token(k, token)
        return self.goes_on(k)


class Sampler:
    """Draws answers from the weights of `engine`. The trial of the model's cache is made once, when
    it is first needed.
    """

    def __init__(self, engine: StreamingEngine):
        self.engine = engine

    @cached_property
    def cache_cost(self) -> CacheCost | None:
        """What a key-value cache takes, or None where this model gives other logits with one than
        without.
        """
        return try_cache(self.engine)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        end_tokens: set[int],
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        max_length: int | None = None,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Continue each prompt (token ids) until an end token, `max_new_tokens` or `max_length`;
        the new ids, end token left out. Temperature 0 is greedy. `on_token(row, token)` is called
        for each new token; what it raises stops.
        """
        answers = _Answers(
            [list(prompt) for prompt in prompts], max_new_tokens, max_length, end_tokens, on_token
        )
        generators = [torch.Generator().manual_seed(seed + k) for k in range(len(prompts))]

        def choose(rows: list[int], logits: torch.Tensor) -> list[int]:
            if temperature <= 0:
                return pick(logits, temperature, top_p, generators[0])
            return [
                pick(logits[n : n + 1], temperature, top_p, generators[k])[0]
                for n, k in enumerate(rows)
            ]

        going = [k for k in range(len(prompts)) if answers.goes_on(k)]
        cost = self.cache_cost if going else None
        if cost is not None:
            spread = max_new_tokens // 2
            waves, going = _waves(
                going, answers, spread, cost, self.engine.backend.free_memory() // 2
            )
            for wave in waves:
                going += _with_cache(self.engine, wave, spread, answers, choose)
        while going:
            still = []
            for group in _groups(going, answers.rows):
                logits = self.engine.last_logits([answers.rows[k] for k in group])
                still += [
                    k for k, token in zip(group, choose(group, logits)) if answers.take(k, token)
                ]
            going = still
        return answers.new

    def stream(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        end_tokens: set[int],
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        max_length: int | None = None,
    ) -> Generator[int, None, None]:
        """The answer that `generate` gives to one prompt, a token at a time; between two tokens
        others may use the engine. Closing the iterator frees the cache.
        """
        row, most = list(prompt), len(prompt) + max_new_tokens
        most = most if max_length is None else min(most, max_length)
        generator = torch.Generator().manual_seed(seed)
        cost = self.cache_cost if len(row) < most else None
        has_cache = cost is not None and cost.of(most) <= self.engine.backend.free_memory() // 2
        caches: list[Any] = [None]
        fed = 0
        while len(row) < most:
            if has_cache:
                try:
                    logits = self.engine.cached_logits([np.array([row[fed:]])], caches)
                except CacheError:
                    has_cache, caches = False, [None]
                    continue
                fed = len(row)
            else:
                logits = self.engine.last_logits([row])
            (token,) = pick(logits, temperature, top_p, generator)
            if token in end_tokens:
                return
            row.append(token)
            yield token


def _waves(
    going: list[int], answers: _Answers, spread: int, cost: CacheCost, free: int
) -> tuple[list[list[int]], list[int]]:
    """Rows that go through the blocks together, their tokens and the bytes of their caches bounded;
    and rows whose cache alone would take more than `free`. A row stays in its cache with rows up to
    `spread` tokens longer.
    """
    waves: list[list[int]] = []
    too_long, tokens, held = [], 0, 0
    for k in sorted(going, key=lambda k: len(answers.rows[k])):
        length, nbytes = len(answers.rows[k]), cost.of(answers.longest(k) + spread)
        if nbytes > free:
            too_long.append(k)
        elif waves and tokens + length <= _TOKENS_AT_ONCE and held + nbytes <= free:
            waves[-1].append(k)
            tokens, held = tokens + length, held + nbytes
        else:
            waves.append([k])
            tokens, held = length, nbytes
    return waves, too_long


def _with_cache(
    engine: StreamingEngine,
    wave: list[int],
    spread: int,
    answers: _Answers,
    choose: Callable[[list[int], torch.Tensor], list[int]],
) -> list[int]:
    """Answer the rows of a wave, sorted by length. Returns the rows that a failure left unfinished.

    Rows that differ by at most `spread` tokens share a micro-batch and its cache, without padding:
    all are fed as many tokens as the shortest has, and then one a step, of its prompt or of its
    answer. So every row of a cache is at the same position all the time, which is exact for every
    family; a row that has ended is fed on and not looked at.
    """
    groups: list[list[int]] = []
    for k in wave:
        if groups and len(answers.rows[k]) - len(answers.rows[groups[-1][0]]) <= spread:
            groups[-1].append(k)
        else:
            groups.append([k])
    fed = [0] * len(groups)
    caches: list[Any] = [None] * len(groups)
    going = set(wave)
    while groups:
        until = [
            start + 1 if start else len(answers.rows[group[0]]) for group, start in zip(groups, fed)
        ]
        tokens = [
            np.array([answers.rows[k][start:end] or answers.rows[k][-1:] for k in group])
            for group, start, end in zip(groups, fed, until)
        ]
        try:
            logits = engine.cached_logits(tokens, caches)
        except CacheError:
            return sorted(going)
        places = [(k, end) for group, end in zip(groups, until) for k in group]
        due = [n for n, (k, end) in enumerate(places) if k in going and len(answers.rows[k]) == end]
        rows = [places[n][0] for n in due]
        going.difference_update(
            k for k, token in zip(rows, choose(rows, logits[due])) if not answers.take(k, token)
        )
        kept = [n for n, group in enumerate(groups) if going.intersection(group)]
        groups, fed, caches = ([values[n] for n in kept] for values in (groups, until, caches))
    return []


def pick(
    logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> list[int]:
    """One token for each row of `logits` [rows, vocabulary] (float32): the likeliest, or one drawn
    from the smallest set of likeliest tokens whose probabilities reach `top_p` (nucleus sampling,
    arXiv 1904.09751).
    """
    if temperature <= 0:
        return logits.argmax(-1).tolist()
    probabilities = torch.softmax(logits / temperature, -1)
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    beyond = ordered.cumsum(-1) - ordered >= top_p
    ordered = ordered.masked_fill(beyond, 0.0)
    drawn = torch.multinomial(ordered, 1, generator=generator)
    return tokens.gather(-1, drawn).squeeze(-1).tolist()


def _groups(going: list[int], rows: list[list[int]]) -> list[list[int]]:
    """Rows of like length together, so many at once that a pass stays within a fixed number of
    tokens.
    """
    groups: list[list[int]] = []
    for k in sorted(going, key=lambda k: len(rows[k])):
        if groups and (len(groups[-1]) + 1) * len(rows[k]) <= _TOKENS_AT_ONCE:
            groups[-1].append(k)
        else:
            groups.append([k])
    return groups


def longest_row(config: Any) -> int | None:
    """Tokens that a row may have at most, prompt and answer together, where the model says so."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def end_tokens(config: Any, tokenizer: Any, source: str) -> set[int]:
    """Token ids that end an answer: of the generation config, the model's config and the tokenizer."""
    found: set[int] = set()
    configs = (load_generation_config(source), config.get_text_config(), tokenizer)
    for value in [getattr(each, "eos_token_id", None) for each in configs]:
        found.update(
            value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        )
    return found
