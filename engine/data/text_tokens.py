"""`TextTokens` tokenises texts, in bounded memory and whatever a text holds."""

from __future__ import annotations

import functools
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.data.render import ChatRenderer
from engine.examples.example import Text
from engine.sources.text_files import CONTEXT, cut_place

Encoding = tuple[list[int], list[tuple[int, int]]]
"""Token ids, and the characters [start, end) that each token covers."""
_FEWEST_CHARACTERS = 1 << 16
_CHARACTERS_A_TOKEN = 16
"""A text has fewer characters per token than this, or more of it must be read."""
_MARGIN = 64
"""The last tokens of a text that was cut may differ from those of the whole text."""
_LONGEST_PIECE = 1 << 14
"""A whole text is tokenised in pieces of at most so many characters."""
_AT_ONCE = 1 << 18
"""The tokenizer is given so many characters of whole texts at a time."""


@dataclass(frozen=True)
class Piece:
    """A `Piece` of a text has the characters around it, so that its tokens are those that it has in
    the text.
    """

    before: str
    text: str
    after: str

    @property
    def with_context(self) -> str:
        return self.before + self.text + self.after


class TextTokens:
    """Tokenises texts with `tokenizer`, as far as a document of `max_seq_len` tokens needs them.

    A tokenizer takes some 200 bytes of memory for each character. So of a text that is much longer
    than a row, only as much is tokenised as fills the row.
    """

    def __init__(self, tokenizer: Any, renderer: ChatRenderer, max_seq_len: int):
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._enough = max_seq_len + _MARGIN
        self._most = max(_FEWEST_CHARACTERS, _CHARACTERS_A_TOKEN * max_seq_len)

    def plain(self, texts: list[str]) -> list[Encoding | None]:
        """Returns the tokens of as much of each text as fills a row, or None where the tokenizer
        fails. A single call for many texts lets the library use several threads.
        """
        found: list[Encoding | None] = [None] * len(texts)
        is_long = [len(text) > self._most for text in texts]
        at_once = [place for place, long in enumerate(is_long) if not long]
        for place, encoding in zip(at_once, self._call([texts[place] for place in at_once])):
            found[place] = encoding
        for place, text in enumerate(texts):
            if is_long[place]:
                found[place] = self._beginning(text, self._plainly)
        return found

    def whole(self, texts: list[Text]) -> list[np.ndarray | None]:
        """Returns all tokens of each text, int32[T], or None where the tokenizer fails. They are
        the tokens that the tokenizer gives for the text as one, as long as no word of it (what the
        tokenizer divides a text into) is longer than `CONTEXT` characters; at longer words a text
        may be divided, and nothing of it is lost.
        """
        found: list[list[np.ndarray] | None] = [[] for _ in texts]
        waiting: list[tuple[int, Piece]] = []
        characters = 0
        for place, text in enumerate(texts):
            for piece in pieces(text):
                waiting.append((place, piece))
                characters += len(piece.text)
                if characters >= _AT_ONCE:
                    self._read(waiting, found)
                    waiting, characters = [], 0
        self._read(waiting, found)
        return list(map(_joined, found))

    @functools.cached_property
    def _words(self) -> WordTokens | None:
        return WordTokens.of(self._tokenizer.backend_tokenizer)

    def _read(self, waiting: list[tuple[int, Piece]], found: list[list[np.ndarray] | None]) -> None:
        """Adds the tokens of each piece to those of its text."""
        known: list[np.ndarray | None] = [None] * len(waiting)
        if self._words is not None:
            known = [self._words.of_piece(piece) for _, piece in waiting]
        others = [piece for (_, piece), ids in zip(waiting, known) if ids is None]
        encodings = iter(self._encodings([piece.with_context for piece in others]))
        for (place, piece), of_words in zip(waiting, known):
            ids = self._own(piece, next(encodings)) if of_words is None else of_words
            of_text = found[place]
            if ids is None:
                found[place] = None
            elif of_text is not None:
                of_text.append(ids)

    def _own(self, piece: Piece, encoding: Any) -> np.ndarray | None:
        """Returns the tokens of the piece itself, int32[T]: those that begin in it. Where a token
        reaches over one of its ends, it is tokenised without what is beyond, so that its tokens
        are all of its characters and no others.
        """
        while encoding is not None:
            first = len(piece.before)
            begin, clean_begin = _border(encoding, first, range(len(encoding)))
            last = first + len(piece.text)
            end, clean_end = _border(encoding, last, range(len(encoding) - 1, -1, -1))
            if piece.before and not clean_begin:
                piece = Piece("", piece.text, piece.after)
            elif piece.after and not clean_end:
                piece = Piece(piece.before, piece.text, "")
            else:
                own = slice(begin if piece.before else None, end if piece.after else None)
                return np.asarray(encoding.ids[own], dtype=np.int32)
            (encoding,) = self._encodings([piece.with_context])
        return None

    def typed(self, text: str) -> Encoding | None:
        """Returns the tokens of as much of a text with stand-ins (`special.py`) as fills a row, or
        None where the tokenizer fails.
        """
        return self._beginning(text, self._with_stand_ins)

    def _beginning(self, text: str, read: Any) -> Encoding | None:
        """Returns the tokens of as much of a text as fills a row."""
        characters = self._most
        while True:
            encoding = read(text[:characters])
            if encoding is None or characters >= len(text) or len(encoding[0]) >= self._enough:
                return encoding
            characters *= 2

    def _plainly(self, text: str) -> Encoding | None:
        return self._call([text])[0]

    def _with_stand_ins(self, text: str) -> Encoding | None:
        try:
            return self._renderer.control.encode(text)
        except BaseException as error:
            if not _is_panic(error):
                raise
            return None

    def _call(self, texts: list[str]) -> list[Encoding | None]:
        return list(map(_with_offsets, self._encodings(texts)))

    def _encodings(self, texts: list[str]) -> list[Any | None]:
        """Returns what the tokenizers library tells of each text, or None where it fails."""
        if not texts:
            return []
        try:
            batch = self._tokenizer(
                texts, add_special_tokens=False, split_special_tokens=False, verbose=False
            )
        except BaseException as error:
            if not _is_panic(error):
                raise
            if len(texts) == 1:
                return [None]
            return [self._encodings([text])[0] for text in texts]
        return list(batch.encodings)


