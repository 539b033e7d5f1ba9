"""These kernels divide a text into words and look up the tokens of each. They release the
interpreter's lock.

Known words are in a hash table with open addressing: a slot has the place of a word's record, or 0.
A word is compared character by character, so words with the same hash are told apart. The record
also has the tokens of the word, so that a word that comes up costs few lines of the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types

from engine.data.dividing.automaton import DEAD, ENDS, START

OTHER, UNTRIED = 254, 255
"""A character of one of these classes stops the division: Python divides texts with it otherwise
than the tokenizer, or nobody has tried it.
"""
DONE, STOPPED, UNCLEAN = 0, 1, 2
"""What became of a text: it is divided; there is a character of the above classes in it; a word
reaches over a border, or a character belongs to no word.
"""
_CODES = types.Array(types.uint32, 1, "C", readonly=True)
_SLOTS, _RECORDS = types.int32[::1], types.uint32[::1]

HEADER = 2
"""The record of a word begins with the numbers of its characters and of its tokens; these follow.
"""
_BASIS, _PRIME = 14695981039346656037 - (1 << 64), 1099511628211
"""A word is hashed as FNV-1a does it, a character at a time, in signed integers that overflow."""
_SHIFT = 29
_signed: Any = np.int64
_unsigned: Any = np.uint64
"""A place of this type is not tested for counting from the end of an array."""


@njit(nogil=True)
def _words(
    codes: np.ndarray,
    own: tuple[int, int],
    automaton: tuple[np.ndarray, np.ndarray],
    last_slot: int,
    words: np.ndarray,
) -> tuple[int, int]:
    """Writes the words of a text, uint32[characters], between the two places `own` to `words`,
    int64[words, 3]: their first place, the place behind, and the slot where a search begins.

    Returns what became of the text, and the number of words (where it was stopped, the place of the
    character).
    """
    class_of, table = automaton
    length, end_of_text = len(codes), _unsigned(table.shape[1] - 1)
    dead = _unsigned(DEAD)
    count, begin = 0, 0
    while begin < length:
        state, place, end = _unsigned(START), begin, begin
        hashed = hashed_here = _BASIS
        while state != dead and place < length:
            code = codes[_unsigned(place)]
            kind = class_of[code]
            if kind >= OTHER:
                return STOPPED, place
            entry = table[state, kind]
            if entry & ENDS:
                end, hashed = place, hashed_here
            state = _unsigned(entry & (ENDS - 1))
            hashed_here = (hashed_here ^ _signed(code)) * _PRIME
            place += 1
        if state != dead and table[state, end_of_text] & ENDS:
            end, hashed = place, hashed_here
        if end == begin or begin < own[0] < end or begin < own[1] < end:
            return UNCLEAN, 0
        if own[0] <= begin < own[1]:
            words[count, 0], words[count, 1] = begin, end
            words[count, 2] = (hashed ^ (hashed >> _SHIFT)) & last_slot
            count += 1
        begin = end
    return DONE, count


def _divided(
    codes: np.ndarray,
    own: tuple[int, int],
    automaton: tuple[np.ndarray, np.ndarray],
    known: tuple[np.ndarray, np.ndarray],
    out: tuple[np.ndarray, np.ndarray],
) -> tuple[int, int, int]:
    """Divides a text, uint32[characters], and writes the tokens of the words between the two places
    `own` to the first array of `out`, int32[tokens], which has room for them. Unknown words are
    written to the second, int64[words, 3], which has room for all words: their first place, the
    place behind, and the number of tokens before them.

    Returns what became of the text, the number of tokens (where it was stopped, the place of the
    character), and that of the unknown words.
    """
    slots, records = known
    ids, words = out
    # The search stands here and not in a function: numba counts references to the arrays that a
    # function is given, which takes longer than the search.
    last = len(slots) - 1
    state, found = _words(codes, own, automaton, last, words)
    if state != DONE:
        return state, found, 0
    count, unknown_count = _unsigned(0), 0
    for word in range(found):
        begin, end = words[word, 0], words[word, 1]
        slot = words[word, 2]
        record = slots[_unsigned(slot)]
        while record:
            if records[_unsigned(record)] == end - begin:
                first, place = record + HEADER, begin
                while place < end and records[_unsigned(first)] == codes[_unsigned(place)]:
                    first, place = first + 1, place + 1
                if place == end:
                    break
            slot = (slot + 1) & last
            record = slots[_unsigned(slot)]
        if record:
            first = _unsigned(record + HEADER + end - begin)
            for token in range(records[_unsigned(record + 1)]):
                ids[count] = records[first + _unsigned(token)]
                count += _unsigned(1)
        else:
            words[unknown_count, 0], words[unknown_count, 1] = begin, end
            words[unknown_count, 2] = count
            unknown_count += 1
    return DONE, _signed(count), unknown_count


def _placed(known: tuple[np.ndarray, np.ndarray], first: int, behind: int) -> None:
    """Puts the records between two places into free slots. Their words are not in the table yet and
    differ from each other. `known` has the slots, int32[slots], and the records, uint32[values].
    """
    slots, records = known
    last = len(slots) - 1
    record = first
    while record < behind:
        begin = record + HEADER
        end = begin + records[record]
        hashed = _BASIS
        for place in range(begin, end):
            hashed = (hashed ^ records[place]) * _PRIME
        slot = (hashed ^ (hashed >> _SHIFT)) & last
        while slots[slot]:
            slot = (slot + 1) & last
        slots[slot] = record
        record = end + records[record + 1]


_KNOWN = types.Tuple((_SLOTS, _RECORDS))
_SIGNATURES: dict[str, tuple[Any, Any]] = {
    "divided": (
        _divided,
        types.UniTuple(types.int64, 3)(
            _CODES,
            types.UniTuple(types.int64, 2),
            types.Tuple((types.uint8[::1], types.int16[:, ::1])),
            _KNOWN,
            types.Tuple((types.int32[::1], types.int64[:, ::1])),
        ),
    ),
    "placed": (_placed, types.void(_KNOWN, types.int64, types.int64)),
}


@functools.cache
def kernel(name: str) -> Callable[..., Any]:
    """Returns `divided` or `placed`. The first call in a process compiles it, or reads it from
    numba's cache.
    """
    function, signature = _SIGNATURES[name]
    try:
        return njit(signature, cache=True, nogil=True)(function)
    except (RuntimeError, OSError):  # numba found no writable folder for its cache
        return njit(signature, nogil=True)(function)
