"""`ControlTokens` separates control tokens written by a template from those that a person typed,
which stay text.

- Control tokens are the tokens that the tokenizer calls special, and those of its other added
  tokens that the chat template writes or mentions: in some tokenizers, role markers are added
  tokens but not special. White space, words and single characters are text, even if they are added
  tokens and the template writes them.
- In turns of users, systems and tools, every control token is text. In answers, only the special
  ones are text. A model writes the others itself, such as <think> or <tool_call>, so they stay
  tokens.
- The tokens of `data.add_tokens` are tokens, no matter who wrote them: they were added for that.
- While a template runs, private-use characters stand in for the control tokens that must become
  text.
- A copy of the tokenizer with different names for the control tokens reads the result. Control
  tokens from the template are replaced by their new names; typed ones are plain text for the copy.
  Everything else (normalizer, merges, prefix spaces) is as in the original.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np

from engine.data.formats.example import Arguments
from engine.data.tokens.answer_spans import PROBES
from engine.data.tokens.chat_template import ChatTemplate
from engine.data.tokens.template_process import Chat

_ROLES = ("user", "assistant", "system", "tool")
_FIRST_LITERAL = 0x108000
"""Private-use characters from this one on stand in for control tokens, one for each. The same
number of characters after those serve as the names of control tokens in the copy.
"""
_MARK = re.compile(r"(?=..).*[^\w\s]", re.DOTALL)
"""Matches an added token that is more than a word, white space or a single character."""


class ReservedText(Exception):
    """Raised for a text with one of the characters that stand in for control tokens."""


class ControlTokens:
    """Encodes text that a template wrote around people's texts, and separates the control tokens of
    both.

    `tokenizer` is a fast tokenizer. `written` is the text that the template writes and mentions.
    Without a template it is empty, and only the special tokens are control tokens. Unless
    `typed_are_text`, what a person typed is read like the rest, as a server would. What is in
    `own` is read as a token, no matter who wrote it.
    """

    def __init__(
        self,
        tokenizer: Any,
        written: str = "",
        typed_are_text: bool = True,
        own: Collection[str] = (),
    ):
        self.tokenizer = tokenizer
        self._typed_are_text = typed_are_text
        added = [token for token in tokenizer.added_tokens_decoder.values() if str(token)]
        special = {str(token) for token in added if token.special}
        special |= set(tokenizer.all_special_tokens)
        special -= set(own)
        others = {
            str(token) for token in added if str(token) in written and _MARK.match(str(token))
        }
        others -= set(own)
        self.special = _longest_first(special)
        self.tokens = _longest_first(special | others)
        count = len(self.tokens)
        stand_ins = [chr(_FIRST_LITERAL + number) for number in range(count)]
        names = [chr(_FIRST_LITERAL + count + number) for number in range(count)]
        self._placeholders = dict(zip(self.tokens, stand_ins))
        """The stand-in of each control token."""
        self._names = dict(zip(self.tokens, names))
        """The name of each control token in the copy."""
        self._read_as = self._names | dict(zip(stand_ins, self.tokens))
        """What the copy reads in place of a control token (its name in the copy) and of a stand-in
        (the token's text).
        """
        last = chr(_FIRST_LITERAL + max(1, 2 * count) - 1)
        self._reserved = re.compile(f"[{chr(_FIRST_LITERAL)}-{last}]")
        self._in_answers = _any_of(self.special)
        self._elsewhere = _any_of(self.tokens)
        self._either = _any_of((*stand_ins, *self.tokens))
        ids = sorted(set(tokenizer.convert_tokens_to_ids(list(self.tokens))))
        self._ids = np.array(ids, dtype=np.int64)
        self._takes_space = any(
            token.lstrip or token.rstrip for token in added if str(token) in self._names
        )

    def placeholder(self, value: Any, answer: bool) -> Any:
        """Returns a person's value, however deeply nested, in which placeholders replace the
        control tokens that must become text. answer: the value is part of an answer, which the
        model learns to write. Raises ReservedText for text that already contains a placeholder.
        """
        if isinstance(value, Arguments):
            text = self.placeholder(value.text, answer)
            return Arguments(self.placeholder(dict(value), answer), text)
        if isinstance(value, dict):
            return {
                self.placeholder(key, answer): self.placeholder(item, answer)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.placeholder(item, answer) for item in value]
        if not isinstance(value, str):
            return value
        if not self._typed_are_text:
            return value
        if not value.isascii() and self._reserved.search(value):
            raise ReservedText
        found = self._in_answers if answer else self._elsewhere
        return found.sub(lambda match: self._placeholders[match[0]], value)

    def without_special(self, text: str) -> str:
        """Returns a text in which line ends replace the special tokens that the template wrote."""
        return self._in_answers.sub("\n", text)

    def is_placeholder(self, text: str) -> bool:
        """Returns whether `text` has a character that stands in for a control token."""
        if not self._typed_are_text or text.isascii():
            return False
        return self._reserved.search(text) is not None

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of a rendered text with stand-ins, and the characters [start, end) of
        `text` that each id covers.
        """
        # The copy reads a different text, so `starts` and `ends` map each of its characters to a
        # range in `text`.
        parts: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        position = 0
        for match in self._either.finditer(text):
            begin, end = match.span()
            parts.append(text[position:begin])
            starts.extend(range(position, begin))
            ends.extend(range(position + 1, begin + 1))
            read_as = self._read_as[match[0]]
            parts.append(read_as)
            starts.extend([begin] * len(read_as))
            ends.extend([end] * len(read_as))
            position = end
        parts.append(text[position:])
        starts.extend(range(position, len(text)))
        ends.extend(range(position + 1, len(text) + 1))
        copy, renumbered = self._copy
        encoding = copy.encode("".join(parts), add_special_tokens=False)
        bounds = []
        for first, after in encoding.offsets:
            # A token without characters is placed at the end of the character before it.
            end = ends[after - 1] if after else 0
            bounds.append((starts[first] if first < after else end, end))
        return [renumbered.get(token, token) for token in encoding.ids], bounds

    def without_space(self, text: str, ids: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Returns `bounds` (int64[T, 2], for the tokens `ids`, int32[T]) without the surrounding
        white space that control tokens have absorbed.
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
        """The copy of the tokenizer, with its control tokens renamed, and a map from ids in the
        copy to ids in the original where they differ.
        """
        from tokenizers import Tokenizer

        names = self._names
        tree = json.loads(self.tokenizer.backend_tokenizer.to_str())
        tree["truncation"] = None  # both are left over from an earlier use of the tokenizer
        tree["padding"] = None
        added = [(token["content"], token["id"]) for token in tree["added_tokens"]]
        for token in tree["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        _rename(tree["model"], names)
        copy = Tokenizer.from_str(json.dumps(tree))
        renumbered = {}
        for content, original in added:
            number = copy.token_to_id(names.get(content, content))
            if number is not None and number != original:
                renumbered[number] = original
        return copy, renumbered


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Renames tokens in the vocabulary and the merges of a tokenizer's model."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): i for token, i in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        # A merge whose result is a renamed token would make a token that no longer exists.
        model["merges"] = [merge for merge in model["merges"] if _merged(merge) not in names]


def _merged(merge: str | list[str]) -> str:
    """Returns the token that a merge makes. Tokenizers write a merge as "a b" or as ["a", "b"]."""
    return merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)


def written_by(template: ChatTemplate) -> str:
    """Returns the texts in a template's source, and the text that it writes around turns. Both are
    needed, because the template may compose a role's marker from fragments and the role's name.
    """
    turns = [{"role": role, "content": PROBES[0]} for role in _ROLES]
    chats = []
    for turn in turns:
        chats.append(Chat([turn]))
        chats.append(Chat([turns[0], turn]))
    texts = template.write(chats, generation=True)
    written = [text for text in texts if isinstance(text, str)]
    return "\n".join([*map(mentioned, template.sources), *written])


def mentioned(template: str) -> str:
    """Returns the texts in a chat template, both those that it writes and those that it compares
    with, without its code and comments. A template that cannot be parsed is returned whole.
    """
    from jinja2 import Environment, TemplateSyntaxError

    try:
        tokens = Environment().lex(template)
        return "\n".join(text for _, kind, text in tokens if kind in ("data", "string"))
    except TemplateSyntaxError:
        return template


def _longest_first(tokens: set[str]) -> tuple[str, ...]:
    """Sorts tokens so that a pattern of alternatives finds the longest one at each place."""
    return tuple(sorted(tokens, key=lambda token: (-len(token), token)))


def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern that matches each of `texts`, or nothing if `texts` is empty."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
