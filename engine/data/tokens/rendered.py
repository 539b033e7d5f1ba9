"""The text of an example before it is tokenized, or why it was rejected."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from engine.config.data_settings import DroppedTurns, TypedTokens


@dataclass(frozen=True)
class Handling:
    """Settings of `DataConfig` for reading conversations."""

    train_on: str = "assistant"
    dropped_turns: DroppedTurns = "turn_by_turn"
    typed_tokens: TypedTokens = "text"
    add_tokens: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rendered:
    """The text of one document, with the character ranges that carry loss."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Character ranges that carry loss."""
    answer: tuple[int, int] | None
    """Character range of the last answer."""
    framed: bool = True
    """Whether the text already has its begin and end tokens, as text from a template does."""
    typed: bool = False
    """Whether characters in the text stand in for special tokens that a person typed."""
    weights: tuple[float, ...] = ()
    """Factor of the losses of each range; empty if all are 1."""
    prompt: str | None = None
    """Text of the prompt of an answer of a preference. In place of `spans`, what carries loss
    begins where the tokens of the text part from those of the prompt, as with TRL: a token may
    reach over the border of the two texts.
    """


@dataclass(frozen=True)
class RejectedExample:
    """Reason why an example is left out. The summary counts each `reason`, and shows the `detail`
    of its first example.
    """

    reason: str
    detail: str = ""
    refused: bool = False
    """Whether the whole data set is refused because of this example. `detail` then has what to
    do.
    """


def warning_sentences(warnings: Mapping[str, int]) -> list[str]:
    """Puts the warnings on rendered conversations into sentences."""
    sentences = []
    for text, count in warnings.items():
        times = "once" if count == 1 else f"{count:,} times"
        sentences.append(f"{text} ({times}).")
    return sentences


def common_prefix(one: str, other: str) -> str:
    """Returns the longest prefix that both texts share."""
    return os.path.commonprefix([one, other])  # noqa: RUF071  characters are what is wanted
