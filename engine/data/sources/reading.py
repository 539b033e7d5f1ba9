"""Errors of reading a file as one sentence with its name and the place."""

from __future__ import annotations

import contextlib
import csv
import errno
from collections.abc import Callable, Iterator

from engine.errors import DataError, first_line


class Damaged(Exception):
    """Raised for a compressed file that ends too early or holds what its compression cannot mean.
    The message continues the sentence after the file's name: is cut off.
    """


@contextlib.contextmanager
def errors_with_place(name: str, place: Callable[[], str]) -> Iterator[None]:
    """Turns the errors of reading the file `name` into DataErrors. `place` returns the place up to
    which the file was read, such as "line 3".
    """
    try:
        yield
    except Damaged as error:
        raise DataError(f"{name} {error} after {place()}; write or fetch it again.") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not {error.encoding.upper()} text after {place()}; save the file as UTF-8."
        ) from None
    except csv.Error as error:
        raise DataError(
            f"{name} cannot be read after {place()} ({error}); put texts with line ends in double "
            "quotes."
        ) from None
    except MemoryError:
        raise DataError(
            f"{name} cannot be read after {place()}, because the memory is too small; free some "
            "memory, or divide the file."
        ) from None
    except OSError as error:
        if error.errno == errno.ENOSPC:  # not of the file that is read
            raise
        raise DataError(
            f"{name} cannot be read after {place()} ({reason(error)}); check the file and its disk."
        ) from None


def reason(error: BaseException) -> str:
    """Returns the cause of an error in a few words."""
    strerror = getattr(error, "strerror", None)
    return strerror or first_line(error)
