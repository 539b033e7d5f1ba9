"""Decodes rows whose keys and values lie in a `RowsCache`.

- A prompt that several rows share is computed once.
- A finished row's place in the cache is free for the next row.
- Where all weights stay on a GPU, a step is a CUDA graph: the pass, the drawing, and the inputs of
  the next step. Elsewhere a step is one sweep over the weights, for all rows.
- The cache grows with its rows up to a budget of memory, and is freed with the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from engine.errors import CacheError
from engine.planning.fit.sampling_memory import POSITIONS, CacheCost, CacheRoom, positions_for
from engine.planning.schedule.ops import Lane
from engine.runtime.device.backend import Ticket
from engine.runtime.device.graph_recorder import Recorder
from engine.runtime.sampling.answers import Found, Row
from engine.runtime.sampling.drawing import MOST_TOP_LOGPROBS, DrawingState, Drawn, Work
from engine.runtime.sampling.rows_cache import RowsCache, computed_prompts
from engine.runtime.step.inference_passes import RecordedPass
from engine.runtime.step.streaming_engine import StreamingEngine

_RECORDED_POSITIONS = 256
"""A recorded step reads a multiple of so many positions."""
_MOST_RECORDINGS = 24
"""Recordings that are kept at most, since each takes memory and time to make."""


class _Key(NamedTuple):
    """A kind of step, which has a recording of its own."""

    rows: int
    positions: int
    work: Work
    """What drawing takes."""
    top: bool
    """Whether the likeliest tokens are returned."""


@dataclass(frozen=True)
class _Step:
    """A step whose tokens are on their way to the host."""

    rows: dict[int, Row]
    """The rows at their places when it began."""
    drawn: torch.Tensor
    """Tokens and logarithms of their probabilities, float64 [2, places]."""
    top: torch.Tensor
    """The same of the likeliest tokens, float64 [2, places, number asked for]."""
    ticket: Ticket
    is_recorded: bool


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
    """Decodes rows of `engine` within the `room` for caches. `cost` is what a row takes, and
    `recorder` records steps; it is None where they run as they are. looks_ahead: whether a step may
    be under way between two calls, in which case nobody else may use the engine.
    """

    def __init__(
        self,
        engine: StreamingEngine,
        cost: CacheCost,
        room: CacheRoom,
        recorder: Recorder | None,
        looks_ahead: bool,
    ):
        self._engine, self._cost, self._room = engine, cost, room
        self._recorder, self._looks_ahead = recorder, looks_ahead
        self._cache: RowsCache | None = None
        self._lines: _Lines | None = None
        self._places: dict[int, Row] = {}
        """The rows under way, by their places in the cache."""
        self._left: list[int] = []
        """Places of rows that have ended, which still move on the device."""
        self._fresh: list[Row] = []
        """Rows whose prompts are not computed."""
        self._recordings: dict[_Key, RecordedPass] = {}
        self._seen: set[_Key] = set()
        """Kinds of steps that have run as they are."""
        self._begun: _Step | None = None
        self._can_record = recorder is not None

    # ------------------------------------------------------------------ rows come and go

    def can_ever_take(self, row: Row) -> bool:
        """Returns whether the row's cache is within the budget."""
        return self._room.holds(self._cost, 1, row.longest)

    def admit(self, waiting: list[Row]) -> None:
        """Takes rows from the front of `waiting`, as many as there is room for and as one pass
        computes prompts of.
        """
        tokens, taken = 0, 0
        seen: set[tuple[int, ...]] = set()
        rows, longest = len(self._places), self._longest()
        for row in waiting:
            prompt = tuple(row.tokens)
            tokens += 0 if prompt in seen else len(prompt)
            seen.add(prompt)
            longest = max(longest, row.longest)
            has_room = self._room.holds(self._cost, rows + taken + 1, longest)
            if not has_room or (taken and tokens > self._room.pass_tokens):
                break
            taken += 1
        self._fresh += waiting[:taken]
        del waiting[:taken]

    def drop(self, row: Row) -> None:
        """Gives back the row's place."""
        if row in self._fresh:
            self._fresh.remove(row)
        for place, held in list(self._places.items()):
            if held is row:
                del self._places[place]
                self._left.append(place)

    @property
    def rows(self) -> list[Row]:
        """All rows under way."""
        return [*self._places.values(), *self._fresh]

    # ------------------------------------------------------------------ a step

    def advance(self) -> Found:
        """Draws the next token of every row: the row, the token, its log-probability and the
        likeliest ones. Raises CacheError if memory runs out; all rows can then be begun anew.
        """
        self._stop_those_left()
        if not self._places:
            self._begun = None  # all of its rows have ended
        found = self._decode() if self._places else []
        if self._fresh:
            found += self._compute_prompts()
        return found

    def _stop_those_left(self) -> None:
        """Makes places without a row write at their beginning and stay there."""
        lines = self._lines
        if lines is not None and self._left:
            index = torch.tensor(self._left).to(lines.at.device)
            lines.moves[index] = 0
            lines.at[index] = 0
        self._left.clear()

    def _decode(self) -> Found:
        """Returns the next tokens of rows in the cache. A recorded step is begun before the tokens
        of the one before are read, so that the device does not wait for the host.
        """
        step = self._begun
        self._begun = None
        if step is None:
            step = self._begin(0)
        if step.is_recorded and self._looks_ahead:
            self._begun = self._begin_recorded()
        return self._read(step)

    def _begin_recorded(self) -> _Step | None:
        """Begins the step after the one under way, unless it is not recorded or no row goes on."""
        goes_on = any(len(row.tokens) + 1 < row.longest for row in self._places.values())
        recording = self._recordings.get(self._key(1)) if goes_on else None
        return None if recording is None else self._begin(1)

    def _key(self, ahead: int) -> _Key:
        """Returns the kind of the next step, while so many steps are under way."""
        cache = self._cache
        assert cache is not None  # rows have places there
        rows = self._places.values()
        used = max(len(row.tokens) for row in rows) + ahead
        unit = _RECORDED_POSITIONS if self._can_record else POSITIONS
        return _Key(
            self._compact(),
            min(cache.positions, -(-used // unit) * unit),
            max(row.drawing.work for row in rows),
            any(row.top_logprobs for row in rows),
        )

    def _begin(self, ahead: int) -> _Step:
        """Begins a step of all rows in the cache, from its recording if there is one."""
        key = self._key(ahead)
        recording = None
        if self._engine.passes.is_held:
            recording = self._recordings.get(key) or self._record(key)
        if recording is None:
            self._run(key)
        return self._sent(key, recording)

    def _sent(self, key: _Key, recording: RecordedPass | None) -> _Step:
        """Replays a recording, if any, and sends what is drawn to the host."""
        lines = self._lines
        assert lines is not None  # rows have lines
        asked = max((row.top_logprobs for row in self._places.values()), default=0)
        backend = self._engine.backend
        drawn = backend.host_buffer(2 * key.rows, torch.float64).view(2, key.rows)
        top = backend.host_buffer(2 * key.rows * asked, torch.float64).view(2, key.rows, asked)

        def work() -> None:
            if recording is not None:
                recording.replay()
            both = torch.stack((lines.tokens[: key.rows], lines.logprobs[: key.rows].double()))
            drawn.copy_(both, non_blocking=True)
            if asked:
                ids, logs = lines.top_tokens[: key.rows], lines.top_logprobs[: key.rows]
                top.copy_(torch.stack((ids, logs.double()))[:, :, :asked], non_blocking=True)

        ticket = backend.submit(Lane.COMPUTE, (), work)
        return _Step(dict(self._places), drawn, top, ticket, recording is not None)

    def _run(self, key: _Key) -> None:
        """Runs a step as it is."""
        at, tokens, then = self._inputs(key)
        assert self._cache is not None  # rows have places there
        then(self._engine.next_logits(tokens, at, self._cache.of_model))

    def _record(self, key: _Key) -> RecordedPass | None:
        """Records a kind of step, and runs nothing. Returns None for one that has not run yet: what
        has run once has allocated and compiled what it needs.
        """
        if self._recorder is None or not self._can_record:
            return None
        if key not in self._seen:
            self._seen.add(key)
            return None
        if len(self._recordings) >= _MOST_RECORDINGS:
            return None
        at, tokens, then = self._inputs(key)
        assert self._cache is not None  # rows have places there
        try:
            recording = self._engine.record_next(
                self._recorder, tokens, at, self._cache.of_model, then
            )
        except Exception:  # noqa: BLE001  what cannot be recorded runs as it is
            recording = None
        if recording is None:
            self._can_record = False
        else:
            self._recordings[key] = recording
        return recording

    def _inputs(
        self, key: _Key
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], None]]:
        """Returns the positions and the tokens of a step's rows, both int64 [rows], and what is to
        be done with its logits. The cache is ready for the step.
        """
        cache, lines = self._cache, self._lines
        assert cache is not None and lines is not None  # rows have places there
        at, tokens = lines.at[: key.rows], lines.tokens[: key.rows]
        cache.enter(at, key.positions)

        def then(logits: torch.Tensor) -> None:
            lines.take(lines.drawing.draw(logits, key.work, key.top))

        return at, tokens, then

    def _read(self, step: _Step) -> Found:
        """Returns what a step has drawn, once it is there, for the rows that still go on."""
        step.ticket.finish()
        tokens, logprobs = step.drawn.tolist()
        top = step.top.tolist() if step.top.numel() else None
        going = set(self._places.values())
        found: Found = []
        for place, row in step.rows.items():
            if row not in going:
                continue
            likeliest: tuple[tuple[int, float], ...] = ()
            if row.top_logprobs and top is not None:
                pairs = zip(top[0][place], top[1][place])
                likeliest = tuple((int(token), log) for token, log in pairs)[: row.top_logprobs]
            found.append((row, int(tokens[place]), logprobs[place], likeliest))
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
        return self._read_places(places)

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
        work = max(row.drawing.work for row in rows)
        top = any(row.top_logprobs for row in rows)
        drawn = drawing.draw(logits[source], work, top)
        lines.drawing.drawn[index] += 1
        lines.tokens[index] = drawn.tokens
        lines.logprobs[index] = drawn.logprobs
        if drawn.top_tokens is not None and drawn.top_logprobs is not None:
            width = drawn.top_tokens.shape[1]
            lines.top_tokens[index, :width] = drawn.top_tokens
            lines.top_logprobs[index, :width] = drawn.top_logprobs
        return flat

    def _read_places(self, places: Sequence[int]) -> Found:
        """Returns what was drawn at places."""
        rows = {place: self._places[place] for place in places}
        key = _Key(max(places) + 1, 0, Work.PLAIN, False)
        step = self._sent(key, None)
        return self._read(replace(step, rows=rows))

    # ------------------------------------------------------------------ memory

    def _longest(self) -> int:
        return max((row.longest for row in self.rows), default=0)

    def _make_room(self, fresh: Sequence[Row], like: Any) -> None:
        """Makes the cache large enough for these rows beside those that have places."""
        rows = len(self._places) + len(fresh)
        longest = max(row.longest for row in (*fresh, *self._places.values()))
        positions = positions_for(longest)
        cache = self._cache
        if cache is not None and cache.rows >= rows and cache.positions >= positions:
            return
        self._forget_recordings()
        if cache is not None:
            kept, longer = max(rows, cache.rows), max(positions, cache.positions)
            if self._room.holds(self._cost, kept, longer - 1):
                rows, positions = kept, longer
            else:
                # It had room for more rows, or for longer ones, that are over.
                self._move_to_front(len(self._places))
        rows = self._room.allocated(self._cost, rows, positions - 1)
        if cache is None:
            self._cache = RowsCache(like, rows, positions)
            self._lines = _Lines(rows, self._engine.backend.device)
            return
        assert self._lines is not None  # it came with the cache
        self._cache = cache.resized(rows, positions)
        old, self._lines = self._lines, _Lines(rows, self._engine.backend.device)
        count = min(rows, cache.rows)
        for name in ("at", "moves", "tokens"):
            getattr(self._lines, name)[:count] = getattr(old, name)[:count]
        for name in ("seeds", "drawn", "numbers"):
            getattr(self._lines.drawing, name)[:count] = getattr(old.drawing, name)[:count]

    def _compact(self) -> int:
        """Moves rows to the first places where that shortens a step, and returns how many places a
        step runs over.
        """
        cache = self._cache
        assert cache is not None  # rows have places there
        count, end = len(self._places), max(self._places) + 1
        if not self._can_record:
            wanted = count
        else:
            wanted = min(cache.rows, 1 << (count - 1).bit_length())
            if end > wanted and end <= 2 * wanted and count > 1:
                # A recording is dearer than some idle places.
                wanted = min(cache.rows, 1 << (end - 1).bit_length())
        self._move_to_front(wanted)
        return wanted

    def _move_to_front(self, wanted: int) -> None:
        """Moves rows whose places are behind the first `wanted` ones to free ones among these."""
        cache, lines = self._cache, self._lines
        assert cache is not None and lines is not None  # rows have places there
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

    def close(self) -> None:
        """Frees the cache and the recordings."""
        self._begun = None
        self._places.clear()
        self._fresh.clear()
        self._left.clear()
        self._cache = self._lines = None
        self._forget_recordings()

    def _forget_recordings(self) -> None:
        self._seen.clear()
        if self._recorder is None:
            return
        self._recorder.wait()  # none may be running
        self._recordings.clear()
        # A recorder cannot record in memory whose recordings are all gone, unless it is told.
        self._recorder.clear()
