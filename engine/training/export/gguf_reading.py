"""How llama.cpp reads a text with the vocabulary of a GGUF file (llama-vocab.cpp): special tokens
are found first, the longest before others, and what is between them is merged. Nothing else is done
to a text, whatever the tokenizer of the model does.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from engine.training.export.gguf_known import BYTE_PAIRS, PATTERNS, SPACE
from engine.training.export.gguf_tokenizer import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary


class GgufReading:
    """Reads texts with a vocabulary."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._ids = {token: number for number, token in enumerate(vocabulary.tokens)}
        kinds = zip(vocabulary.tokens, vocabulary.kinds)
        found = [token for token, kind in kinds if kind in (CONTROL, USER_DEFINED, UNKNOWN)]
        self._special = sorted(found, key=len, reverse=True)
        is_bytes = vocabulary.read_as.model == BYTE_PAIRS
        self._byte_pairs = _byte_pairs(vocabulary, self._ids) if is_bytes else None

    @property
    def begins(self) -> list[int]:
        """Tokens that begin each text."""
        begins = self._vocabulary.begins
        return [begins] if self._vocabulary.is_begun and begins is not None else []

    def tokens_of(self, text: str) -> list[int]:
        """Returns the tokens of a text, without one that begins it."""
        ids: list[int] = []
        is_behind_special = True
        for part in self._parts(text):
            if isinstance(part, int):
                ids.append(part)
            elif self._byte_pairs is not None:
                ids += self._byte_pairs.encode(part, add_special_tokens=False).ids
            else:
                adds_space = self._vocabulary.adds_space and is_behind_special
                ids += self._pieces(f" {part}" if adds_space else part)
            is_behind_special = isinstance(part, int)
        return ids

    def _parts(self, text: str) -> list[str | int]:
        """Returns the special tokens of a text, and the texts between them."""
        parts: list[str | int] = [text]
        for token in self._special:
            if token in text:
                parts = [part for whole in parts for part in self._divided(whole, token)]
        return parts

    def _divided(self, whole: str | int, token: str) -> Iterator[str | int]:
        if isinstance(whole, int):
            yield whole
            return
        for place, part in enumerate(whole.split(token)):
            if place:
                yield self._ids[token]
            if part:
                yield part

    def _pieces(self, text: str) -> list[int]:
        """Returns the tokens of a text by pieces: of all neighbors that are a token together, those
        with the largest score are merged first, and of equal ones the leftmost.
        """
        pieces = list(text.replace(" ", SPACE))
        before, after = list(range(-1, len(pieces) - 1)), list(range(1, len(pieces) + 1))
        after[-1:] = [-1]
        scores = self._vocabulary.scores
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                together = pieces[left] + pieces[right]
                number = self._ids.get(together)
                if number is not None:
                    heapq.heappush(queue, (-scores[number], left, right, together))

        for place in range(1, len(pieces)):
            offer(place - 1, place)
        while queue:
            _, left, right, together = heapq.heappop(queue)
            is_there = pieces[left] and pieces[right]
            if not is_there or pieces[left] + pieces[right] != together:
                continue  # one of them was merged with another
            pieces[left], pieces[right] = together, ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [number for piece in pieces if piece for number in self._of_piece(piece)]

    def _of_piece(self, piece: str) -> list[int]:
        if piece in self._ids:
            return [self._ids[piece]]
        unknown = self._vocabulary.unknown or 0
        return [self._ids.get(f"<0x{byte:02X}>", unknown) for byte in piece.encode()]


def _byte_pairs(vocabulary: Vocabulary, ids: dict[str, int]) -> Any:
    """Returns a tokenizer that divides texts by the name in a file, and merges as the file says."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    name = vocabulary.read_as.divided_by
    merges: Any = [tuple(pair.split(" ")) for pair in vocabulary.merges]
    # It takes whole words that are tokens, without merging them.
    found = Tokenizer(models.BPE(ids, merges, ignore_merges=name == "llama-bpe"))
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name not in PATTERNS)
    steps: list[Any] = [own]
    if name in PATTERNS:
        steps = [pre_tokenizers.Split(Regex(PATTERNS[name]), "isolated"), own]
    if name == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), own]
    found.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return found
