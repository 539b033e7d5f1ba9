"""Control tokens that a person typed stay text: what a template wrote and what somebody said are
told apart.

Control tokens are those that the tokenizer calls special, and of its other added tokens those that
the chat template writes or mentions: some tokenizers' role markers are added and not special. White
space, words and single characters are text, though they were added and the template writes them. In
what users, systems and tools say, every control token is text. In answers only the special ones
are: the others, such as <think> or <tool_call>, are what a model writes itself, and stay the tokens
that the tokenizer makes of them.

While a template runs, private-use characters stand in for the control tokens that are to be text.
Such a text is then read by a copy of the tokenizer in which the control tokens have other names:
the template's are given these names, the typed ones are plain text there, and everything else
(normalizer, merges, prefix spaces) is the tokenizer's own.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

import numpy as np

_FIRST_LITERAL = 0x108000
"""Private-use characters from here on stand in for control tokens, as many again name them in the
copy.
"""
_MARK = re.compile(r"(?=..).*[^\w\s]", re.DOTALL)
"""An added token that is more than a word, white space or a single character."""


class ReservedText(Exception):
    """Text that holds one of the characters that stand in for control tokens."""


class ControlTokens:
    """The control tokens of a fast tokenizer, in text that a template writes around what people
    said. `written` is what the template writes and mentions; without a template, only the special
    tokens are control tokens.
    """

    def __init__(self, tokenizer: Any, written: str = ""):
        self.tokenizer = tokenizer
        added = [token for token in tokenizer.added_tokens_decoder.values() if str(token)]
        special = {str(token) for token in added if token.special} | set(
            tokenizer.all_special_tokens
        )
        others = {
            str(token) for token in added if str(token) in written and _MARK.match(str(token))
        }
        self.special = _longest_first(special)
        self.tokens = _longest_first(special | others)
        count = len(self.tokens)
        self._stand_ins = [chr(_FIRST_LITERAL + k) for k in range(count)]
        self._names = {
            token: chr(_FIRST_LITERAL + count + k) for k, token in enumerate(self.tokens)
        }
        last = chr(_FIRST_LITERAL + max(1, 2 * count) - 1)
        self._reserved = re.compile(f"[{chr(_FIRST_LITERAL)}-{last}]")
        self._in_answers, self._elsewhere = _any_of(self.special), _any_of(self.tokens)
        self._either = _any_of((*self._stand_ins, *self.tokens))
        self._ids = np.array(
            sorted(set(tokenizer.convert_tokens_to_ids(list(self.tokens)))), dtype=np.int64
        )
        self._takes_space = any(
            token.lstrip or token.rstrip for token in added if str(token) in self._names
        )

    def stand_in(self, value: Any, answer: bool) -> Any:
        """A person's value, however deeply nested, with the control tokens in its texts that are to
        be text replaced by their stand-ins. `answer`: it is what the model is to say. Raises
        ReservedText for text that holds such a character already.
        """
        if isinstance(value, dict):
            return {
                self.stand_in(key, answer): self.stand_in(item, answer)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.stand_in(item, answer) for item in value]
        if not isinstance(value, str):
            return value
        if not value.isascii() and self._reserved.search(value):
            raise ReservedText
        found = self._in_answers if answer else self._elsewhere
        return found.sub(lambda match: self._stand_ins[self.tokens.index(match[0])], value)

    def stands_in(self, text: str) -> bool:
        """Whether a character of `text` stands in for a control token."""
        return not text.isascii() and self._reserved.search(text) is not None

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a rendered text with stand-ins, and the characters of `text` that each covers."""
        parts: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        position = 0
        for match in self._either.finditer(text):
            parts.append(text[position : match.start()])
            starts.extend(range(position, match.start()))
            ends.extend(range(position + 1, match.start() + 1))
            found = match[0]
            inside = (
                self.tokens[ord(found) - _FIRST_LITERAL]
                if found in self._stand_ins
                else self._names[found]
            )
            parts.append(inside)
            starts.extend([match.start()] * len(inside))
            ends.extend([match.end()] * len(inside))
            position = match.end()
        parts.append(text[position:])
        starts.extend(range(position, len(text)))
        ends.extend(range(position + 1, len(text) + 1))
        copy, renumbered = self._copy
        encoding = copy.encode("".join(parts), add_special_tokens=False)
        bounds = [
            (starts[a], ends[b - 1]) if a < b else (ends[b - 1], ends[b - 1]) if b else (0, 0)
            for a, b in encoding.offsets
        ]
        return [renumbered.get(i, i) for i in encoding.ids], bounds

    def without_space(self, text: str, ids: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """`bounds` (int64[T, 2]) with the white space given back that control tokens took from
        around them.
        """
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
        """The tokenizer with its control tokens renamed, and its ids that differ from the
        original's.
        """
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
            model["merges"] = [
                merge
                for merge in model["merges"]
                if (merge.replace(" ", "") if isinstance(merge, str) else "".join(merge))
                not in names
            ]
        copy = Tokenizer.from_str(json.dumps(tree))
        renumbered = {copy.token_to_id(names.get(content, content)): i for content, i in added}
        return copy, {ours: theirs for ours, theirs in renumbered.items() if ours != theirs}


def mentioned(template: str) -> str:
    """The texts that a chat template holds, be it to write them or to compare with them. Its code
    and comments are none; of a template that is broken, everything.
    """
    from jinja2 import Environment, TemplateSyntaxError

    try:
        return "\n".join(
            text for _, kind, text in Environment().lex(template) if kind in ("data", "string")
        )
    except TemplateSyntaxError:
        return template


def _longest_first(tokens: set[str]) -> tuple[str, ...]:
    return tuple(sorted(tokens, key=lambda token: (-len(token), token)))


def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
