"""One connection between rank 0 and a worker.

Both send messages (`engine.runtime.distributed.messages`). A thread of each side reads them, so
that the end of the other side is known at once, even while a collective waits. Each side also sends
a sign of life every second. A worker counts as lost if it has sent nothing for a
minute: it may be stopped. Rank 0 may be silent: a person may stop it in a terminal for an
hour, and go on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from engine.errors import first_line
from engine.runtime.distributed.message_stream import Connection
from engine.runtime.distributed.messages import Beat, Message

BEAT_SECONDS = 1.0
SILENT_SECONDS = 60.0
"""Seconds after which a side that has sent nothing is lost."""
FIRST_SECONDS = 300.0
"""Seconds for which it may be silent at first: a process that starts imports torch, perhaps from a
slow disk.
"""
_END: Final = None


class ConnectionLostError(Exception):
    """The other side has ended, or is silent. The text says which."""


class MonitoredConnection:
    """One end of a connection.

    `take` gets each message in the thread that reads it; where it returns False, the message waits
    for `next`. `lost` is called once, in that thread, when the other side is lost; a connection
    that `close` has closed is not lost. minds_silence: a side that is silent is lost, too.
    """

    def __init__(
        self,
        connection: Connection,
        take: Callable[[Message], bool],
        lost: Callable[[str], None],
        minds_silence: bool = True,
    ):
        self._connection = connection
        self._take = take
        self._lost = lost
        self._minds_silence = minds_silence
        self._sending = threading.Lock()
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self._patience = FIRST_SECONDS
        self._closed = threading.Event()
        self._why = ""
        self.threads = tuple(
            threading.Thread(target=work, name=f"connection-{work.__name__}", daemon=True)
            for work in (self._read, self._beat)
        )
        for thread in self.threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Sends a message. Raises LostLineError where the other side has ended."""
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            raise ConnectionLostError("it has ended") from error

    def next(self) -> Message:
        """Returns the next message that waits. Raises LostLineError once the other side is lost."""
        message = self._messages.get()
        if message is _END:
            self._messages.put(_END)  # for a later call
            raise ConnectionLostError(self._why)
        return message

    def close(self) -> None:
        """Ends the connection, without a word to the other side. It may be called twice."""
        self._closed.set()
        for thread in self.threads:
            # The number of a closed file may soon be another file's, which no thread may read.
            thread.join(2 * BEAT_SECONDS)
        with self._sending, contextlib.suppress(OSError):
            self._connection.close()

    # ------------------------------------------------------------------ threads

    def _read(self) -> None:
        why = ""
        while not why and not self._closed.is_set():
            try:
                why = self._read_one()
            except (OSError, EOFError):
                why = "it has ended"
            except Exception as error:  # noqa: BLE001  nobody else would learn of it
                why = f"a message from it could not be read ({first_line(error)})"
        self._why = why or "the connection is closed"
        if not self._closed.is_set():
            self._lost(why)
        self._messages.put(_END)

    def _read_one(self) -> str:
        """Reads a message, if one comes soon. Returns why the other side is lost, or ""."""
        if not self._connection.poll(BEAT_SECONDS):
            is_silent = time.monotonic() - self._heard > self._patience
            # Where this process was stopped itself, signs of life are waiting.
            if is_silent and self._minds_silence and not self._connection.poll():
                return f"it has been silent for {self._patience:.0f} s"
            return ""
        message = self._connection.receive()
        self._heard, self._patience = time.monotonic(), SILENT_SECONDS
        if not isinstance(message, Beat):
            self._hand_over(message)
        return ""

    def _hand_over(self, message: Message) -> None:
        try:
            is_taken = self._take(message)
        except OSError as error:
            raise RuntimeError(first_line(error)) from error  # the connection is not its cause
        if not is_taken:
            self._messages.put(message)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self.send(Beat())
            except ConnectionLostError:
                return
