"""The ids of segments, and which of them are trained, by the slow way: what stands between tokens
is tokenized piece by piece, and the bytes of each token are found by its spelling.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Container

from transformers import PreTrainedTokenizerFast

from tests.support.references.family import Family, Segment
from tests.support.references.tokenizers_of_families import plain_tokenizer

_plain = functools.cache(plain_tokenizer)
_WHITE_SPACE = "".join(
    c for c in map(chr, range(0x3001)) if c.isspace() and c not in "\x1c\x1d\x1e\x1f"
)
"""What Unicode calls white space, and so the tokenizer; Python counts four separators of
information in as well.
"""


def tokens(
    family: Family,
    made: PreTrainedTokenizerFast,
    parts: list[Segment],
    answers: Container[int],
) -> tuple[list[int], list[bool]]:
    """Returns the ids of the segments, and whether each is trained: those of `answers` are."""
    ids: list[int] = []
    trained: list[bool] = []
    run: list[tuple[str, bool]] = []
    swallow = False
    for part in [*parts, None]:
        if part is not None and not part.written:
            text = unicodedata.normalize("NFC", part.text) if family.composed else part.text
            if swallow:
                stripped = text.lstrip(_WHITE_SPACE)
                swallow, text = not stripped, stripped
            run += [(character, part.answer in answers) for character in text]
            continue
        _read(family, run, ids, trained)
        run = []
        if part is not None:
            ids.append(made.convert_tokens_to_ids(part.text))
            trained.append(part.answer in answers)
            swallow = family.swallows and part.text.startswith("<|")
    if trained:
        trained[0] = False
    return ids, trained


def _read(family: Family, run: list[tuple[str, bool]], ids: list[int], trained: list[bool]) -> None:
    if not run:
        return
    made = _plain(family)
    found = made("".join(c for c, _ in run), add_special_tokens=False, split_special_tokens=True)[
        "input_ids"
    ]
    # The space that some put before a run belongs to the character behind it.
    prefix = "▁".encode() if family.pieces == "prefixed" else b""
    marks: list[bool] = [run[0][1]] * len(prefix)
    text = prefix
    for character, mark in run:
        by_bytes = family.pieces == "bytes"
        spelled = (character if by_bytes else character.replace(" ", "▁")).encode()
        text += spelled
        marks += [mark] * len(spelled)
    at = 0
    for token, i in zip(made.convert_ids_to_tokens(found), found):
        spelled = spelling(family, token)
        assert text[at : at + len(spelled)] == spelled, "the reference lost its place"
        ids.append(i)
        trained.append(any(marks[at : at + len(spelled)]))
        at += len(spelled)
    assert at == len(text)


def read_back(family: Family, made: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """Returns the text of ids, token by token."""
    names = {*family.special, *family.added}
    spelled = b"".join(
        token.encode() if token in names else spelling(family, token)
        for token in made.convert_ids_to_tokens(ids)
    ).decode()
    return spelled if family.pieces == "bytes" else spelled.replace("▁", " ")


_BYTE_OF = {}
for _byte in range(256):
    _kept = 33 <= _byte <= 126 or 161 <= _byte <= 172 or 174 <= _byte <= 255
    _BYTE_OF[chr(_byte) if _kept else chr(256 + sum(1 for c in _BYTE_OF if ord(c) >= 256))] = _byte


def spelling(family: Family, token: str) -> bytes:
    """Returns the bytes that a token of text stands for."""
    if family.pieces == "bytes":
        return bytes(_BYTE_OF[c] for c in token)
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
    return bytes([int(byte[1], 16)]) if byte else token.encode()
