"""The Talk tab keeps the weights that answer in memory between two messages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager

from app.session.engine_calls import TalkCalls, Talker
from engine.errors import FitError
from engine.talk.conversation import Message, Sampling, Source


class LoadedWeights:
    """Keeps the weights of each side that are in memory.

    One thread at a time may load, use or give back weights; the caller sees to that. Any thread may
    read the labels and bytes under the lock that `changing` holds: what they show changes only
    inside of `changing()`.
    """

    def __init__(self, engine: TalkCalls, changing: Callable[[], AbstractContextManager[None]]):
        self._engine = engine
        self._changing = changing
        self._talkers: dict[str, Talker] = {}
        self._sources: dict[str, Source] = {}

    def labels(self) -> list[str]:
        """Returns the names of what is in memory."""
        return [talker.label for talker in self._talkers.values()]

    def held_bytes(self) -> int:
        """Returns the bytes of RAM that all weights take; borrowed ones take none."""
        return sum(talker.held_bytes for talker in self._talkers.values())

    def has(self, side: str) -> bool:
        """Says whether the weights of `side` are in memory."""
        return side in self._talkers

    def text(self, side: str, ids: list[int]) -> str:
        """Returns the text of token ids int[T], as the weights of `side` write it."""
        return self._talkers[side].voice.text(ids)

    def answer(
        self, side: str, messages: list[Message], sampling: Sampling
    ) -> Generator[int, None, None]:
        """Yields the token ids of the answer of `side` as they are drawn; see `Talker.answer`."""
        return self._talkers[side].answer(messages, sampling)

    def make_room(self, sources: Mapping[str, Source]) -> bool:
        """Says whether the weights of all `sources` can be in memory at once.

        Some may be there already. Where not even one more fits beside those, all are given back and
        the question is asked anew. Raises FitError where one cannot be in memory alone.
        """
        missing = [source for side, source in sources.items() if not self.has(side)]
        try:
            return not missing or self._engine.fit_together(missing)
        except FitError:
            if len(missing) == len(sources):
                raise
        self.give_back_all()
        return self._engine.fit_together(list(sources.values()))

    def load(self, side: str, source: Source, progress: Callable[..., None]) -> None:
        """Brings the weights of `source` into memory, which takes up to minutes.

        Raises RamstreamError where they cannot be loaded, and what `progress` raises.
        """
        self._keep(side, source, self._engine.load(source, progress))

    def borrow(self, side: str, source: Source, paused: object) -> None:
        """Takes the weights of the run whose calls are `paused` as they are, without a copy."""
        self._keep(side, source, self._engine.borrow(paused, source.config, source.label))

    def give_back_all(self) -> None:
        """Gives the memory of all weights back."""
        self.give_back(list(self._talkers))

    def give_back_others(self, wanted: Mapping[str, Source]) -> None:
        """Gives back the memory of all weights that are not those of `wanted`."""
        self.give_back([side for side in self._talkers if wanted.get(side) != self._sources[side]])

    def give_back(self, sides: Iterable[str]) -> None:
        """Gives the memory of these sides back. Pages see that they are gone before they are."""
        for side in sides:
            with self._changing():
                talker = self._talkers.pop(side)
                del self._sources[side]
            talker.close()

    def _keep(self, side: str, source: Source, talker: Talker) -> None:
        with self._changing():
            self._talkers[side] = talker
            self._sources[side] = source
