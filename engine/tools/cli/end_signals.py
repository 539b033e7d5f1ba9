"""The three signals that ask the program to end: SIGINT (Ctrl-C), SIGTERM (`kill`, `docker stop`,
systemd) and SIGHUP (the terminal was closed).

The first one asks, and what is under way is stopped and saved. A second one leaves at once. Not
every further signal is a second request: a terminal that closes sends it up to three times, once by
each of its shells and once by the system, and systemd sends SIGHUP right after SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

SAME_REQUEST = 1.0
"""Seconds after the first signal within which a SIGTERM belongs to it. A person who presses Ctrl-C
twice may be quicker.
"""


class Interrupted(KeyboardInterrupt):
    """Raised by a signal in a command that cleans up after itself; `number` is the signal's."""

    def __init__(self, number: int):
        self.number = number
        super().__init__()


class EndSignals:
    """A context in which the first of the signals calls `ask` with its number and whether a machine
    sends it, which may soon end the program by force; a second one leaves at once.

    Python calls `ask` in the main thread, between any two of its instructions, so `ask` must take
    no lock. An instruction may take minutes, if it computes: so a thread of its own calls `expect`
    at once when a machine sends a signal. In a thread other than the main one, the context does
    nothing.
    """

    def __init__(self, ask: Callable[[int, bool], None], expect: Callable[[], None] | None = None):
        self._ask = ask
        self._expect = expect
        self._pipe: tuple[int, int] | None = None
        """End of the pipe to that thread, and what Python wrote signals to before."""
        self._before: dict[int, Any] = {}
        self._since = 0.0
        self.first: int | None = None
        """Number of the first signal that arrived, if any."""

    def __enter__(self) -> EndSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in _numbers()}
            if self._expect is not None:
                self._listen(self._expect)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pipe is not None:
            end, before = self._pipe
            signal.set_wakeup_fd(before)
            os.close(end)  # so the thread ends
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _listen(self, expect: Callable[[], None]) -> None:
        """Starts the thread that calls `expect`. The system writes each signal to a pipe."""
        begin, end = os.pipe()
        os.set_blocking(end, False)
        self._pipe = end, signal.set_wakeup_fd(end, warn_on_full_buffer=False)

        def listen() -> None:
            while numbers := os.read(begin, 64):
                if any(number in self._before and number != signal.SIGINT for number in numbers):
                    expect()
            os.close(begin)

        threading.Thread(target=listen, name="end-signals", daemon=True).start()

    def _take(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _forget_closed_terminal()
        if self.first is None:
            self.first, self._since = number, time.monotonic()
            self._ask(number, number != signal.SIGINT)
        elif self._is_second_request(number):
            leave_at_once(number)

    def _is_second_request(self, number: int) -> bool:
        if number == signal.SIGTERM:
            return time.monotonic() - self._since >= SAME_REQUEST
        return number != signal.SIGHUP


def leave_at_once(number: int) -> NoReturn:
    """Ends the program with the exit code of a signal. It waits for no thread, and runs no
    finalizer.
    """
    os._exit(128 + number)


def interrupt(number: int, _: bool) -> NoReturn:
    """Ends a command that cleans up after itself, as Ctrl-C does; `EndSignals` takes it as `ask`.
    Raises Interrupted.
    """
    raise Interrupted(number)


def write_line(text: str) -> None:
    """Writes a line to the error output, which may be closed. A signal handler may call this."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _numbers() -> tuple[int, ...]:
    # nohup starts a program with SIGHUP ignored, and it must remain ignored.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def _forget_closed_terminal() -> None:
    """Discards from now on what would be written to a terminal that is closed: each line would
    fail, and end the thread that prints it.
    """
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            is_device = stat.S_ISCHR(os.fstat(stream).st_mode)
            if is_device and not os.isatty(stream):  # a closed terminal is none any more
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream)
                os.close(null)