def _with_offsets(encoding: Any | None) -> Encoding | None:
    return None if encoding is None else (encoding.ids, encoding.offsets)


def _joined(ids: list[np.ndarray] | None) -> np.ndarray | None:
    """Returns the tokens of all pieces of a text, int32[T], or None where the tokenizer failed."""
    return None if ids is None else np.concatenate([np.empty(0, np.int32), *ids])


def _border(encoding: Any, place: int, tokens: range) -> tuple[int, bool]:
    """Returns the first token that begins at the character `place` or behind it, and whether no
    token reaches over that place. `tokens` are all tokens, from the end that is nearer to it. Some
    tokenizers trim white space from the bounds, so a token begins where the one before it ends.
    """
    is_clean = True
    found = 0 if tokens.step < 0 else len(tokens)
    for token in tokens:
        begin, end = encoding.token_to_chars(token)
        if token:
            begin = min(begin, encoding.token_to_chars(token - 1)[1])
        is_clean &= not begin < place < end
        if tokens.step > 0 and begin >= place:
            return token, is_clean
        if tokens.step < 0 and begin < place:
            return token + 1, is_clean
    return found, is_clean


def _is_panic(error: BaseException) -> bool:
    """Returns whether the tokenizers library failed in Rust. Its error is no `Exception`, and its
    class can only be known by name.
    """
    return type(error).__name__ == "PanicException"


def pieces(text: Text) -> Iterator[Piece]:
    """Divides a text into pieces of at most `_LONGEST_PIECE` characters, between words if it can
    (`cut_place`).
    """
    whole, before = text.text, text.before
    begin = 0
    while len(whole) - begin > _LONGEST_PIECE:
        end = cut_place(whole, begin, begin + _LONGEST_PIECE)
        after = (whole[end : end + CONTEXT] + text.after)[:CONTEXT]
        yield Piece(before, whole[begin:end], after)
        before = whole[max(0, end - CONTEXT) : end]
        begin = end
    yield Piece(before, whole[begin:], text.after)


