"""Sampling (greedy, temperature, top-p) runs on the same streamed blocks as training.

A prompt passes through the blocks once, and then one token at a time, with the model's own
key-value cache. Where a model's cache cannot be trusted, or a row's cache would not fit, each new
token takes a pass over all tokens so far. This is slow, but gives the same answer.

How rows are grouped when a cache is used:

- A wave is a number of rows that go through the blocks together. Their tokens and the bytes of
  their caches are bounded.
- A group is a part of a wave with one cache. Its rows have similar lengths and are not padded: each
  row is first fed as many tokens as the shortest has, and then one token of its prompt or answer
  per pass. So all rows of a cache are always at the same position, which is exact for every model
  family.
- A row that has ended is still fed with its group, and its logits are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from engine.data.tokens.trained_ends import ids_of
from engine.errors import CacheError
from engine.model.build.pretrained_files import ids_of_end, load_generation_config
from engine.runtime.sampling.kv_cache import CacheCost, try_cache
from engine.runtime.step.inference_passes import PASS_TOKENS
from engine.runtime.step.streaming_engine import StreamingEngine


@dataclass(frozen=True)
class AnswerLimits:
    """An answer ends at these limits."""

    max_new_tokens: int
    end_tokens: set[int]
    """Tokens that end an answer and are left out of it."""
    max_length: int | None = None
    """Most tokens of prompt and answer together; None where nothing bounds them."""
    is_over: Callable[[Sequence[int]], bool] | None = None
    """An answer also ends once this is true of its new tokens, which all stay in it."""

    def longest(self, prompt_tokens: int) -> int:
        """Returns the most tokens that a row can reach, prompt included."""
        most = prompt_tokens + self.max_new_tokens
        if self.max_length is not None:
            most = min(most, self.max_length)
        return most


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn from logits. A temperature of 0 takes the likeliest
    token.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Drawing()
"""Greedy drawing takes the likeliest token each time."""


@dataclass
class _Answers:
    """The rows of tokens so far, prompts included, and the new tokens of each."""

    rows: list[list[int]]
    limits: AnswerLimits
    on_token: Callable[[int, int], None] | None
    new: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.new = [[] for _ in self.rows]

    def longest(self, row: int) -> int:
        """Returns the most tokens that row number `row` can reach."""
        return self.limits.longest(len(self.rows[row]) - len(self.new[row]))

    def continues(self, row: int) -> bool:
        return len(self.rows[row]) < self.longest(row)

    def take(self, row: int, token: int) -> bool:
        """Adds a token to a row, and returns whether the row continues."""
        if token in self.limits.end_tokens:
            return False
        self.rows[row].append(token)
        self.new[row].append(token)
        if self.on_token is not None:
            self.on_token(row, token)
        if self.limits.is_over is not None and self.limits.is_over(self.new[row]):
            return False
        return self.continues(row)


class _Chooser:
    """Chooses the next token of each row. Every row has its own generator, so that its answer does
    not depend on the other rows.
    """

    def __init__(self, drawing: Drawing, rows: int):
        self._drawing = drawing
        self._generators = [
            torch.Generator().manual_seed(drawing.seed + row) for row in range(rows)
        ]

    def choose(self, rows: list[int], logits: torch.Tensor) -> list[int]:
        """Returns a token for each of `rows`, from logits [rows, vocabulary]."""
        temperature, top_p = self._drawing.temperature, self._drawing.top_p
        if temperature <= 0:
            return pick(logits, temperature, top_p, self._generators[0])
        tokens: list[int] = []
        for place, row in enumerate(rows):
            own = logits[place : place + 1]
            tokens += pick(own, temperature, top_p, self._generators[row])
        return tokens


@dataclass
class _Group:
    """Rows that share a cache, and how many tokens of each are in it."""

    rows: list[int]
    fed: int = 0
    cache: Any = None

    def join(self, row: int) -> None:
        """Adds a row, before the first tokens are fed."""
        self.rows.append(row)

    def feed(self, stop: int, cache: Any) -> None:
        """Keeps a cache that now holds `stop` tokens of each row."""
        self.fed = stop
        self.cache = cache


class Sampler:
    """Draws answers from the weights of `engine`. It checks the model's cache once, when it is
    first needed.
    """

    def __init__(self, engine: StreamingEngine):
        self.engine = engine

    @cached_property
    def cache_cost(self) -> CacheCost | None:
        """Memory that a key-value cache takes; None where this model's logits with a cache differ
        from those without.
        """
        return try_cache(self.engine)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        limits: AnswerLimits,
        drawing: Drawing = GREEDY,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Continues each prompt (token ids) up to its limits, and returns the new ids, end tokens
        left out. `on_token(row, token)` is called for each new token; an exception from it stops
        the sampling.
        """
        answers = _Answers([list(prompt) for prompt in prompts], limits, on_token)
        chooser = _Chooser(drawing, len(prompts))
        with self.engine.on_same_weights():
            self._answer(answers, limits, chooser)
        return answers.new

    def _answer(self, answers: _Answers, limits: AnswerLimits, chooser: _Chooser) -> None:
        """Continues all rows of `answers` up to their limits."""
        going = [row for row in range(len(answers.rows)) if answers.continues(row)]
        cost = self.cache_cost if going else None
        if cost is not None:
            spread = limits.max_new_tokens // 2
            # Half of the free memory is left for the activations of a pass.
            free = self.engine.backend.free_memory() // 2
            waves, going = _waves(going, answers, spread, cost, free)
            for wave in waves:
                going += _with_cache(self.engine, wave, spread, answers, chooser)
        while going:
            logits = self.engine.last_logits([answers.rows[row] for row in going])
            tokens = chooser.choose(going, logits)
            going = [row for row, token in zip(going, tokens) if answers.take(row, token)]

    def stream(
        self, prompt: Sequence[int], limits: AnswerLimits, drawing: Drawing = GREEDY
    ) -> Generator[int, None, None]:
        """Yields the answer that `generate` gives to one prompt, a token at a time. Other callers
        may use the engine between two tokens. Closing the iterator frees the cache.
        """
        with self.engine.on_same_weights():
            yield from self._stream(list(prompt), limits, drawing)

    def _stream(
        self, row: list[int], limits: AnswerLimits, drawing: Drawing
    ) -> Generator[int, None, None]:
        """Yields the answer to the prompt `row`, and appends it to `row`."""
        most = limits.longest(len(row))
        generator = torch.Generator().manual_seed(drawing.seed)
        cost = self.cache_cost if len(row) < most else None
        has_cache = cost is not None and cost.of(most) <= self.engine.backend.free_memory() // 2
        caches: list[Any] = [None]
        fed = 0
        begun = len(row)
        while len(row) < most:
            if has_cache:
                try:
                    logits = self.engine.cached_logits([np.array([row[fed:]])], caches)
                except CacheError:
                    # Free the cache; the answer continues without one.
                    has_cache = False
                    caches = [None]
                    continue
                fed = len(row)
            else:
                logits = self.engine.last_logits([row])
            (token,) = pick(logits, drawing.temperature, drawing.top_p, generator)
            if token in limits.end_tokens:
                return
            row.append(token)
            yield token
            if limits.is_over is not None and limits.is_over(row[begun:]):
                return


