"""A `HostOptimizer` updates the units of host states, in place, and computes the factors with which
the device updates its own (`engine.runtime.optimizer.device_optimizer`).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np


class GradientChunk(NamedTuple):
    """Chunk of a unit that is updated by itself."""

    start: int
    """First element in the unit."""
    grad: np.ndarray
    """Gradients, flat [elements]."""
    states: tuple[np.ndarray, ...] | None = None
    """Each state of the chunk, uint8 [bytes]; None where they are in planes of the host states."""


class HostStep(NamedTuple):
    """The values of one step of the optimizer, which all units share."""

    number: int
    """Number of the step, from 1."""
    learning_rate: float
    clip_factor: float = 1.0
    """Factor by which gradients are multiplied as they are read."""


class HostOptimizer(ABC):
    """Updates the units of one `HostStates`. Its results do not depend on the number of threads."""

    def __init__(self, seed: int):
        self._seed = seed

    @abstractmethod
    def scalars(self, step: int, learning_rate: float) -> np.ndarray:
        """Returns the scalars of step `step` (from 1), float32 [scalars]."""

    @abstractmethod
    def update(self, unit: str, step: HostStep, chunk: GradientChunk | None = None) -> None:
        """Applies a step to one unit, and returns once the update is complete.

        It reads the plane of gradients and changes every other plane of the unit. With a `chunk`,
        it takes these gradients instead, and changes only their elements; states that the chunk has
        are changed there. A chunk must not cut a block of codes. The interpreter's lock is released
        during the update.
        """

    def update_weights(self, unit: str, step: HostStep, chunk: GradientChunk | None = None) -> None:
        """Applies the step as `update` does, but to the weights alone. `update_moments` must follow
        with the same arguments, before anything changes the gradients. Only plans of optimizers
        that have two passes call it (`engine.config.optimizers`).
        """
        raise NotImplementedError

    def update_moments(self, unit: str, step: HostStep, chunk: GradientChunk | None = None) -> None:
        """Applies to the states the step that `update_weights` has applied to the weights."""
        raise NotImplementedError

    def compile_for(self, two_passes: bool) -> None:
        """Compiles the kernels of `update_weights` and `update_moments` if a plan has these two
        passes. Otherwise the first step would. Raises ValueError where there are none.
        """
        if two_passes:
            raise ValueError("states that are not in fp32 are updated together with the weights")

    def key(self, unit: str, step: int) -> int:
        """Returns the key of the random bits with which states in bf16 are rounded."""
        text = f"{self._seed} {step} {unit}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest())

    @abstractmethod
    def close(self) -> None:
        """Ends the threads. The planes stay with the host states."""
