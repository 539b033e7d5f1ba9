"""Update buffers share their memory with the fp32 gradient accumulators, because the accumulators
are not needed between the end of a step and the first backward of the next. An `Arena` says where
in this memory each of them begins. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from engine.planning.schedule.ops import MainGrad

_ALIGNMENT = 256


@dataclass(frozen=True)
class Arena:
    """Lays out the memory of accumulators and update buffers. Everything is in bytes."""

    bytes: int
    starts: tuple[int, ...]
    """Byte at which each accumulator begins."""
    buffer_bytes: int
    """Bytes of an update buffer. The buffers follow each other, from the front on."""
    main_grad_bytes: tuple[int, ...]

    def main_grads_under(self, number: int) -> list[int]:
        """Returns which accumulators share memory with update buffer `number`."""
        first, last = number * self.buffer_bytes, (number + 1) * self.buffer_bytes
        return [
            at
            for at, (start, size) in enumerate(zip(self.starts, self.main_grad_bytes))
            if start < last and start + size > first
        ]


def lay_out_arena(
    main_grad_bytes: Sequence[int], buffer_bytes: int, buffers: int, main_grad: MainGrad
) -> Arena:
    """Returns the arena of these accumulators and of `buffers` update buffers, which are at the
    front.

    - Accumulators of one round are at the end: only embed, whose gradient comes last, completes the
      accumulators, so as few of the first buffers as possible wait for it.
    - Accumulators of several rounds are at the front, too, in the order in which backward completes
      them, so that the memory of the first buffers is free early.
    """
    total = sum(main_grad_bytes)
    start = 0
    if main_grad != MainGrad.DEVICE:
        start = max(0, buffers * buffer_bytes - total)
        start = -(-start // _ALIGNMENT) * _ALIGNMENT
    starts = tuple(itertools.accumulate(main_grad_bytes[:-1], initial=start))
    size = max(start + total, buffers * buffer_bytes)
    return Arena(size, starts, buffer_bytes, tuple(main_grad_bytes))