# ---------------------------------------------------------------- with a cache


def _waves(
    going: list[int], answers: _Answers, spread: int, cost: CacheCost, free: int
) -> tuple[list[list[int]], list[int]]:
    """Returns rows that go through the blocks together, shortest first, and rows whose cache alone
    would take more than `free` bytes. Rows may share a cache if their lengths differ by up to
    `spread` tokens.
    """
    waves: list[list[int]] = []
    too_long: list[int] = []
    tokens = held = 0
    for row in sorted(going, key=lambda row: len(answers.rows[row])):
        length = len(answers.rows[row])
        nbytes = cost.of(answers.longest(row) + spread)
        if nbytes > free:
            too_long.append(row)
        elif waves and tokens + length <= PASS_TOKENS and held + nbytes <= free:
            waves[-1].append(row)
            tokens += length
            held += nbytes
        else:
            waves.append([row])
            tokens = length
            held = nbytes
    return waves, too_long


def _cache_groups(wave: list[int], answers: _Answers, spread: int) -> list[_Group]:
    """Returns the groups of a wave, whose rows are sorted by length. Rows that differ by at most
    `spread` tokens share a group.
    """
    groups: list[_Group] = []
    for row in wave:
        length = len(answers.rows[row])
        if groups and length - len(answers.rows[groups[-1].rows[0]]) <= spread:
            groups[-1].join(row)
        else:
            groups.append(_Group([row]))
    return groups


def _with_cache(
    engine: StreamingEngine, wave: list[int], spread: int, answers: _Answers, chooser: _Chooser
) -> list[int]:
    """Answers the rows of a wave. Returns the rows that are unfinished because a cache failed. The
    caches are freed on return.
    """
    groups = _cache_groups(wave, answers, spread)
    going = set(wave)
    while groups:
        stops = [_next_stop(group, answers) for group in groups]
        tokens = [_next_tokens(group, stop, answers) for group, stop in zip(groups, stops)]
        caches = [group.cache for group in groups]
        try:
            logits = engine.cached_logits(tokens, caches)
        except CacheError:
            return sorted(going)
        due: list[int] = []
        places: list[int] = []
        place = 0
        for group, stop, cache in zip(groups, stops, caches):
            group.feed(stop, cache)
            for row in group.rows:
                # The logits of a row are used only once its last token is in the cache.
                if row in going and len(answers.rows[row]) == stop:
                    due.append(row)
                    places.append(place)
                place += 1
        for row, token in zip(due, chooser.choose(due, logits[places])):
            if not answers.take(row, token):
                going.discard(row)
        # The cache of a group whose rows have all ended must be freed before the next pass, so no
        # other reference to the group may remain.
        groups = [group for group in groups if going.intersection(group.rows)]
        del group, cache, caches
    return []


def _next_stop(group: _Group, answers: _Answers) -> int:
    """Returns the position up to which the rows of a group are fed next: first the end of the
    shortest row, then one token further each time.
    """
    if group.fed:
        return group.fed + 1
    return len(answers.rows[group.rows[0]])


def _next_tokens(group: _Group, stop: int, answers: _Answers) -> np.ndarray:
    """Returns the next tokens of a group, [rows, tokens]."""
    rows = []
    for row in group.rows:
        tokens = answers.rows[row]
        # A row that has ended has no next token. It repeats its last one, for the shape.
        rows.append(tokens[group.fed : stop] or tokens[-1:])
    return np.array(rows)


# ---------------------------------------------------------------- tokens


def pick(
    logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> list[int]:
    """Returns one token for each row of `logits` [rows, vocabulary] (float32): the likeliest, or
    one drawn from the smallest set of likeliest tokens whose probabilities reach `top_p` (nucleus
    sampling, arXiv 1904.09751).
    """
    if temperature <= 0:
        return logits.argmax(-1).tolist()
    probabilities = torch.softmax(logits / temperature, -1)
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    beyond = ordered.cumsum(-1) - ordered >= top_p
    ordered = ordered.masked_fill(beyond, 0.0)
    drawn = torch.multinomial(ordered, 1, generator=generator)
    return tokens.gather(-1, drawn).squeeze(-1).tolist()


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
