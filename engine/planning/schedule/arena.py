"""Update buffers share their memory with the fp32 gradient accumulators, because the accumulators
are not needed between the end of a step and the first backward of the next. An `Arena` says where
in this memory each of them begins. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import MainGrad

_ALIGNMENT = 256


@dataclass(frozen=True)
class Arena:
    """Lays out the memory of accumulators and update buffers. Everything is in bytes."""

    bytes: int
    starts: tuple[int, ...]
    """Byte at which each accumulator begins."""
    places: tuple[int, ...]
    """Byte at which each update buffer begins. Spare buffers are not among them."""
    buffer_bytes: int
    main_grad_bytes: tuple[int, ...]

    def main_grads_under(self, number: int) -> list[int]:
        """Returns which accumulators share memory with update buffer `number`."""
        first, last = self.places[number], self.places[number] + self.buffer_bytes
        return [
            at
            for at, (start, size) in enumerate(zip(self.starts, self.main_grad_bytes))
            if start < last and start + size > first
        ]


def lay_out_arena(
    main_grad_bytes: Sequence[int], buffer_bytes: int, buffers: int, choices: PlanChoices
) -> Arena:
    """Returns the arena of these accumulators and of `buffers` update buffers.

    - Accumulators of one round are at the end, and the buffers at the front: only embed, whose
      gradient comes last, completes the accumulators, so as few of the first buffers as possible
      wait for it.
    - Accumulators of several rounds are at the front, in the order in which backward completes
      them, so that the memory of the first buffers is free early.
    - Where rounded gradients are kept in the second half of their accumulators, the buffers are in
      the first halves. Those that find no space there follow the accumulators.
    """
    total = sum(main_grad_bytes)
    start = 0
    if choices.gradients.main_grad != MainGrad.DEVICE:
        start = max(0, buffers * buffer_bytes - total)
        start = -(-start // _ALIGNMENT) * _ALIGNMENT
    starts = tuple(itertools.accumulate(main_grad_bytes[:-1], initial=start))
    places = [number * buffer_bytes for number in range(buffers)]
    if choices.gradients.gradients_in_main_grads:
        places = [
            begin + number * buffer_bytes
            for begin, size in zip(starts, main_grad_bytes)
            for number in range(size // 2 // buffer_bytes)
        ]
        more = range(max(0, buffers - len(places)))
        places = [*places[:buffers], *(total + number * buffer_bytes for number in more)]
    end = max((place + buffer_bytes for place in places), default=0)
    return Arena(
        max(start + total, end), starts, tuple(places), buffer_bytes, tuple(main_grad_bytes)
    )
