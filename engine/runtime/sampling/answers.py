"""What sampling is asked for and what it returns, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.runtime.sampling.drawing import GREEDY, Drawing


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


class SampledToken(NamedTuple):
    """A token that was drawn for a row."""

    row: int
    token: int
    logprob: float
    """Natural logarithm of its probability according to the model, at a temperature of 1."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their logarithms, as many as were asked for."""
    finish: Literal["stop", "length"] | None = None
    """Why the answer ends with it; None while it continues. An end token is no part of it."""


@dataclass(eq=False, slots=True)
class Row:
    """A prompt and its answer so far."""

    number: int
    tokens: list[int]
    """Prompt and answer."""
    limits: AnswerLimits
    drawing: Drawing = GREEDY
    top_logprobs: int = 0
    """Number of likeliest tokens that are returned with each drawn one."""
    prompt_tokens: int = field(init=False)
    longest: int = field(init=False)
    """Most tokens that it can reach."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.longest = self.limits.longest(len(self.tokens))

    @property
    def has_room(self) -> bool:
        return len(self.tokens) < self.longest

    @property
    def drawn(self) -> int:
        """Number of tokens drawn so far."""
        return len(self.tokens) - self.prompt_tokens

    def take(
        self, token: int, logprob: float, top: tuple[tuple[int, float], ...] = ()
    ) -> SampledToken:
        """Adds a drawn token, unless it ends the answer."""
        if token in self.limits.end_tokens:
            return SampledToken(self.number, token, logprob, top, "stop")
        self.tokens.append(token)
        is_over = self.limits.is_over
        if is_over is not None and is_over(self.tokens[self.prompt_tokens :]):
            return SampledToken(self.number, token, logprob, top, "length")
        finish: Literal["length"] | None = None if self.has_room else "length"
        return SampledToken(self.number, token, logprob, top, finish)


Found = list[tuple[Row, int, float, tuple[tuple[int, float], ...]]]
"""Rows with their next tokens, the logarithms of their probabilities, and the likeliest tokens."""
