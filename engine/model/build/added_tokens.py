"""The tokens of `data.add_tokens` are added to a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from engine.text import counted

ADD_TOKENS = "data.add_tokens"


@dataclass(frozen=True)
class Added:
    """What a tokenizer got."""

    new: tuple[str, ...]
    """Tokens that were added."""
    known: tuple[str, ...]
    """Tokens that it had as added tokens before, and keeps as they were."""
    vocabulary: int
    """Number of rows that a model needs for them; 0 where no token was named."""

    def notes(self, before: int) -> list[str]:
        """Returns sentences on what was done, for a model of which the weights have `before`
        rows.
        """
        sentences = []
        if self.known:
            are = "a token" if len(self.known) == 1 else "tokens"
            sentences.append(
                f"{ADD_TOKENS}: {', '.join(self.known)}: the tokenizer has {are} of this name, so "
                "nothing is added."
            )
        if self.new:
            grown = self.vocabulary - before
            how = "They have rows in the embedding already, which are trained as they are."
            if grown > 0:
                how = f"Embedding and head grow by {counted(grown, 'row')} to {self.vocabulary:,}."
            sentences.append(f"The tokenizer got {', '.join(self.new)}. {how}")
        return sentences


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> Added:
    """Adds tokens to a tokenizer of transformers, as special tokens. Those that it has as added
    tokens are unchanged. Raises ConfigError where that makes no single token of a text.
    """
    if not tokens:
        return Added((), (), 0)
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            ADD_TOKENS,
            f"the tokenizer {type(tokenizer).__name__} takes no tokens here; use a model with a "
            "fast tokenizer (tokenizer.json).",
        )
    had = tokenizer.get_added_vocab()
    new = [token for token in tokens if token not in had]
    tokenizer.add_tokens(new, special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    for token, number in zip(tokens, ids, strict=True):
        if tokenizer(token, add_special_tokens=False, verbose=False)["input_ids"] != [number]:
            raise ConfigError(
                ADD_TOKENS,
                f"the tokenizer reads {token} in another way than as one token, since it has one "
                "like it; give the token another name.",
            )
    known = tuple(token for token in tokens if token in had)
    return Added(tuple(new), known, 1 + max(ids))
