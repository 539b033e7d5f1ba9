"""Special tokens that a person typed stay text: what a template wrote and what somebody said are told apart.

While a template runs, private-use characters stand in for the special tokens in what people said. Such a text is then
read by a copy of the tokenizer in which the special tokens have other names: the template's are given these names, the
typed ones are plain text there, and everything else (normalizer, merges, prefix spaces) is the tokenizer's own.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

import numpy as np

_FIRST_LITERAL = 0x108000
"""Private-use characters from here on stand in for special tokens, as many again name them in the copy."""


class ReservedText(Exception):
    """Text that holds one of the characters that stand in for special tokens."""


class SpecialTokens:
    """The special tokens of a fast tokenizer, in text that a template writes around what people said."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special and str(t)}
        special |= set(tokenizer.all_special_tokens)
        self.tokens = tuple(sorted(special, key=lambda token: (-len(token), token)))
        count = len(self.tokens)
        self._stand_ins = [chr(_FIRST_LITERAL + k) for k in range(count)]
        self._names = {token: chr(_FIRST_LITERAL + count + k) for k, token in enumerate(self.tokens)}
        last = chr(_FIRST_LITERAL + max(1, 2 * count) - 1)
        self._reserved = re.compile(f"[{chr(_FIRST_LITERAL)}-{last}]")
        self._written = re.compile("|".join(map(re.escape, self.tokens)) or r"(?!)")
        self._either = re.compile("|".join(map(re.escape, (*self._stand_ins, *self.tokens))) or r"(?!)")
        self._ids = np.array(sorted(set(tokenizer.convert_tokens_to_ids(list(self.tokens)))), dtype=np.int64)
        added = [t for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._takes_space = any(t.lstrip or t.rstrip for t in added)

    def stand_in(self, value: Any) -> Any:
        """A person's value, however deeply nested, with every special token in its texts replaced by its stand-in.
        Raises ReservedText for text that holds such a character already."""
        if isinstance(value, dict):
            return {self.stand_in(key): self.stand_in(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.stand_in(item) for item in value]
        if not isinstance(value, str):
            return value
        if not value.isascii() and self._reserved.search(value):
            raise ReservedText
        return self._written.sub(lambda match: self._stand_ins[self.tokens.index(match[0])], value)

    def stands_in(self, text: str) -> bool:
        """Whether a character of `text` stands in for a special token."""
        return not text.isascii() and self._reserved.search(text) is not None

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a rendered text with stand-ins, and the characters of `text` that each covers."""
        parts: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        position = 0
        for match in self._either.finditer(text):
            parts.append(text[position:match.start()])
            starts.extend(range(position, match.start()))
            ends.extend(range(position + 1, match.start() + 1))
            found = match[0]
            inside = self.tokens[ord(found) - _FIRST_LITERAL] if found in self._stand_ins else self._names[found]
            parts.append(inside)
            starts.extend([match.start()] * len(inside))
            ends.extend([match.end()] * len(inside))
            position = match.end()
        parts.append(text[position:])
        starts.extend(range(position, len(text)))
        ends.extend(range(position + 1, len(text) + 1))
        copy, renumbered = self._copy
        encoding = copy.encode("".join(parts), add_special_tokens=False)
        bounds = [(starts[a], ends[b - 1]) if a < b else (ends[b - 1], ends[b - 1]) if b else (0, 0)
                  for a, b in encoding.offsets]
        return [renumbered.get(i, i) for i in encoding.ids], bounds

    def without_space(self, text: str, ids: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """`bounds` (int64[T, 2]) with the white space given back that special tokens took from around them."""
        if not self._takes_space:
            return bounds
        bounds = bounds.copy()
        for place in np.flatnonzero(np.isin(ids, self._ids)):
            start, end = bounds[place]
            covered = text[start:end]
            bounds[place] = end - len(covered.lstrip()), start + len(covered.rstrip())
        return bounds

    @cached_property
    def _copy(self) -> tuple[Any, dict[int, int]]:
        """The tokenizer with its special tokens renamed, and its ids that differ from the original's."""
        from tokenizers import Tokenizer

        tree = json.loads(self.tokenizer.backend_tokenizer.to_str())
        tree["truncation"] = tree["padding"] = None
        added = [(token["content"], token["id"]) for token in tree["added_tokens"]]
        for token in tree["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        model = tree["model"]
        names = self._names
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"]
                               if (merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)) not in names]
        copy = Tokenizer.from_str(json.dumps(tree))
        renumbered = {copy.token_to_id(names.get(content, content)): i for content, i in added}
        return copy, {ours: theirs for ours, theirs in renumbered.items() if ours != theirs}
