"""A `Line` connects two processes of a run: the one that leads, and one that follows.

Both send messages, which are plain data. A thread of each side reads them, so that the end of the
other side is known at once, even while a collective waits. Each side also sends a sign of life
every second. A side that has sent nothing for a minute counts as lost: it may be stopped, or its
machine may be.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

BEAT_SECONDS = 1.0
SILENT_SECONDS = 60.0
"""A side is lost if it has sent nothing for so long."""
_BEAT: Final = "beat"
_END: Final = None


class LostLineError(Exception):
    """The other side has ended, or is silent. The text says which."""


class Line:
    """A `Line` is one end of a connection.

    `take` gets each message in the thread that reads it; where it returns False, the message waits
    for `next`. `lost` is called once, in that thread, when the other side is lost; a line that
    `close` has closed is not lost.
    """

    def __init__(
        self,
        connection: Connection,
        take: Callable[[Any], bool],
        lost: Callable[[str], None],
    ):
        self._connection = connection
        self._take = take
        self._lost = lost
        self._sending = threading.Lock()
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self._closed = threading.Event()
        self._why = ""
        for work in (self._read, self._beat):
            threading.Thread(target=work, name=f"line-{work.__name__}", daemon=True).start()

    def send(self, message: Any) -> None:
        """Sends a message. Raises LostLineError where the other side has ended."""
        try:
            with self._sending:
                self._connection.send(message)
        except (OSError, ValueError) as error:
            raise LostLineError("it has ended") from error

    def next(self) -> Any:
        """Returns the next message that waits. Raises LostLineError once the other side is lost."""
        message = self._messages.get()
        if message is _END:
            self._messages.put(_END)  # for a later call
            raise LostLineError(self._why)
        return message

    def close(self) -> None:
        """Ends the line, without a word to the other side."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._connection.close()

    # ------------------------------------------------------------------ threads

    def _read(self) -> None:
        why = ""
        while not why:
            try:
                if not self._connection.poll(BEAT_SECONDS):
                    if time.monotonic() - self._heard > SILENT_SECONDS:
                        why = f"it has been silent for {SILENT_SECONDS:.0f} s"
                    continue
                message = self._connection.recv()
            except (OSError, EOFError, ValueError, TypeError):
                why = "it has ended"
                break
            self._heard = time.monotonic()
            if message != _BEAT and not self._take(message):
                self._messages.put(message)
        self._why = why
        if not self._closed.is_set():
            self._lost(why)
        self._messages.put(_END)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self.send(_BEAT)
            except LostLineError:
                return
