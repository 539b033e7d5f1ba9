"""Decodes rows of models that cannot use a `RowsCache`: with the caches that the model's own code
makes, or without any.

With the model's own caches:

- A group is some rows with one cache. Its rows have similar lengths and are not padded: each row is
  first fed as many tokens as the shortest has, and then one token of its prompt or answer per pass.
  So all rows of a cache are always at the same position, which is exact for every model family.
- A row that has ended is still fed with its group, and its logits are ignored.

Without a cache, each new token takes a pass over all tokens so far. This is slow, but gives the
same answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.planning.fit.sampling_memory import CacheCost, CacheRoom
from engine.runtime.sampling.answers import Found, Row
from engine.runtime.sampling.drawing import DrawingState
from engine.runtime.step.streaming_engine import StreamingEngine


def drawn_for(rows: list[Row], logits: torch.Tensor) -> Found:
    """Draws a token for each of `rows`, from logits [rows, vocabulary] in float32."""
    if not rows:
        return []
    state = DrawingState(len(rows), logits.device)
    state.set(range(len(rows)), [row.drawing for row in rows], [row.drawn for row in rows])
    work = max(row.drawing.work for row in rows)
    asked = max(row.top_logprobs for row in rows)
    drawn = state.draw(logits, work, asked > 0)
    top: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
    if drawn.top_tokens is not None and drawn.top_logprobs is not None:
        both = zip(rows, drawn.top_tokens.tolist(), drawn.top_logprobs.tolist())
        top = [tuple(zip(ids, logs))[: row.top_logprobs] for row, ids, logs in both]
    return list(zip(rows, drawn.tokens.tolist(), drawn.logprobs.tolist(), top))


@dataclass
class _Group:
    """Rows that share a cache, and how many tokens of each are in it."""

    rows: list[Row]
    fed: int = 0
    cache: Any = None
    going: list[Row] = field(default_factory=list)
    """Its rows that have not ended."""

    @property
    def next_stop(self) -> int:
        """Position up to which the rows are fed next: first the end of the shortest row, then one
        token further each time.
        """
        return self.fed + 1 if self.fed else min(len(row.tokens) for row in self.rows)

    def next_tokens(self) -> np.ndarray:
        """Returns the next tokens, int64 [rows, tokens]."""
        stop = self.next_stop
        # A row that has ended has no next token. It repeats its last one, for the shape.
        return np.array([row.tokens[self.fed : stop] or row.tokens[-1:] for row in self.rows])


class GroupedDecoder:
    """Decodes rows with the model's own caches, of which each row's takes `cost`, within the `room`
    for them all.
    """

    def __init__(self, engine: StreamingEngine, cost: CacheCost, room: CacheRoom):
        self._engine, self._cost, self._room = engine, cost, room
        self._groups: list[_Group] = []

    def can_ever_take(self, row: Row) -> bool:
        """Returns whether the row's cache is within the budget."""
        return self._bytes(row) <= self._room.budget

    def _bytes(self, row: Row) -> int:
        # A row may be fed with a group until the last of its rows ends.
        return self._cost.of(row.longest + row.limits.max_new_tokens // 2)

    def admit(self, waiting: list[Row]) -> None:
        """Takes rows from `waiting`, the shortest first, as many as there is room for and as one
        pass computes prompts of. Rows of similar length become a group.
        """
        held = sum(self._bytes(row) for group in self._groups for row in group.rows)
        tokens = 0
        last: _Group | None = None
        for row in sorted(waiting, key=lambda row: len(row.tokens)):
            tokens += len(row.tokens)
            held += self._bytes(row)
            if held > self._room.budget or (last is not None and tokens > self._room.pass_tokens):
                return
            waiting.remove(row)
            spread = row.limits.max_new_tokens // 2
            if last is None or len(row.tokens) - len(last.rows[0].tokens) > spread:
                last = _Group([])
                self._groups.append(last)
            last.rows.append(row)
            last.going.append(row)

    @property
    def rows(self) -> list[Row]:
        """All rows under way."""
        return [row for group in self._groups for row in group.going]

    def advance(self) -> Found:
        """Feeds every group, and draws the next token of each row whose tokens are all fed. Raises
        CacheError if a cache fails; all rows can then be begun anew.
        """
        tokens = [group.next_tokens() for group in self._groups]
        stops = [group.next_stop for group in self._groups]
        caches = [group.cache for group in self._groups]
        logits = self._engine.cached_logits(tokens, caches)
        due: list[Row] = []
        places: list[int] = []
        place = 0
        for group, stop, cache in zip(self._groups, stops, caches):
            group.fed, group.cache = stop, cache
            for row in group.rows:
                if row in group.going and len(row.tokens) == stop:
                    due.append(row)
                    places.append(place)
                place += 1
        return drawn_for(due, logits[places])

    def drop(self, row: Row) -> None:
        """Ends a row. The cache of a group is freed with its last one."""
        for group in self._groups:
            if row in group.going:
                group.going.remove(row)
        self._groups = [group for group in self._groups if group.going]

    def close(self) -> None:
        """Frees the caches."""
        self._groups.clear()


class UncachedDecoder:
    """Decodes rows without a cache."""

    def __init__(self, engine: StreamingEngine):
        self._engine = engine
        self.rows: list[Row] = []
        """All rows under way."""

    def can_ever_take(self, _: Row) -> bool:
        """Returns True: a row takes no memory between two tokens."""
        return True

    def admit(self, waiting: list[Row]) -> None:
        """Takes all rows."""
        self.rows += waiting
        waiting.clear()

    def advance(self) -> Found:
        """Draws the next token of every row."""
        return drawn_for(self.rows, self._engine.last_logits([row.tokens for row in self.rows]))

    def drop(self, row: Row) -> None:
        """Ends a row."""
        self.rows.remove(row)

    def close(self) -> None:
        """Lets go of all rows."""
        self.rows.clear()
