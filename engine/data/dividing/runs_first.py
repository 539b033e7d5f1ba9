r"""Some tokenizers divide a text several times: first around runs of certain characters, such as
`\p{N}{1,3}`, and then each piece by a pattern. Here all of that becomes one table.

A piece is divided as a text by itself, so a border of pieces counts as the end of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.data.dividing.automaton import DEAD, ENDS, MOST_CLASSES, START, Automaton
from engine.data.dividing.pattern import Characters, Repeated, UnknownPattern, read_pattern
from engine.data.dividing.pattern import Sequence as Parts

_REST = -1
"""The number of the set for all characters that are in none."""
_NOWHERE = -2
"""No character of the word has come yet."""


@dataclass(frozen=True, eq=False)
class Runs:
    """A `Runs` stands for runs of characters, each of which is a piece."""

    members: np.ndarray
    """It marks the characters by their numbers, bool[CODES]."""
    most: int | None
    """A piece has at most so many characters; there is no limit if it is None."""


def read_runs(pattern: str) -> Runs:
    """Returns what a pattern stands for. Raises UnknownPattern if it is more than a run."""
    part = read_pattern(pattern)
    if isinstance(part, Parts) and len(part.parts) == 1:
        part = part.parts[0]
    if isinstance(part, Characters):
        return Runs(part.members, 1)
    if isinstance(part, Repeated) and part.least == 1 and isinstance(part.part, Characters):
        return Runs(part.part.members, part.most)
    raise UnknownPattern(pattern)


def in_pieces(automaton: Automaton, runs: Sequence[Runs]) -> Automaton:
    """Returns an automaton that divides a text around `runs` and then each piece as `automaton`
    does. Raises UnknownPattern where one table cannot do that.
    """
    return _Pieces(automaton, runs).automaton() if runs else automaton


@dataclass(frozen=True)
class _Within:
    """The text has led to this state of the pattern's own table, in a piece of these characters."""

    state: int
    runs: int


@dataclass(frozen=True)
class _Counted:
    """A piece of limited length has so many characters already."""

    runs: int
    count: int


_State = _Within | _Counted


class _Pieces:
    def __init__(self, automaton: Automaton, runs: Sequence[Runs]):
        self._table = automaton.table
        self._most = [each.most for each in runs]
        set_of = np.full(len(automaton.class_of), _REST, np.int16)
        for number, each in enumerate(runs):
            if (set_of[each.members] != _REST).any():
                raise UnknownPattern("a character is in several sets")
            set_of[each.members] = number
        keys = automaton.class_of.astype(np.int16) * 64 + set_of
        _, examples, self._class_of = np.unique(keys, return_index=True, return_inverse=True)
        if len(examples) > MOST_CLASSES:
            raise UnknownPattern(f"{len(examples)} kinds of characters")
        classes, sets = automaton.class_of[examples].tolist(), set_of[examples].tolist()
        self._kinds: list[tuple[int, int]] = list(zip(classes, sets))
        """Each kind of character is one for the pattern, and is in a set."""
        for number, most in enumerate(self._most):
            if most is not None and most > 1:
                self._refuse_divided(number)

    def automaton(self) -> Automaton:
        states: list[_State | None] = [None, _Within(START, _NOWHERE)]  # the first one is DEAD
        numbers = {state: number for number, state in enumerate(states)}
        table: list[list[int]] = []
        for state in states:  # new ones are added behind it
            row = []
            for kind in [*self._kinds, None]:
                following, ends = (None, False) if state is None else self._step(state, kind)
                if following not in numbers:
                    numbers[following] = len(states)
                    states.append(following)
                row.append(numbers[following] | (ENDS if ends else 0))
            table.append(row)
        class_of = self._class_of.astype(np.uint8).reshape(-1)
        return Automaton(class_of, np.array(table, np.int16))

    def _step(self, state: _State, kind: tuple[int, int] | None) -> tuple[_State | None, bool]:
        """Returns the state that a character of this kind leads to, None for none, and whether a
        word may end before it. Without a kind, the text ends.
        """
        if isinstance(state, _Counted):
            continues = kind is not None and kind[1] == state.runs
            if continues and state.count != self._most[state.runs]:
                return _Counted(state.runs, state.count + 1), False
            return None, True
        is_first = state.runs == _NOWHERE
        if is_first and kind is not None and kind[1] != _REST and self._most[kind[1]] is not None:
            return _Counted(kind[1], 1), False
        if kind is None or (not is_first and kind[1] != state.runs):
            return None, bool(self._table[state.state, -1] & ENDS)
        entry = int(self._table[state.state, kind[0]])
        following = entry & (ENDS - 1)
        return None if following == DEAD else _Within(following, kind[1]), bool(entry & ENDS)

    def _refuse_divided(self, number: int) -> None:
        """Raises UnknownPattern if the pattern divides pieces of a set, whose length is limited."""
        inside = [kind for kind, runs in self._kinds if runs == number]
        seen, waiting = {START, DEAD}, [START]
        while waiting:
            for entry in self._table[waiting.pop(), [*inside, -1]].tolist():
                if entry & ENDS:
                    raise UnknownPattern("pieces are divided")
                if entry not in seen:
                    seen.add(entry)
                    waiting.append(entry)
