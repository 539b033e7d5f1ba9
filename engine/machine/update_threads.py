"""The number of threads of the host that work on planes. No torch."""

from __future__ import annotations

MAX_THREADS = 32
"""With more threads than this little is gained, because host memory is saturated: on a node with 64
cores, 62 threads updated 12 % more of a large model than 32, and as much of a unit.
"""
FREE_CORES = 2
"""Number of cores of a machine with eight or more that are left free for the threads that launch
the device's work.
"""


def threads_of(cores: int) -> int:
    """Returns the number of threads that work on planes where so many cores may be used."""
    return min(cores - FREE_CORES if cores >= 4 * FREE_CORES else cores, MAX_THREADS)
