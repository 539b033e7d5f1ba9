"""The vocabulary of a GGUF file: tokens, merges or scores, how a text is divided before they apply,
and which tokens begin and end a text, as llama.cpp reads them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.data.tokens.trained_ends import ids_of
from engine.errors import RunError
from engine.training.export.gguf_known import (
    PIECES,
    SPACE,
    TokenizerKind,
    kind_of_tokenizer,
    refusal_of_tokenizer,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens (gguf.TokenType)."""
_CONTROLLING = re.compile(r"<\|.*\|>", re.DOTALL)
"""llama.cpp takes tokens of such names for controlling ones, whatever the file says."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_UNMERGED = -1e9
"""Score of pieces that no merge makes: any other is merged before."""


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file has of a tokenizer."""

    read_as: TokenizerKind
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    scores: list[float]
    """Of pieces: the larger is merged first. Tokens of bytes have none."""
    adds_space: bool
    """A space is put before each text, also behind special tokens."""
    begins: int | None
    """Token that begins a text, if there is one."""
    is_begun: bool
    """That token is put before each text."""
    ends: list[int]
    """Tokens that end an answer, the trained one first."""
    pad: int | None
    unknown: int | None
    template: str | None

    def write(self, writer: Any) -> None:
        """Adds it to the metadata of a file. writer: gguf.GGUFWriter."""
        writer.add_tokenizer_model(self.read_as.model)
        writer.add_tokenizer_pre(self.read_as.divided_by)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        if self.read_as.model == PIECES:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.adds_space)
        else:
            writer.add_token_merges(self.merges)
        if self.begins is not None:
            writer.add_bos_token_id(self.begins)
        if self.ends:
            writer.add_eos_token_id(self.ends[0])
        if len(self.ends) > 1:
            writer.add_eot_token_id(self.ends[1])
        if self.pad is not None:
            writer.add_pad_token_id(self.pad)
        if self.unknown is not None:
            writer.add_unk_token_id(self.unknown)
        writer.add_add_bos_token(self.is_begun)
        if self.template:
            writer.add_chat_template(self.template)


def vocabulary(tokenizer: Any, rows: int, ends: Sequence[str] = ()) -> Vocabulary:
    """Returns the vocabulary of a tokenizer, for an embedding of so many `rows`. ends: ids of the
    tokens that were trained to end an answer.

    Raises RunError for a tokenizer that llama.cpp would not follow token by token.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    read_as = kind_of_tokenizer(content)
    if read_as is None:
        raise RunError(refusal_of_tokenizer(content))
    model = content["model"]
    known: dict[str, int] = model["vocab"]
    # The model has no vector for added tokens behind its last row, as for images in Gemma 3 1B.
    added_tokens = [added for added in content["added_tokens"] if added["id"] < rows]
    if max(known.values()) >= rows:
        raise RunError(
            f"The tokenizer has {len(tokenizer):,} tokens and the model {rows:,}, so there is no "
            "GGUF file of it; export a folder."
        )
    merges = [tuple(pair) for pair in model["merges"]]
    is_pieces = read_as.model == PIECES
    scores = _scores(known, merges) if is_pieces else {}
    if scores is None:
        raise RunError(refusal_of_tokenizer(content))
    # A row without a token has a name of its own, which no text contains.
    tokens = [f"[PAD{number}]" for number in range(rows)]
    kinds = [UNUSED] * rows
    for token, number in known.items():
        tokens[number], kinds[number] = token, NORMAL
        if is_pieces and _BYTE.fullmatch(token):
            kinds[number] = BYTE
    for added in added_tokens:
        number = added["id"]
        tokens[number] = added["content"]
        if added["special"] or _CONTROLLING.fullmatch(added["content"]):
            kinds[number] = CONTROL
        elif SPACE not in added["content"] or added["content"] not in scores:
            kinds[number] = USER_DEFINED  # but spaces are merged, as the tokenizer does
    unknown = known.get(model.get("unk_token") or "") if is_pieces else None
    if unknown is not None:
        kinds[unknown] = UNKNOWN
    begins = tokenizer.bos_token_id
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    own_end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Vocabulary(
        read_as,
        tokens,
        kinds,
        [] if is_pieces else [" ".join(pair) for pair in merges],
        [scores.get(token, _UNMERGED) for token in tokens] if is_pieces else [],
        # A chat template begins with a special token, behind which llama.cpp would add a space that
        # the tokenizer adds at the very start alone.
        read_as.space == "always" or (read_as.space == "first" and not template),
        begins,
        begins is not None and tokenizer("a")["input_ids"][:1] == [begins],
        list(dict.fromkeys([*ids_of(tokenizer, ends), *own_end])),
        tokenizer.pad_token_id,
        unknown,
        template,
    )


def _scores(known: Mapping[str, int], merges: Sequence[tuple[str, ...]]) -> dict[str, float] | None:
    """Returns the scores of the pieces that merges make. llama.cpp merges any two pieces that are
    one together, the one with the largest score first.

    Returns None if some of these merges are not among those of the tokenizer.
    """
    scores: dict[str, float] = {}
    ways: Counter[str] = Counter()
    for rank, (left, right) in enumerate(merges):
        piece = left + right
        ways[piece] += 1
        scores.setdefault(piece, -float(rank))
    for piece, count in ways.items():
        cuts = range(1, len(piece))
        if sum(piece[:cut] in known and piece[cut:] in known for cut in cuts) != count:
            return None
    return scores
