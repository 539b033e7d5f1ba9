"""The tokens that a data set trains a model to end its answers with.

They end the answers that are drawn from its weights, and stand in what is exported: the model's own
settings may not have them, as where a base model is trained on conversations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from engine.config.data_settings import DataConfig
from engine.data.tokens.encode import Encoder
from engine.data.tokens.render import NO_END
from engine.data.tokens.token_cache import Split
from engine.data.tokens.turn_ends import MARK
from engine.text import counted

ENDS = "answers_end_with"
"""Name of these tokens in the summary of a data set."""
NO_EOS = "The tokenizer has no end-of-sequence token, so the model cannot learn where to stop."
_MOST_DOCUMENTS = 4096
_MOST_TOKENS = 1 << 22


def written_ends(encoder: Encoder, formats: Iterable[str]) -> tuple[str, ...]:
    """Returns the tokens with which answers of these formats end, as far as the program writes
    them.
    """
    found: list[str] = []
    for name in formats:
        if encoder.template_use(name) == "tokenizer":
            found += encoder.renderer.ends.tokens
        elif name not in ("segments", "tokens") and encoder.tokenizer.eos_token is not None:
            found.append(encoder.tokenizer.eos_token)
    return tuple(dict.fromkeys(found))


def without_end(encoder: Encoder, formats: Iterable[str], times: int) -> str:
    """Returns a sentence if answers of these formats end with no token, or an empty text. `times`
    is how often the chat template has left one so.
    """
    is_framed = any(
        encoder.template_use(name) == "none" and name not in ("segments", "tokens")
        for name in formats
    )
    if is_framed and encoder.tokenizer.eos_token_id is None:
        return NO_EOS
    if not times:
        return ""
    behind = encoder.renderer.ends.text
    answers = f"{NO_END} ({counted(times, 'answer')})"
    if MARK.fullmatch(behind):
        return (
            f"{answers}: this tokenizer reads {behind} as text; name it in data.add_tokens, or use "
            "a model that has it."
        )
    return f"{answers}; use a model whose chat template ends an answer with a token."


def seen_ends(split: Split, tokenizer: Any, max_seq_len: int) -> tuple[str, ...]:
    """Returns the special tokens behind which nothing more of an answer is trained, in the first
    documents of `split`. Of documents that are trained throughout, nothing marks where an answer
    ends.
    """
    documents = min(len(split.starts) - 1, _MOST_DOCUMENTS)
    documents = min(documents, int(np.searchsorted(split.starts, _MOST_TOKENS, "right")) - 1)
    if documents < 1:
        return ()
    starts = np.asarray(split.starts[: documents + 1])
    ids, loss_mask = np.asarray(split.ids[: starts[-1]]), np.asarray(split.loss_mask[: starts[-1]])
    lengths = np.diff(starts)
    is_last = np.zeros(len(ids), dtype=bool)
    is_last[starts[1:] - 1] = True
    ends = loss_mask & (is_last | ~np.append(loss_mask[1:], False))
    # The last token of a document that was cut ends nothing.
    ends[starts[1:][lengths >= max_seq_len] - 1] = False
    throughout = np.add.reduceat(loss_mask, starts[:-1], dtype=np.int64) >= lengths - 1
    ends &= ~np.repeat(throughout, lengths)
    numbers, times = np.unique(ids[ends], return_counts=True)
    added = tokenizer.added_tokens_decoder
    special = {number for number, token in added.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    found = [number for number in numbers[np.argsort(-times)].tolist() if number in special]
    return tuple(tokenizer.convert_ids_to_tokens(found))


def ids_of(tokenizer: Any, tokens: Iterable[str]) -> list[int]:
    """Returns the ids of tokens, in their order. A text that is no token of the tokenizer has
    none.
    """
    known = tokenizer.get_vocab()
    return [known[token] for token in tokens if token in known]


def ends_of_run(summary: Mapping[str, Any], config: DataConfig, tokenizer: Any) -> tuple[str, ...]:
    """Returns the tokens that a run has trained to end an answer, from the summary of its data. A
    damaged record does not have them; then they are what the chat template writes. Raises DataError
    for a template that exceeds its limits.
    """
    if ENDS in summary:
        return tuple(map(str, summary[ENDS]))
    formats = str(summary.get("format", "")).split(", ")
    return written_ends(Encoder.of(config, tokenizer), filter(None, formats))