# ---------------------------------------------------------------------- word by word

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""This pattern divides texts for a byte-level tokenizer that names no other."""
_PARTS_OF_PATTERNS = re.compile(r"\\p\{(\w+)\}|\\.|\[|\]", re.DOTALL)
_TRIAL = "a?a? ?1?1 ?.?. \n?\n ?  ?'?s'?r'r?'?e'v?'?l'l? ??\t? \r?"
"""Each character is tried in the places of `?`."""
_MOST_WORDS = 1 << 18
_LONGEST_KEPT = 64


class WordTokens:
    """A `WordTokens` looks up the tokens of a text word by word, in a fifth of the time that the
    tokenizer takes.

    A byte-level tokenizer divides a text into words by a pattern, and makes tokens of each word by
    itself. Here Python divides the text, and the tokenizer is asked once for each different word.
    The pattern is tried with each character that comes up, among characters of other kinds. A text
    with a character at which Python divides otherwise is left to the tokenizer, and so is a text
    with special tokens.
    """

    def __init__(self, backend: Any, pattern: re.Pattern[str], tree: dict[str, Any]):
        self._backend = backend
        self._pattern = pattern
        self._normalized = tree["normalizer"] is not None
        added = [re.escape(token["content"]) for token in tree["added_tokens"]]
        self._added = re.compile("|".join(added) or "(?!)")
        self._ids = _TokensOfWords(backend.model)
        self._alike: set[str] = set()
        self._other: set[str] = set()

    @classmethod
    def of(cls, backend: Any) -> WordTokens | None:
        """Returns it for a tokenizer of the tokenizers library, or None for one that does not work
        like this.
        """
        tree = json.loads(backend.to_str())
        pattern = _pattern_of(tree)
        if pattern is None:
            return None
        try:
            compiled = re.compile(_in_python(pattern))
        except re.error:
            return None
        return None if compiled.groups else cls(backend, compiled, tree)

    def of_piece(self, piece: Piece) -> np.ndarray | None:
        """Returns the tokens of the piece itself, int32[T], or None where the tokenizer must be
        asked.
        """
        text = piece.with_context
        if not self._alike.issuperset(text) and not self._are_alike(set(text)):
            return None
        is_normalized = not self._normalized or unicodedata.is_normalized("NFC", text)
        if not is_normalized or self._added.search(text):
            return None
        words = self._pattern.findall(text)
        begin, is_clean = _first_words(words, len(piece.before))
        behind, is_clean_too = _first_words(reversed(words), len(piece.after))
        if not is_clean or not is_clean_too or "".join(words) != text:
            return None
        own = words[begin : len(words) - behind]
        found = b"".join(map(self._ids.__getitem__, own))
        if len(self._ids) > _MOST_WORDS:
            self._ids.clear()
        return np.frombuffer(found, dtype=np.int32)

    def _are_alike(self, characters: set[str]) -> bool:
        for character in characters - self._alike - self._other:
            trial = _TRIAL.replace("?", character)
            here = [_as_letters(word) for word in self._pattern.findall(trial)]
            there = [word for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(trial)]
            (self._alike if here == there else self._other).add(character)
        return characters.isdisjoint(self._other)


class _TokensOfWords(dict[str, bytes]):
    """The bytes of the token ids of each word that has come up, int32[T]."""

    def __init__(self, model: Any):
        super().__init__()
        self._model = model

    def __missing__(self, word: str) -> bytes:
        tokens = self._model.tokenize(_as_letters(word))
        ids = np.array([token.id for token in tokens], dtype=np.int32).tobytes()
        if len(word) <= _LONGEST_KEPT:
            self[word] = ids
        return ids


def _as_letters(word: str) -> str:
    """Returns the bytes of a word in the letters of byte-level tokenizers."""
    return word.encode().decode("latin-1").translate(_letters_of_bytes())


@functools.cache
def _letters_of_bytes() -> dict[int, int]:
    """Returns the letters for the bytes that are not written as the characters of their number."""
    others = [*range(33), *range(127, 161), 173]
    return {byte: 256 + place for place, byte in enumerate(others)}


def _first_words(words: Iterable[str], characters: int) -> tuple[int, bool]:
    """Returns how many words begin within so many characters, and whether a word ends there."""
    count = 0
    for word in words:
        if characters <= 0:
            break
        characters -= len(word)
        count += 1
    return count, characters == 0


def _pattern_of(tree: dict[str, Any]) -> str | None:
    """Returns the pattern of a byte-level tokenizer, or None for any other. `tree` is what its file
    holds.
    """
    model, steps = tree["model"], tree["pre_tokenizer"] or {}
    changes = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] != "BPE" or any(model.get(name) for name in changes):
        return None
    *before, last = steps.get("pretokenizers", [steps])
    is_byte_level = last.get("type") == "ByteLevel" and not last["add_prefix_space"]
    if not is_byte_level or tree["normalizer"] not in (None, {"type": "NFC"}):
        return None
    if not before:
        return _GPT2 if last["use_regex"] else None
    split = before[0]
    is_isolated = split.get("behavior") == "Isolated" and not split.get("invert")
    if len(before) > 1 or last["use_regex"] or not is_isolated:
        return None
    return split["pattern"].get("Regex")


def _in_python(pattern: str) -> str:
    r"""Returns a pattern with the classes of Unicode (`\p{L}`) written out, as Python needs it."""
    is_inside = False

    def written(part: re.Match[str]) -> str:
        nonlocal is_inside
        if part[0] in ("[", "]"):
            is_inside = part[0] == "["
        if part[1] is None:
            return part[0]
        return _class(part[1]) if is_inside else f"[{_class(part[1])}]"

    return _PARTS_OF_PATTERNS.sub(written, pattern)


@functools.cache
def _class(name: str) -> str:
    """Returns the ranges of the characters of a class of Unicode, up to U+FFFF: Python is slow with
    more of them, and further characters are tried like all others.
    """
    is_in = [unicodedata.category(chr(code)).startswith(name) for code in range(1 << 16)]
    found = []
    for belongs, codes in itertools.groupby(range(1 << 16), is_in.__getitem__):
        if belongs:
            run = list(codes)
            found.append(f"\\u{run[0]:04x}-\\u{run[-1]:04x}")
    return "".join(found)
