"""Failures that end a run, or that it can recover from.

All causes take one path: numbers that are not finite, a lack of memory, a lost device, a failed
kernel or compilation, and a fault in the program. `Trainer` saves the last good step for each of
them, if the planes are whole (`engine.runtime.host.plane_version`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from engine.errors import (
    DeviceError,
    GpuMemoryError,
    HostMemoryError,
    NonFiniteError,
    RamstreamError,
    first_line,
)
from engine.planning.fit.memory_items import Item
from engine.runs.record.events import RunEnded
from engine.training.loop.explain import explained


class FailureKind(Enum):
    """Kinds of failures, by what the run can do about them."""

    NON_FINITE = auto()
    """A loss or a norm is not finite. The step can be skipped."""
    GPU_MEMORY = auto()
    """The step can be planned with less."""
    HOST_MEMORY = auto()
    DEVICE = auto()
    """The device is lost, and nothing can be read from it any more."""
    OTHER = auto()
    """The input, the system or the program is at fault."""


_KINDS: tuple[tuple[type[RamstreamError], FailureKind], ...] = (
    (NonFiniteError, FailureKind.NON_FINITE),
    (GpuMemoryError, FailureKind.GPU_MEMORY),
    (HostMemoryError, FailureKind.HOST_MEMORY),
    (DeviceError, FailureKind.DEVICE),
)


@dataclass(frozen=True)
class Failure:
    """A failure: a sentence for the user and the name of the error's type.

    `trace` is the traceback for the log. It is empty if the sentence is complete.
    """

    kind: FailureKind
    sentence: str
    error_type: str
    trace: str = ""

    def ended(self, kept: str = "") -> RunEnded:
        """Returns the last event of a run. `kept` is a sentence on what is saved."""
        return RunEnded("failed", f"{self.sentence} {kept}".rstrip(), self.error_type)


def failure_of(error: Exception, gpu_items: Iterable[Item] = ()) -> Failure:
    """Returns the failure that `error` stands for.

    `gpu_items` are the plan's buffers on the device, used to explain a lack of device memory.
    """
    own = isinstance(error, RamstreamError) and not isinstance(error, GpuMemoryError)
    trace = "" if own else "".join(traceback.format_exception(error))
    explanation = explained(error, gpu_items)
    if explanation is None:
        name, message = type(error).__name__, first_line(error)
        what = name if message == name else f"{name}: {message}"
        sentence = (
            f"An error in the program ended the run ({what}); the log of the run has the details."
        )
        return Failure(FailureKind.OTHER, sentence, name, trace)
    sentence = str(explanation)
    if isinstance(explanation, HostMemoryError) and not sentence.endswith("."):
        # The memory watch gives the account alone.
        sentence += "; free some memory or lower train.micro_batch_size, and resume."
    kind = next(
        (kind for type_, kind in _KINDS if isinstance(explanation, type_)), FailureKind.OTHER
    )
    return Failure(kind, sentence, type(explanation).__name__, trace)


def forget_frames(error: BaseException) -> None:
    """Frees the tensors that the frames of `error` hold, before a step is tried again."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
