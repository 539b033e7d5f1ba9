"""Chat keeps loaded weights in memory between two messages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager

from app.session.engine_calls import ChatCalls, ChatEngine
from app.session.serving import Lent
from engine.errors import FitError
from engine.tools.chat.conversation import Message, Sampling, Source


class LoadedWeights:
    """Keeps the weights of each side that are in memory.

    Only one thread at a time may load, use or release weights; the caller ensures that. Any thread
    may read the labels and bytes while it holds the lock that `changing` takes: they change only
    inside of `changing()`.
    """

    def __init__(self, engine: ChatCalls, changing: Callable[[], AbstractContextManager[None]]):
        self._engine = engine
        self._changing = changing
        self._chat_engines: dict[str, ChatEngine] = {}
        self._sources: dict[str, Source] = {}
        self._slow_notes: dict[str, str] = {}

    def labels(self) -> list[str]:
        """Returns the names of the weights in memory."""
        return [chat_engine.label for chat_engine in self._chat_engines.values()]

    def held_bytes(self) -> int:
        """Returns the bytes of RAM that all weights occupy; those of others are counted as 0."""
        return sum(chat_engine.held_bytes for chat_engine in self._chat_engines.values())

    def are_lent(self) -> bool:
        """Returns whether all weights are those that are served to other programs."""
        return all(isinstance(each, Lent) for each in self._chat_engines.values())

    def slow_note(self) -> str:
        """Returns a sentence where weights in memory answer without a cache, else ""."""
        return next(filter(None, self._slow_notes.values()), "")

    def has(self, side: str) -> bool:
        """Returns whether the weights of `side` are in memory."""
        return side in self._chat_engines

    def text(self, side: str, ids: list[int]) -> str:
        """Returns the text of token ids int[T], as the weights of `side` write it."""
        return self._chat_engines[side].prompt_builder.text(ids)

    def answer(
        self, side: str, messages: list[Message], sampling: Sampling
    ) -> Generator[int, None, None]:
        """Yields the token ids of the answer of `side` as they are drawn (`ChatEngine.answer`)."""
        return self._chat_engines[side].answer(messages, sampling)

    def make_room(self, sources: Mapping[str, Source]) -> bool:
        """Returns whether the weights of all `sources` fit in memory at once.

        Some may already be there. If not even one more fits in addition to those, all are released
        and the check is repeated. Raises FitError if one does not fit even alone.
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
        """Brings the weights of `source` into memory, which can take minutes.

        Raises RamstreamError if they cannot be loaded. An exception from `progress` is re-raised
        unchanged.
        """
        self.keep(side, source, self._engine.load(source, progress))

    def borrow(self, side: str, source: Source, paused: object) -> None:
        """Uses the weights of the run that `paused` lends without copying them."""
        self.keep(side, source, self._engine.borrow(paused, source.config, source.label))

    def give_back_all(self) -> None:
        """Releases the memory of all weights."""
        self.give_back(list(self._chat_engines))

    def give_back_others(self, wanted: Mapping[str, Source]) -> None:
        """Releases the memory of all weights that are not those of `wanted`."""
        self.give_back(
            [side for side in self._chat_engines if wanted.get(side) != self._sources[side]]
        )

    def give_back(self, sides: Iterable[str]) -> None:
        """Releases the memory of these sides, after removing their weights from the state."""
        for side in sides:
            with self._changing():
                chat_engine = self._chat_engines.pop(side)
                del self._sources[side], self._slow_notes[side]
            chat_engine.close()

    def keep(self, side: str, source: Source, chat_engine: ChatEngine) -> None:
        """Uses weights in memory for `side`. Their cache is tried."""
        try:
            slow_note = chat_engine.slow_note()
        except BaseException:
            chat_engine.close()
            raise
        with self._changing():
            self._slow_notes[side] = slow_note
            self._chat_engines[side] = chat_engine
            self._sources[side] = source
