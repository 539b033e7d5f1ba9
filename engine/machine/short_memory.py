"""Memory that is too short for this process, reported with the limit that it met, wherever it
shows: libraries wrap such errors into their own, and a limit of address space (`ulimit -v`) also
keeps libraries from being loaded and threads from being started.
"""

from __future__ import annotations

import errno
import resource
from enum import Enum

import psutil

from engine.errors import HostMemoryError
from engine.machine.cgroups import cgroup_memory, sample_host_memory
from engine.text import MIB, in_gib

_ERROR_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "failed to map segment",
    "can't start new thread",
    "out of memory interning",
    "std::bad_alloc",
)
"""Texts in a library's error that mean a lack of host memory."""


class Work(Enum):
    """Work that a process is about to do, with the address space and the RAM that it needs at
    least, whatever the model: most of it for libraries. They were measured with one thread on two
    cores.
    """

    APP = "the app", 550 * MIB, 150 * MIB
    COMMAND = "this command", 820 * MIB, 250 * MIB
    RUN = "a run of even the smallest model", 1_150 * MIB, 400 * MIB

    @property
    def named(self) -> str:
        return self.value[0]

    @property
    def addresses(self) -> int:
        return self.value[1]

    @property
    def resident(self) -> int:
        return self.value[2]


def is_short_of_memory(error: BaseException | None) -> bool:
    """Returns whether an error, or what it was raised from, is a lack of host memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError | HostMemoryError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        text = str(error).casefold()
        is_of_library = isinstance(error, RuntimeError | ImportError | SystemError | OSError)
        if is_of_library and any(words in text for words in _ERROR_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def refuse_short_memory(error: BaseException, during: str) -> None:
    """Raises HostMemoryError if `error` is a lack of host memory. `during` is a clause, such as
    "while the tokenizer was read".
    """
    if isinstance(error, HostMemoryError):
        raise error
    if is_short_of_memory(error):
        raise HostMemoryError(
            f"The host ran out of memory {during}: {memory_text()}; {remedy()}."
        ) from error


def refuse_little_memory(work: Work) -> None:
    """Raises HostMemoryError where this process may not take what the work needs at least: some
    libraries end the process without a word where they get no memory.
    """
    limit, _ = _addresses()
    if limit is not None and limit < work.addresses:
        raise HostMemoryError(
            f"Memory is too short: this process may take {in_gib(limit)} of address space (ulimit "
            f"-v), and {work.named} needs {in_gib(work.addresses)} at least; {remedy()}."
        )
    most = min(cgroup_memory()[0], psutil.virtual_memory().total)
    if most < work.resident:
        raise HostMemoryError(
            f"Memory is too short: this process may take {in_gib(most)}, and {work.named} needs "
            f"{in_gib(work.resident)} at least; {remedy()}."
        )


def memory_text() -> str:
    """Returns how much of its memory this process has taken."""
    limit, taken = _addresses()
    resident, free = sample_host_memory()
    if limit is not None:
        return (
            f"this process has taken {in_gib(taken)} of the {in_gib(limit)} of address space that "
            "it may take (ulimit -v)"
        )
    return f"this process takes {in_gib(resident)}, and {in_gib(free)} are free"


def remedy() -> str:
    """Returns what a person can do about a lack of memory, whatever was under way."""
    limit, _ = _addresses()
    if limit is None:
        return "free some memory"
    return "raise that limit, for example by ulimit -v unlimited"


def _addresses() -> tuple[int | None, int]:
    """Returns the limit of address space, None without one, and what is taken of it, in bytes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = psutil.Process().memory_info().vms
    return (None if limit == resource.RLIM_INFINITY else limit), taken
