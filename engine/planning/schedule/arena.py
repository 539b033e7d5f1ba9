"""Update buffers share their memory with the fp32 sums of gradients, because the sums are not
needed between the end of a step and the first backward of the next. An `Arena` says where in this
memory each of them begins. No torch.
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
    """An `Arena` lays out the memory of sums and update buffers. Everything is in bytes."""

    bytes: int
    starts: tuple[int, ...]
    """Each sum begins here."""
    places: tuple[int, ...]
    """Each update buffer begins here. Spare buffers are not among them."""
    buffer_bytes: int
    sum_bytes: tuple[int, ...]

    def sums_under(self, number: int) -> list[int]:
        """Returns which sums share memory with update buffer `number`."""
        first, last = self.places[number], self.places[number] + self.buffer_bytes
        return [
            at
            for at, (start, size) in enumerate(zip(self.starts, self.sum_bytes))
            if start < last and start + size > first
        ]


def lay_out_arena(
    sum_bytes: Sequence[int], buffer_bytes: int, buffers: int, choices: PlanChoices
) -> Arena:
    """Returns the arena of these sums and of so many update buffers.

    - Sums of one round are at the end, and the buffers at the front: only embed, whose gradient
      comes last, completes the sums, so as few of the first buffers as possible wait for it.
    - Sums of several rounds are at the front, in the order in which backward completes them, so
      that the memory of the first buffers is free early.
    - Where rounded gradients are kept in the second half of their sums, the buffers are in the
      first halves. Those that find no space there follow the sums.
    """
    total = sum(sum_bytes)
    start = 0
    if choices.main_grad != MainGrad.DEVICE:
        start = max(0, buffers * buffer_bytes - total)
        start = -(-start // _ALIGNMENT) * _ALIGNMENT
    starts = tuple(itertools.accumulate(sum_bytes[:-1], initial=start))
    places = [number * buffer_bytes for number in range(buffers)]
    if choices.gradients_in_main_grads:
        places = [
            begin + number * buffer_bytes
            for begin, size in zip(starts, sum_bytes)
            for number in range(size // 2 // buffer_bytes)
        ]
        more = range(max(0, buffers - len(places)))
        places = [*places[:buffers], *(total + number * buffer_bytes for number in more)]
    end = max((place + buffer_bytes for place in places), default=0)
    return Arena(max(start + total, end), starts, tuple(places), buffer_bytes, tuple(sum_bytes))
