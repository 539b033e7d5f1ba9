"""Unforeseen errors as a sentence, so that no page waits for ever."""

from __future__ import annotations

import sys
import traceback

from engine.errors import RamstreamError, first_line


def unforeseen(error: BaseException) -> str:
    """Returns a sentence for any error. The traceback of a fault of the program is printed in the
    terminal.

    Raises the error again if it is not one but ends the program or a thread.
    """
    if isinstance(error, RamstreamError):
        return str(error)
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    if isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f": {error.filename}"
        return f"The system refused this ({error.strerror}{place}); choose other data or a folder."
    if isinstance(error, MemoryError):
        return "Memory ran out while this was read; choose something smaller."
    traceback.print_exception(error, file=sys.stderr)
    name, text = type(error).__name__, first_line(error)
    what = name if text == name else f"{name}: {text}"
    return (
        f"The program failed at this by a fault of its own ({what}); the terminal in which it runs "
        "says where."
    )
