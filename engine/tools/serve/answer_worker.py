"""One thread draws the tokens of all requests to the same weights.

Requests come at any time and share each pass through the model. An answer that nobody waits for is
cancelled, so that its place goes to the next.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from engine.errors import FitError, GpuMemoryError, RamstreamError, RunError
from engine.runtime.sampling.answers import AnswerLimits, SampledToken
from engine.runtime.sampling.drawing import Drawing
from engine.runtime.sampling.generate import Decoding, Sampler
from engine.tools.chat.chat_engines import ChatEngine

Drawn: TypeAlias = SampledToken | RamstreamError
"""A token of an answer, or why it ended too early."""
Post: TypeAlias = Callable[[Callable[[], None]], Any]
"""Runs a function on the thread that takes the tokens, such as an event loop's
`call_soon_threadsafe`.
"""
BORROWED_IDLE_SECONDS = 2.0
"""Seconds without requests after which a paused run has its device memory back."""
OVER = "The model is no longer served."


def at_once(work: Callable[[], None]) -> None:
    """Runs `work` here: a `Post` for those whose `take` any thread may call."""
    work()


@dataclass(eq=False)
class AskedAnswer:
    """An answer to draw. `take` gets its tokens, by way of `post`; the last one has a `finish`."""

    prompt: Sequence[int]
    limits: AnswerLimits
    drawing: Drawing
    take: Callable[[Drawn], None]
    post: Post = at_once
    top_logprobs: int = 0


class AnswerWorker:
    """Draws the answers of one `ChatEngine`. All methods may be called from any thread."""

    def __init__(self, chat_engine: ChatEngine):
        self.chat_engine = chat_engine
        self._orders: queue.SimpleQueue[tuple[str, AskedAnswer | None]] = queue.SimpleQueue()
        self._rows: dict[int, AskedAnswer] = {}
        """Answers under way by their row; only the worker's thread has it."""
        self._decoding: Decoding | None = None
        self._held = contextlib.ExitStack()
        self._asked = 0
        self._is_closed = False
        # Under this lock, answers are counted, and asked for only while the worker takes them.
        self._closing = threading.Lock()
        self._patience = BORROWED_IDLE_SECONDS if chat_engine.is_borrowed else None
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    @property
    def asked(self) -> int:
        """Number of answers that are under way or wait."""
        return self._asked

    def ask(self, asked: AskedAnswer) -> None:
        """Begins an answer. Raises RunError once the worker is closed."""
        with self._closing:
            if self._is_closed:
                raise RunError(OVER)
            self._asked += 1
            self._orders.put(("add", asked))

    def cancel(self, asked: AskedAnswer) -> None:
        """Ends an answer whose tokens nobody takes any more."""
        self._orders.put(("cancel", asked))

    def close(self) -> None:
        """Ends all answers, and frees what the device holds for them. The weights stay."""
        with self._closing:
            self._is_closed = True
        self._orders.put(("close", None))
        self._thread.join()
        self._end_decoding()

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        while True:
            orders = self._next_orders()
            if any(kind == "close" for kind, _ in orders):
                self._fail_all(RunError(OVER), orders)
                return
            try:
                self._deliver(self._drawn(orders))
            except Exception as error:  # noqa: BLE001  each who waits is told of any fault
                self._fail_all(self._in_words(error), orders)
                self._end_decoding()

    def _next_orders(self) -> list[tuple[str, AskedAnswer | None]]:
        """Returns the orders that came meanwhile; without answers under way, waits for one."""
        orders = []
        if not self._rows:
            try:
                orders.append(self._orders.get(timeout=self._patience))
            except queue.Empty:
                self._end_decoding()
                orders.append(self._orders.get())
        with contextlib.suppress(queue.Empty):
            while True:
                orders.append(self._orders.get_nowait())
        return orders

    def _drawn(
        self, orders: list[tuple[str, AskedAnswer | None]]
    ) -> list[tuple[AskedAnswer, Drawn]]:
        """Follows the orders, and draws a token of each answer."""
        if self._decoding is not None:
            return self.chat_engine.call(partial(self._round, orders, None))
        if not any(kind == "add" for kind, _ in orders):
            return []
        # A paused run is asked for its sampler before its thread is. Nothing keeps the sampler when
        # no answer is under way: it has the planes of its run.
        return self.chat_engine.call(partial(self._round, orders, self.chat_engine.sampler()))

    def _round(
        self, orders: list[tuple[str, AskedAnswer | None]], sampler: Sampler | None
    ) -> list[tuple[AskedAnswer, Drawn]]:
        """Does what `_drawn` says, on the thread of the model. A sampler is given if none is in
        use.
        """
        drawn: list[tuple[AskedAnswer, Drawn]] = []
        if sampler is not None:
            self._decoding = self._held.enter_context(sampler.decoding())
        assert self._decoding is not None
        for kind, asked in orders:
            if asked is None:
                continue
            if kind == "cancel":
                self._cancel_row(asked)
                continue
            try:
                row = self._decoding.add(
                    asked.prompt, asked.limits, asked.drawing, asked.top_logprobs
                )
            except RamstreamError as error:
                drawn.append((asked, error))
            else:
                self._rows[row] = asked
        if self._rows:
            for token in self._decoding.step():
                if token.row in self._rows:
                    drawn.append((self._rows[token.row], token))
                    if token.finish is not None:
                        del self._rows[token.row]
        return drawn

    def _cancel_row(self, asked: AskedAnswer) -> None:
        for row, each in list(self._rows.items()):
            if each is asked:
                assert self._decoding is not None
                self._decoding.cancel(row)
                del self._rows[row]
                self._count_end()

    def _count_end(self) -> None:
        with self._closing:
            self._asked -= 1

    def _deliver(self, drawn: list[tuple[AskedAnswer, Drawn]]) -> None:
        """Hands tokens over, all of a thread at once."""
        by_post: dict[Post, list[tuple[AskedAnswer, Drawn]]] = {}
        for asked, token in drawn:
            by_post.setdefault(asked.post, []).append((asked, token))
            if isinstance(token, RamstreamError) or token.finish is not None:
                self._count_end()
        for post, tokens in by_post.items():
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                post(partial(_hand_over, tokens))

    def _fail_all(
        self, error: RamstreamError, orders: list[tuple[str, AskedAnswer | None]]
    ) -> None:
        waiting = [asked for kind, asked in orders if kind == "add" and asked is not None]
        failed = dict.fromkeys([*self._rows.values(), *waiting])
        self._rows.clear()
        self._deliver([(asked, error) for asked in failed])

    def _in_words(self, error: Exception) -> RamstreamError:
        if isinstance(error, GpuMemoryError):
            return FitError(
                f"The GPU ran out of memory while {self.chat_engine.label} answered; ask for "
                "shorter answers or fewer at once."
            )
        if isinstance(error, RamstreamError):
            return error
        traceback.print_exc()
        return RunError(
            f"The program failed at this by a fault of its own ({type(error).__name__}); the "
            "terminal in which it runs says where."
        )

    def _end_decoding(self) -> None:
        """Frees what the device holds for answers, on the thread of the model. Where a paused run
        goes on, this is its thread already.
        """
        if self._decoding is None:
            return
        self._decoding = None
        with contextlib.suppress(RamstreamError):
            self.chat_engine.call(self._held.close)
            return
        self._held.close()


def _hand_over(tokens: list[tuple[AskedAnswer, Drawn]]) -> None:
    for asked, token in tokens:
        asked.take(token)
