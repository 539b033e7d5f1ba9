"""A command can be started with closed streams, into a pipe that closes or onto a full disk. These
functions keep its standard streams usable, so that it ends with a sentence all the same.
"""

from __future__ import annotations

import io
import os
import sys


class OutputError(Exception):
    """Raised when the answer of a command cannot be written. The text is a sentence, or empty if
    the reader of a pipe, such as `head`, has closed it because it has enough.
    """


def show(text: str = "", end: str = "\n") -> None:
    """Prints `text`, and waits until it is written. Raises OutputError if it cannot be."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        _discard_output()
        raise OutputError from None
    except OSError as error:
        _discard_output()
        raise OutputError(f"The output cannot be written ({error.strerror}).") from None


def open_closed_streams() -> None:
    """Opens the null device in place of standard streams that are closed.

    Otherwise the next file that is opened would get the number of such a stream, and take what is
    meant for it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free, which is this
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def write_any_name() -> None:
    """Makes a terminal that cannot write a character, such as one of a run's name, show its code
    instead of ending the command.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Discards what could not be written, so that Python does not report an error when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
