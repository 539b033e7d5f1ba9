"""Decodes rows whose keys and values lie in a `RowsCache`.

- A prompt that several rows share is computed once.
- A finished row's place in the cache is free for the next row.
- Where all weights stay on a GPU, a step is a CUDA graph: the pass, the drawing, and the inputs of
  the next step. Elsewhere a step is one sweep over the weights, for all rows.
- The cache grows with its rows up to a budget of memory, and is freed with the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.errors import CacheError
from engine.runtime.device.graph_recorder import Recorder, Recording
from engine.runtime.sampling.answers import Found, Row
from engine.runtime.sampling.drawing import MOST_TOP_LOGPROBS, DrawingState, Drawn
from engine.runtime.sampling.kv_cache import CacheCost
from engine.runtime.sampling.rows_cache import POSITIONS, RowsCache, computed_prompts
from engine.runtime.step.inference_passes import PASS_TOKENS
from engine.runtime.step.streaming_engine import StreamingEngine

MOST_ROWS = 512
"""Rows of a cache at most. More of them would make a step longer by as much as they add."""
_RECORDED_POSITIONS = 256
"""A recorded step reads a multiple of so many positions."""
_MOST_RECORDINGS = 24
"""Recordings that are kept at most, since each takes memory and time to make."""


class _Lines:
    """The rows of a cache on the device: their positions, their next tokens and their drawing."""

    def __init__(self, rows: int, device: torch.device):
        self.at = torch.zeros(rows, dtype=torch.int64, device=device)
        """Position of the next token of each row."""
        self.moves = torch.zeros(rows, dtype=torch.int64, device=device)
        """1 for rows that go on, 0 for places without one."""
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_tokens = torch.zeros(rows, MOST_TOP_LOGPROBS, dtype=torch.int64, device=device)
        self.top_logprobs = torch.zeros(rows, MOST_TOP_LOGPROBS, device=device)
        self.drawing = DrawingState(rows, device)

    def take(self, drawn: Drawn) -> None:
        """Keeps drawn tokens of the first rows as those of the next step, one position further."""
        count = drawn.tokens.shape[0]
        self.tokens[:count] = drawn.tokens
        self.logprobs[:count] = drawn.logprobs
        self.at[:count] += self.moves[:count]
        if drawn.top_tokens is not None and drawn.top_logprobs is not None:
            width = drawn.top_tokens.shape[1]
            self.top_tokens[:count, :width] = drawn.top_tokens
            self.top_logprobs[:count, :width] = drawn.top_logprobs


class StaticDecoder:
    """Decodes rows of `engine` within `budget` bytes of cache. `cost` is what a row takes."""

    def __init__(self, engine: StreamingEngine, cost: CacheCost, budget: int):
        self._engine, self._cost, self._budget = engine, cost, budget
        self._cache: RowsCache | None = None
        self._lines: _Lines | None = None
        self._places: dict[int, Row] = {}
        """The rows under way, by their places in the cache."""
        self._fresh: list[Row] = []
        """Rows whose prompts are not computed."""
        self._recorder: Recorder | None = None
        self._recordings: dict[tuple[int, int, bool, bool], Recording | None] = {}
        """Steps by rows, positions, order and likeliest tokens; None after a first run, which a
        recording follows.
        """
        self._can_record = engine.backend.device.type == "cuda"

    # ------------------------------------------------------------------ rows come and go

    def can_ever_take(self, row: Row) -> bool:
        """Returns whether the row's cache is within the budget."""
        return self._bytes(1, row.longest) <= self._budget

    def admit(self, waiting: list[Row]) -> None:
        """Takes rows from the front of `waiting`, as many as there is room for and as one pass
        computes prompts of.
        """
        tokens = 0
        seen: set[tuple[int, ...]] = set()
        while waiting:
            row = waiting[0]
            prompt = tuple(row.tokens)
            tokens += 0 if prompt in seen else len(prompt)
            seen.add(prompt)
            rows = len(self._places) + len(self._fresh) + 1
            longest = max(row.longest, self._longest())
            if rows > MOST_ROWS or self._bytes(rows, longest) > self._budget:
                return
            if self._fresh and tokens > PASS_TOKENS:
                return
            self._fresh.append(waiting.pop(0))

    def drop(self, row: Row) -> None:
        """Gives back the row's place."""
        if row in self._fresh:
            self._fresh.remove(row)
        for place, held in list(self._places.items()):
            if held is row:
                del self._places[place]
                assert self._lines is not None  # a row with a place has a line
                self._lines.moves[place] = 0
                self._lines.at[place] = 0

    @property
    def rows(self) -> list[Row]:
        """All rows under way."""
        return [*self._places.values(), *self._fresh]

    # ------------------------------------------------------------------ a step

    def advance(self) -> Found:
        """Draws the next token of every row: the row, the token, its log-probability and the
        likeliest ones. Raises CacheError if memory runs out; all rows can then be begun anew.
        """
        found = self._decode() if self._places else []
        if self._fresh:
            found += self._compute_prompts()
        return found

    def _decode(self) -> Found:
        assert self._cache is not None and self._lines is not None  # rows have places there
        rows = self._compact()
        drawings = [row.drawing for row in self._places.values()]
        ordered = any(drawing.needs_order for drawing in drawings)
        top = any(row.top_logprobs for row in self._places.values())
        used = max(len(row.tokens) for row in self._places.values())
        unit = _RECORDED_POSITIONS if self._can_record else POSITIONS
        positions = min(self._cache.positions, -(-used // unit) * unit)
        self._run((rows, positions, ordered, top))
        return self._read(sorted(self._places))

    def _run(self, key: tuple[int, int, bool, bool]) -> None:
        """Runs a step for so many rows and positions, from its recording if there is one."""
        rows, positions, ordered, top = key
        cache, lines = self._cache, self._lines
        assert cache is not None and lines is not None  # `_decode` has them
        recording = self._recordings.get(key)
        if recording is not None and self._engine.passes.is_held:
            recording.replay()
            return
        at, tokens = lines.at[:rows], lines.tokens[:rows]
        cache.enter(at, positions)
        logits = self._engine.next_logits(tokens, at, cache.of_model)
        lines.take(lines.drawing.draw(logits, ordered, top))
        if not self._can_record or len(self._recordings) >= _MOST_RECORDINGS:
            return
        if key not in self._recordings:
            self._recordings[key] = None  # what runs once has allocated and compiled what it needs
            return

        def then(logits: torch.Tensor) -> None:
            lines.take(lines.drawing.draw(logits, ordered, top))

        cache.enter(at, positions)
        try:
            if self._recorder is None:
                self._recorder = self._engine.backend.recorder()
            self._recordings[key] = self._engine.record_next(
                self._recorder, tokens, at, cache.of_model, then
            )
            self._can_record = self._recordings[key] is not None
        except Exception:  # noqa: BLE001  what cannot be recorded runs as it is
            self._can_record = False

    def _read(self, places: Sequence[int]) -> Found:
        """Returns what was drawn at places, once the device has drawn it."""
        lines = self._lines
        assert lines is not None  # something was drawn
        end = max(places) + 1
        both = torch.stack((lines.tokens[:end].double(), lines.logprobs[:end].double())).tolist()
        asked = max(self._places[place].top_logprobs for place in places)
        top_tokens = lines.top_tokens[:end, :asked].tolist() if asked else []
        top_logprobs = lines.top_logprobs[:end, :asked].tolist() if asked else []
        found = []
        for place in places:
            row = self._places[place]
            top: tuple[tuple[int, float], ...] = ()
            if row.top_logprobs:
                pairs = zip(top_tokens[place], top_logprobs[place])
                top = tuple(pairs)[: row.top_logprobs]
            found.append((row, int(both[0][place]), both[1][place], top))
        return found

    # ------------------------------------------------------------------ prompts

    def _compute_prompts(self) -> Found:
        """Computes the prompts of fresh rows, places the rows, and draws their first tokens."""
        fresh, self._fresh = self._fresh, []
        sharing: dict[tuple[int, ...], list[Row]] = {}
        for row in fresh:
            sharing.setdefault(tuple(row.tokens), []).append(row)
        prompts = list(sharing)
        try:
            computed = computed_prompts(self._engine, prompts)
            self._make_room(fresh, computed[0][1])
            places: list[int] = []
            for numbers, cache, logits in computed:
                places += self._place([sharing[prompts[n]] for n in numbers], cache, logits)
        except torch.OutOfMemoryError as error:
            self._fresh = [row for row in fresh if row not in self._places.values()]
            raise CacheError(f"A cache of {len(fresh)} rows found no memory.") from error
        except CacheError:
            self._fresh = [row for row in fresh if row not in self._places.values()]
            raise
        return self._read(places)

    def _place(self, sharing: list[list[Row]], prompt: Any, logits: torch.Tensor) -> list[int]:
        """Gives rows of a micro-batch of prompts their places, and draws their first tokens."""
        cache, lines = self._cache, self._lines
        assert cache is not None and lines is not None  # `_make_room` has made them
        free = iter(place for place in range(cache.rows) if place not in self._places)
        places: list[list[int]] = []
        for rows in sharing:
            places.append([next(free) for _ in rows])
            self._places.update(zip(places[-1], rows))
        cache.take_prompts(prompt, places)
        flat = [place for each in places for place in each]
        rows = [row for each in sharing for row in each]
        device = lines.at.device
        index = torch.tensor(flat).to(device)
        lines.drawing.set(flat, [row.drawing for row in rows], [row.drawn for row in rows])
        lines.at[index] = torch.tensor([len(row.tokens) for row in rows]).to(device)
        lines.moves[index] = 1
        source = torch.tensor([n for n, each in enumerate(places) for _ in each]).to(device)
        drawing = DrawingState(len(rows), device)
        drawing.set(range(len(rows)), [r.drawing for r in rows], [r.drawn for r in rows])
        ordered = any(row.drawing.needs_order for row in rows)
        top = any(row.top_logprobs for row in rows)
        drawn = drawing.draw(logits[source], ordered, top)
        lines.drawing.drawn[index] += 1
        lines.tokens[index] = drawn.tokens
        lines.logprobs[index] = drawn.logprobs
        if drawn.top_tokens is not None and drawn.top_logprobs is not None:
            width = drawn.top_tokens.shape[1]
            lines.top_tokens[index, :width] = drawn.top_tokens
            lines.top_logprobs[index, :width] = drawn.top_logprobs
        return flat

    # ------------------------------------------------------------------ memory

    def _bytes(self, rows: int, tokens: int) -> int:
        return rows * self._cost.of(-(-tokens // POSITIONS) * POSITIONS)

    def _longest(self) -> int:
        return max((row.longest for row in self.rows), default=0)

    def _make_room(self, fresh: Sequence[Row], like: Any) -> None:
        """Makes the cache large enough for these rows beside those that have places."""
        rows = len(self._places) + len(fresh)
        longest = max(row.longest for row in (*fresh, *self._places.values()))
        positions = -(-longest // POSITIONS) * POSITIONS
        cache = self._cache
        if cache is not None and cache.rows >= rows and cache.positions >= positions:
            return
        if cache is not None:
            rows, positions = max(rows, cache.rows), max(positions, cache.positions)
        # Rows come one after another where a server asks, so the cache grows by halves of the room.
        wanted = min(MOST_ROWS, 1 << (rows - 1).bit_length())
        if self._bytes(wanted, positions) <= self._budget:
            rows = wanted
        self._recordings.clear()
        if cache is None:
            self._cache = RowsCache(like, rows, positions)
            self._lines = _Lines(rows, self._engine.backend.device)
            return
        assert self._lines is not None  # it came with the cache
        self._cache = cache.grown(rows, positions)
        old, self._lines = self._lines, _Lines(rows, self._engine.backend.device)
        count = old.at.shape[0]
        for name in ("at", "moves", "tokens"):
            getattr(self._lines, name)[:count] = getattr(old, name)
        for name in ("seeds", "drawn", "numbers"):
            getattr(self._lines.drawing, name)[:count] = getattr(old.drawing, name)

    def _compact(self) -> int:
        """Moves rows to the first places where that shortens a step, and returns how many places a
        step runs over.
        """
        cache, lines = self._cache, self._lines
        assert cache is not None and lines is not None  # rows have places there
        count, end = len(self._places), max(self._places) + 1
        if not self._can_record:
            wanted = count
        else:
            wanted = min(cache.rows, 1 << (count - 1).bit_length())
            if end > wanted and end <= 2 * wanted and count > 1:
                # A recording is dearer than some idle places.
                wanted = min(cache.rows, 1 << (end - 1).bit_length())
        if end <= wanted:
            return wanted
        free = iter(place for place in range(wanted) if place not in self._places)
        for place in sorted(self._places):
            if place < wanted:
                continue
            to = next(free)
            cache.move(place, to)
            for tensor in (lines.at, lines.moves, lines.tokens):
                tensor[to] = tensor[place]
            for tensor in (lines.drawing.seeds, lines.drawing.drawn, lines.drawing.numbers):
                tensor[to] = tensor[place]
            lines.moves[place] = 0
            lines.at[place] = 0
            self._places[to] = self._places.pop(place)
        return wanted

    def close(self) -> None:
        """Frees the cache and the recordings."""
        self._recordings.clear()
        self._places.clear()
        self._fresh.clear()
        self._cache = self._lines = None
        if self._recorder is not None:
            self._recorder.wait()
            self._recorder.clear()
            self._recorder = None
