"""Errors that a user can act on.

Each message is one plain sentence, which the terminal and the screen show unchanged.
"""

from __future__ import annotations


class RamstreamError(Exception):
    """An error that is shown to the user as one sentence: what is wrong, where, and what to do.

    It is the base class of all errors in this module.
    """


class ConfigError(RamstreamError):
    """A wrong setting. `field` is its dotted name in the preset, such as
    ``train.learning_rate``.
    """

    def __init__(self, field: str, problem: str):
        self.field = field
        super().__init__(f"{field}: {problem}")


class DataError(RamstreamError):
    """A data set that cannot be read, has no usable rows, or has no tokens to train on."""


class ModelError(RamstreamError):
    """The model fails to load, or it cannot be streamed correctly."""


class FitError(RamstreamError):
    """A job that does not fit this machine's host memory, GPU memory or disk."""


class GpuMemoryError(FitError):
    """The GPU ran out of memory.

    `in_use` is a text on how much memory was in use. `breakdown` is one on what each item took, and
    how much the plan gives to each buffer. `first` names what to try before changing a setting.
    `is_least`: the minimum-memory plan was tried, so no setting of the plan helps.
    """

    def __init__(
        self, in_use: str = "", breakdown: str = "", first: str = "", is_least: bool = False
    ):
        self.in_use = in_use
        self.breakdown = breakdown
        amount = f" ({in_use})" if in_use else ""
        remedy = (
            "lower train.micro_batch_size or set engine.activation_checkpointing to offload and "
            "resume, or start a new run with a lower "
            "data.max_seq_len (from this run's weights, if any are "
            "saved)."
        )
        if is_least:
            remedy = (
                "no plan takes less; start a new run with a lower data.max_seq_len (from this "
                "run's weights, if any are saved), or use a GPU with more memory."
            )
        super().__init__(f"The GPU ran out of memory{amount}{breakdown}; {first}{remedy}")


class DeviceError(RamstreamError):
    """The GPU or its driver reported an error or stopped responding."""


class HostMemoryError(RamstreamError):
    """RAM ran low during a run."""


class LostPlanesError(RamstreamError):
    """Planes that lived on the device and are lost with it."""


class DiskOffloadError(RamstreamError):
    """A disk that refuses to keep, read or write moments (`engine.disk`)."""


class CheckpointError(RamstreamError):
    """Writing, reading or verifying a checkpoint failed."""


class DiskFullError(CheckpointError):
    """The disk lacks the space for a checkpoint.

    The checkpoint needs `needed` bytes in `folder`, where `free` bytes are free. `full` is the
    beginning of a sentence and names the cause.
    """

    def __init__(
        self, sentence: str, folder: str, needed: int, free: int, full: str = "The disk is full"
    ):
        self.folder = folder
        self.needed = needed
        self.free = free
        self.full = full
        super().__init__(sentence)


class RankError(RamstreamError):
    """A process that computes a run together with others has failed, is lost or is silent. The
    sentence names its rank, and the run cannot continue.
    """


class CacheError(RamstreamError):
    """Sampling with a key-value cache failed. The same answer can be computed without the cache."""


class NonFiniteError(RamstreamError):
    """The loss or the gradient norm became NaN or infinite; no update of that step was applied.

    `step` is that step, or None if the loss is that of an evaluation. `what` names the number.
    """

    def __init__(self, sentence: str, step: int | None = None, what: str = "loss"):
        self.step = step
        self.what = what
        super().__init__(sentence)


class RunError(RamstreamError):
    """A run folder that does not exist, is in use by another process, or cannot do what is
    requested.
    """


_MOST_QUOTED = 200
"""A message of this program quotes at most this many characters from another program's error."""


def first_line(error: BaseException) -> str:
    """Returns the first line of another program's error, for use within a sentence.

    The full stop is removed and a long line is shortened. For an error without a message, the name
    of its class is returned.
    """
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(". ") if lines else ""
    if not text:
        return type(error).__name__
    if isinstance(error, KeyError):  # its message is only the key
        text = f"there is no {text}"
    if len(text) > _MOST_QUOTED:
        return f"{text[: _MOST_QUOTED - 3]}..."
    return text
