"""A bound on the memory of a part of a data file once it is decompressed. A stranger's file of a
megabyte may stand for a terabyte, and what an honest program has written may be large as well.
"""

from __future__ import annotations

from engine.errors import DataError
from engine.machine.cgroups import sample_host_memory
from engine.text import in_gib

_ALWAYS_READ = 256 << 20
"""Largest number of bytes of a part that is read however little memory is available."""
_USUAL_BYTES = 2 << 30
"""Number of bytes that a part may have whatever it was compressed from."""
_HONEST_RATIO = 64
"""Ratio above which texts are rarely compressed: a larger part needs a file in proportion."""


def refuse_too_large(what: str, needed: int, stored: int, remedy: str) -> None:
    """Raises DataError if a part of a file takes too much memory.

    what: the part, as the subject of a sentence. needed: bytes that it takes when it is
    decompressed. stored: bytes that it has in the file.
    """
    if needed <= _ALWAYS_READ:
        return
    _, available = sample_host_memory()
    honest = min(_HONEST_RATIO * stored, available // 2)
    most = min(available, max(_USUAL_BYTES, honest))
    if needed > most:
        raise DataError(
            f"{what} that takes {in_gib(needed)} of memory when it is decompressed, and at most "
            f"{in_gib(most)} are given to it; {remedy}."
        )
