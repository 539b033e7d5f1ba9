"""Errors that a user can act on: each is one plain sentence, shown as it is in the terminal and on
the screen.
"""

from __future__ import annotations


class RamstreamError(Exception):
    """Base of every error that ends in one sentence for the user: what is wrong, where, and what to
    do.
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
    """The model cannot be loaded or cannot be streamed correctly."""


class FitError(RamstreamError):
    """The job does not fit this machine's host memory, GPU memory or disk."""


class GpuMemoryError(FitError):
    """The GPU ran out of memory. `in_use` is how much was, in words; `account`, what took how much
    and what the plan gives to which buffers; `first`, what to try before settings.
    """

    def __init__(self, in_use: str = "", account: str = "", first: str = ""):
        self.in_use = in_use
        super().__init__(
            f"The GPU ran out of memory{f' ({in_use})' if in_use else ''}{account}; {first}lower "
            "train.micro_batch_size or data.max_seq_len, or set engine.save_level to boundary_host."
        )


class DeviceError(RamstreamError):
    """The GPU or its driver reported an error, or no longer answers."""


class HostMemoryError(RamstreamError):
    """Host memory ran low while a run went on."""


class CheckpointError(RamstreamError):
    """A checkpoint cannot be written, read or verified."""


class DiskFullError(CheckpointError):
    """The disk lacks the space for a checkpoint: `needed` bytes in `folder`, where `free` are;
    `full` is the cause, as the beginning of a sentence.
    """

    def __init__(
        self, sentence: str, folder: str, needed: int, free: int, full: str = "The disk is full"
    ):
        self.folder, self.needed, self.free, self.full = folder, needed, free, full
        super().__init__(sentence)


class CacheError(RamstreamError):
    """Sampling with a key-value cache did not work out; the same answer can be had without one."""


class NonFiniteError(RamstreamError):
    """The loss or the gradient norm became NaN or infinite; no update of that step was applied."""


class RunError(RamstreamError):
    """A run folder does not exist, is in use by another process, or cannot do what was asked."""


_MOST_SAID = 200
"""Characters that another program's error takes of a sentence of ours."""


def first_line(error: BaseException) -> str:
    """What an error of another program says, to stand within a sentence: its first line without the
    full stop, cut where it is long; the name of its class where it says nothing.
    """
    text = "".join(str(error).strip().splitlines()[:1]).rstrip(". ") or type(error).__name__
    return text if len(text) <= _MOST_SAID else f"{text[: _MOST_SAID - 3]}..."
