"""Errors that a user can act on are defined here.

Each message is one plain sentence, which the terminal and the screen show as it is.
"""

from __future__ import annotations


class RamstreamError(Exception):
    """An error that ends in one sentence for the user says what is wrong, where, and what to do.

    This is the base class of all of them.
    """


class ConfigError(RamstreamError):
    """A setting is wrong. `field` is its dotted name in the preset, such as
    ``train.learning_rate``.
    """

    def __init__(self, field: str, problem: str):
        self.field = field
        super().__init__(f"{field}: {problem}")


class DataError(RamstreamError):
    """The data set cannot be read, has no usable rows, or trains on no token."""


class ModelError(RamstreamError):
    """It is not possible to load the model, or to stream it correctly."""


class FitError(RamstreamError):
    """The job does not fit this machine's host memory, GPU memory or disk."""


class GpuMemoryError(FitError):
    """The GPU ran out of memory.

    `in_use` says in words how much memory was in use. `account` says what took how much, and which
    buffers the plan gives how much to. `first` names what to try before any setting is changed.
    """

    def __init__(self, in_use: str = "", account: str = "", first: str = ""):
        self.in_use = in_use
        amount = f" ({in_use})" if in_use else ""
        super().__init__(
            f"The GPU ran out of memory{amount}{account}; {first}lower "
            "train.micro_batch_size or data.max_seq_len, or set engine.save_level to boundary_host."
        )


class DeviceError(RamstreamError):
    """The GPU or its driver reported an error, or no longer answers."""


class HostMemoryError(RamstreamError):
    """Host memory ran low while a run went on."""


class CheckpointError(RamstreamError):
    """It is not possible to write, read or verify a checkpoint."""


class DiskFullError(CheckpointError):
    """The disk lacks the space for a checkpoint.

    The checkpoint needs `needed` bytes in `folder`, where `free` bytes are free. `full` names the
    cause, as the beginning of a sentence.
    """

    def __init__(
        self, sentence: str, folder: str, needed: int, free: int, full: str = "The disk is full"
    ):
        self.folder = folder
        self.needed = needed
        self.free = free
        self.full = full
        super().__init__(sentence)


class CacheError(RamstreamError):
    """Sampling with a key-value cache failed; the same answer can be computed without one."""


class NonFiniteError(RamstreamError):
    """The loss or the gradient norm became NaN or infinite; no update of that step was applied."""


class RunError(RamstreamError):
    """A run folder does not exist, is in use by another process, or cannot do what was asked."""


_MOST_QUOTED = 200
"""A sentence of ours quotes at most this many characters of another program's error."""


def first_line(error: BaseException) -> str:
    """Returns the first line of another program's error, to stand within a sentence.

    The line loses its full stop and is cut where it is long. An error without words gives the name
    of its class.
    """
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(". ") if lines else ""
    if not text:
        return type(error).__name__
    if len(text) > _MOST_QUOTED:
        return f"{text[: _MOST_QUOTED - 3]}..."
    return text
