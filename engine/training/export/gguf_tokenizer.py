"""The vocabulary of a GGUF file: tokens, merges, how a text is divided before they apply, and which
tokens begin and end a text, as llama.cpp reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.data.tokens.trained_ends import ids_of
from engine.errors import RunError
from engine.training.export.gguf_known import OTHER_TOKENIZER, divided_by_name

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Kinds of tokens (gguf.TokenType)."""
_CONTROLLING = re.compile(r"<\|.*\|>", re.DOTALL)
"""llama.cpp takes tokens of such names for controlling ones, whatever the file says."""
_MODEL = "gpt2"
"""llama.cpp's name for pairs of bytes that are merged."""


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file has of a tokenizer."""

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    divided_by: str
    begins: int | None
    """Token that begins a text, if there is one."""
    is_begun: bool
    """That token is put before each text."""
    ends: int | None
    pad: int | None
    template: str | None

    def write(self, writer: Any) -> None:
        """Adds it to the metadata of a file. writer: gguf.GGUFWriter."""
        writer.add_tokenizer_model(_MODEL)
        writer.add_tokenizer_pre(self.divided_by)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        writer.add_token_merges(self.merges)
        if self.begins is not None:
            writer.add_bos_token_id(self.begins)
        if self.ends is not None:
            writer.add_eos_token_id(self.ends)
        if self.pad is not None:
            writer.add_pad_token_id(self.pad)
        writer.add_add_bos_token(self.is_begun)
        if self.template:
            writer.add_chat_template(self.template)


def vocabulary(tokenizer: Any, rows: int, ends: Sequence[str] = ()) -> Vocabulary:
    """Returns the vocabulary of a tokenizer, for an embedding of so many `rows`. ends: ids of the
    tokens that were trained to end an answer; the first of them ends one in the file.

    Raises RunError for a tokenizer that llama.cpp would not follow token by token.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    divided_by = divided_by_name(content)
    if divided_by is None:
        raise RunError(OTHER_TOKENIZER)
    model = content["model"]
    by_id = {number: token for token, number in model["vocab"].items()}
    kinds = dict.fromkeys(by_id, _NORMAL)
    for added in content["added_tokens"]:
        by_id[added["id"]] = added["content"]
        is_control = added["special"] or _CONTROLLING.fullmatch(added["content"])
        kinds[added["id"]] = _CONTROL if is_control else _USER_DEFINED
    if len(by_id) > rows:
        raise RunError(
            f"The tokenizer has {len(by_id):,} tokens and the model {rows:,}, so there is no GGUF "
            "file of it; export a folder."
        )
    merges = [" ".join(pair) for pair in model["merges"]]
    trained = ids_of(tokenizer, ends)
    begins = tokenizer.bos_token_id
    return Vocabulary(
        # A row without a token has a name of its own, which no text contains.
        [by_id.get(number, f"[PAD{number}]") for number in range(rows)],
        [kinds.get(number, _UNUSED) for number in range(rows)],
        merges,
        divided_by,
        begins,
        begins is not None and tokenizer("a")["input_ids"][:1] == [begins],
        trained[0] if trained else tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    )
