"""An `Automaton` is a pattern as a table: what a character does to the search for a word's end.

The way to it is the known one from a regular expression to a deterministic automaton. A state is
the list of places in the pattern that the text has led to, in the order in which the pattern tries
them. Where one of them is the end of the pattern, a word may end there, and the places behind it in
the list do not count any more. So the word that the table finds is the one that a search with
backtracking finds. A look at the next character is decided when that character comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.data.dividing.pattern import (
    Characters,
    Choice,
    NotBefore,
    Part,
    Repeated,
    Sequence,
    UnknownPattern,
    read_pattern,
)

DEAD = 0
"""In this state, no further character belongs to the word."""
START = 1
ENDS = 1 << 14
"""An entry of the table has this bit if a word may end before the character."""
_MOST_STATES = 1 << 10
_MOST_SETS = 64
MOST_CLASSES = 250
"""The automaton tells at most so many kinds of characters apart."""


@dataclass(frozen=True)
class Automaton:
    """An `Automaton` divides a text into words."""

    class_of: np.ndarray
    """The pattern does not tell characters of one class apart: uint8[CODES]."""
    table: np.ndarray
    """In state s, a character of class c leads to state `table[s, c]`, which also tells whether a
    word may end before it (`ENDS`): int16[states, classes + 1]. The last column is for the end of
    the text.
    """

    def words(self, text: str) -> list[str]:
        """Returns the words of a text; a character that belongs to none is a word."""
        kinds = [*self.class_of[list(map(ord, text))].tolist(), -1]
        found, begin = [], 0
        while begin < len(text):
            state, end = START, begin + 1
            for place in range(begin, len(kinds)):
                entry = int(self.table[state, kinds[place]])
                state = entry & (ENDS - 1)
                if entry & ENDS:
                    end = place
                if state == DEAD:
                    break
            found.append(text[begin:end])
            begin = end
        return found


def automaton_of(pattern: str) -> Automaton:
    """Returns the automaton of a pattern. Raises UnknownPattern."""
    places = _Places()
    places.add(read_pattern(pattern), places.end)
    return _determined(places)


@dataclass
class _Place:
    """A place in the pattern: what may come there, and what follows it."""

    members: np.ndarray | None = None
    """One of these characters comes, or does not come next (`is_look`), bool[CODES]. If it is None,
    the pattern goes on at any place of `then`, and it ends where there is none.
    """
    then: list[int] = field(default_factory=list)
    is_look: bool = False


class _Places:
    """The places of a pattern, which is added from its end."""

    def __init__(self) -> None:
        self.all = [_Place()]
        self.end = 0
        self.first = 0

    def add(self, part: Part, then: int) -> int:
        """Adds a part behind which the pattern goes on at `then`, and returns where it begins."""
        self.first = self._added(part, then)
        return self.first

    def _added(self, part: Part, then: int) -> int:
        if isinstance(part, Characters):
            return self._new(_Place(part.members, [then]))
        if isinstance(part, NotBefore):
            return self._new(_Place(part.members, [then], is_look=True))
        if isinstance(part, Sequence):
            for one in reversed(part.parts):
                then = self._added(one, then)
            return then
        if isinstance(part, Choice):
            return self._new(_Place(then=[self._added(one, then) for one in part.parts]))
        return self._repeated(part, then)

    def _repeated(self, part: Repeated, then: int) -> int:
        behind = then
        if part.most is None:
            again: list[int] = []
            behind = self._new(_Place(then=again))
            again += [self._added(part.part, behind), then]
        else:
            for _ in range(part.most - part.least):
                behind = self._new(_Place(then=[self._added(part.part, behind), then]))
        for _ in range(part.least):
            behind = self._added(part.part, behind)
        return behind

    def _new(self, place: _Place) -> int:
        self.all.append(place)
        return len(self.all) - 1


class _Steps:
    """The steps from one state to the next."""

    def __init__(self, places: _Places):
        self._all = places.all
        self._end = places.end

    def closed(self, places: list[int]) -> tuple[int, ...]:
        """Returns the places at which something is awaited, where the text has led to `places`."""
        found: dict[int, None] = {}
        seen: set[int] = set()
        waiting = places[::-1]
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            place = self._all[number]
            if place.members is None and number != self._end:
                waiting += place.then[::-1]
            else:
                found[number] = None
        return tuple(found)

    def step(self, state: tuple[int, ...], character: int | None) -> tuple[tuple[int, ...], bool]:
        """Returns the state that a character leads to, and whether a word may end before it. None
        is the end of the text.
        """
        following: list[int] = []
        seen: set[int] = set()
        waiting = list(state[::-1])
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            if number == self._end:
                return self.closed(following), True
            place = self._all[number]
            comes = True
            if place.members is not None:
                comes = character is not None and bool(place.members[character])
            if place.members is None or (place.is_look and not comes):
                waiting += place.then[::-1]
            elif comes and not place.is_look:
                following += place.then
        return self.closed(following), False


def _determined(places: _Places) -> Automaton:
    sets = [place.members for place in places.all if place.members is not None]
    distinct = list({members.tobytes(): members for members in sets}.values())
    if not 1 <= len(distinct) <= _MOST_SETS:
        raise UnknownPattern(f"{len(distinct)} sets of characters")
    keys = np.zeros(len(distinct[0]), np.uint64)
    for bit, members in enumerate(distinct):
        keys |= members.astype(np.uint64) << np.uint64(bit)
    _, examples, class_of = np.unique(keys, return_index=True, return_inverse=True)
    if len(examples) > MOST_CLASSES:
        raise UnknownPattern(f"{len(examples)} kinds of characters")
    steps = _Steps(places)
    states = [(), steps.closed([places.first])]
    numbers = {state: number for number, state in enumerate(states)}
    table: list[list[int]] = []
    for state in states:  # new ones are added behind it
        row = []
        for character in [*examples.tolist(), None]:
            following, ends = steps.step(state, character)
            if following not in numbers:
                numbers[following] = len(states)
                states.append(following)
            row.append(numbers[following] | (ENDS if ends else 0))
        table.append(row)
        if len(states) > _MOST_STATES:
            raise UnknownPattern(f"more than {_MOST_STATES} states")
    found = Automaton(class_of.astype(np.uint8).reshape(-1), np.array(table, np.int16))
    if (found.table[START] & ENDS).any():
        raise UnknownPattern("a word may be empty")
    return found
