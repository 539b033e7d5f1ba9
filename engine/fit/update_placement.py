"""Where each unit's optimizer runs: on the host, or on the device, to which its states are
streamed. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.fit.cost import Cost, host_rate
from engine.model.shape import UnitShape
from engine.plan.buffers import EMBED, HEAD
from engine.plan.choices import PlanChoices
from engine.plan.device_updates import LEAD
from engine.plan.ops import GradientSum, OpKind


def choose_homes(cost: Cost, choices: PlanChoices) -> tuple[tuple[str, ...], float]:
    """Which units' optimizers run on the device, and about how long the first forward pass waits
    for updates then.

    In the order in which the forward pass needs them, each unit goes to where its weights are ready
    first: the host, or the device, to which states are streamed through `choices.update_buffers`
    buffers. None do where the host alone, which the busy bus slows down, is faster.
    """
    ways = [_Homes(cost, choices, buffers) for buffers in {0, choices.update_buffers}]
    best = min(ways, key=lambda homes: homes.waited)
    return best.units, best.waited


class _Homes:
    """One pass over the units; the seconds that each clock shows count from the end of the step's
    backward.
    """

    def __init__(self, cost: Cost, choices: PlanChoices, buffers: int):
        self._cost, self._rates, self._shape = cost, cost.rates, cost.shape
        adamw, shape = host_rate(cost.rates, buffers > 0), cost.shape
        streamed = shape.blocks[: len(shape.blocks) - choices.resident_blocks]
        # Updated in the slot in which they are.
        self._placed = {
            EMBED,
            HEAD,
            *(unit.name for unit in shape.blocks[len(streamed) :]),
            *(unit.name for unit in streamed[: choices.slots]),
        }
        self._staged = {unit.name for unit in (shape.embed, *shape.blocks[:2])}
        self._piece = max(unit.numel for unit in shape.blocks)
        passes = choices.micro_batches // choices.rounds
        self._own = buffers - choices.spare_buffers
        self._free = self._buffers_free(choices, buffers, passes)
        lender = (
            shape.blocks[len(shape.blocks) - choices.spare_blocks].name
            if choices.spare_blocks
            else None
        )
        lanes = _Lanes(choices.spare_buffers, self._own)
        host, homes, ready_at = 0.0, [], {}
        for unit in shape.units:
            on_host = host + unit.numel / adamw + self._prefetch(unit)
            before = lanes.mark()
            ready = self._on_device(unit, lanes) if buffers else math.inf
            if ready < on_host:
                homes.append(unit.name)
            else:
                lanes.back_to(before)
                host, ready = host + unit.numel / adamw, on_host
                lanes.prefetch(self._prefetch(unit))
            ready_at[unit.name] = ready
        if lender is not None and buffers:
            ready_at[lender] = max(ready_at[lender], lanes.spares_sent())
        now = self.waited = 0.0
        for unit in shape.units:
            self.waited += max(0.0, ready_at[unit.name] - now)
            now = max(now, ready_at[unit.name])
            if unit.name not in (EMBED, HEAD):
                now += passes * cost.forward(unit.name)
        self.units = tuple(homes)

    def _buffers_free(self, choices: PlanChoices, buffers: int, passes: int) -> list[float]:
        """When the first states can be fetched into each buffer: those that are made from
        activations, and those that lie over fp32 sums, wait for backward.
        """
        blocks, ends = list(reversed(self._shape.blocks)), []
        time = -passes * sum(self._cost.backward(unit.name) for unit in blocks)
        for unit in blocks:
            time += passes * self._cost.backward(unit.name)
            ends.append(time)
        free = [ends[choices.spare_blocks - 1]] * min(choices.spare_buffers, buffers)
        done, end, size = 0, 0, self._piece * self._cost.state_bytes
        for own in range(buffers - len(free)):
            while (
                choices.gradient_sum == GradientSum.DEVICE
                and end < (own + 1) * size
                and done < len(blocks)
            ):
                end += 4 * blocks[done].numel
                done += 1
            free.append(ends[done - 1] if done else -math.inf)
        return free

    def _on_device(self, unit: UnitShape, lanes: _Lanes) -> float:
        """When the unit's weights are there; the lanes' clocks go on."""
        cost, ready = self._cost, 0.0
        placed = unit.name in self._placed
        for start in range(0, unit.numel, self._piece):
            size, number = min(self._piece, unit.numel - start), len(lanes.updated)
            earlier = number - len(self._free)
            while earlier >= 0 and len(lanes.freed) < earlier + min(LEAD, self._own):
                lanes.send_states()
            free = self._free[number] if earlier < 0 else lanes.freed[earlier]
            fetched = [OpKind.FETCH_STATES] + (
                [] if unit.name in self._staged else [OpKind.FETCH_GRADIENT]
            )
            there = lanes.fetch(
                free, lambda early: [cost.carried(kind, size, early) for kind in fetched]
            )
            updated = max(0.0, there) + size * 2 * cost.state_bytes / self._rates.device_memory
            weights = cost.carried(OpKind.OFFLOAD_WEIGHTS, size)
            lanes.update(
                updated, cost.carried(OpKind.OFFLOAD_STATES, size) + (weights if placed else 0.0)
            )
            ready = max(ready, updated if placed else lanes.send_weights(updated, weights))
            if earlier < 0:
                lanes.first_weights_are_sent()
        if placed:
            return ready
        # On the same bus as the states that come after it.
        lanes.prefetch(self._prefetch(unit))
        return ready + self._prefetch(unit)

    def _prefetch(self, unit: UnitShape) -> float:
        return unit.numel * self._shape.item_bytes / self._rates.h2d_busy


@dataclass
class _Lanes:
    """What the lanes of optimizers on the device have done so far: the order of
    `engine.plan.device_updates` in seconds, but that pieces in spare buffers count as fetched
    before all others.
    """

    spare: int
    """Pieces, the first, in spare buffers."""
    first: int
    """Pieces after them that are fetched before the gradients are complete."""
    inward: float = -math.inf
    outward: float = 0.0
    weights_sent: float = 0.0
    """When the weights of the pieces that were there first are on the host."""
    updated: list[float] = field(default_factory=list)
    """When each piece was updated."""
    owed: list[float] = field(default_factory=list)
    """How long the rest of each piece takes to send."""
    freed: list[float] = field(default_factory=list)
    """When each piece that was sent left its buffer, spare ones left out: one of those is sent
    between two others.
    """

    def fetch(self, free: float, seconds: Callable[[bool], list[float]]) -> float:
        """A piece comes in once its buffer is `free`; when it is there. seconds: of its copies, by
        whether they begin while nothing is updated yet.
        """
        self.inward = max(self.inward, free)
        for copy in seconds(self.inward < 0):
            self.inward += copy
        return self.inward

    def prefetch(self, seconds: float) -> None:
        """Weights for the forward pass take the bus for so long."""
        self.inward = max(0.0, self.inward) + seconds

    def update(self, at: float, owed: float) -> None:
        """The next piece is updated; the rest of it takes `owed` seconds to send."""
        self.updated.append(at)
        self.owed.append(owed)

    def send_weights(self, updated: float, seconds: float) -> float:
        """When the weights of a piece are on the host."""
        self.outward = max(self.outward, updated) + seconds
        return self.outward

    def first_weights_are_sent(self) -> None:
        """So far; the piece was one of those that were there first."""
        self.weights_sent = self.outward

    def send_states(self) -> None:
        """Of the next piece that is not in a spare buffer; one of those goes out between two
        others.
        """
        if 0 < len(self.freed) <= self.spare:
            self._send(len(self.freed) - 1)
        self._send(self.spare + len(self.freed))
        self.freed.append(self.outward)

    def spares_sent(self) -> float:
        """When all spare buffers can be given back: after the weights of all pieces that were there
        first, and as many others as were fetched later.
        """
        later = max(0, len(self.updated) - self.spare - self.first)
        between = range(self.spare, self.spare + min(self.first, later, self.spare))
        return self.weights_sent + sum(
            self.owed[piece] for piece in (*range(min(self.spare, len(self.owed))), *between)
        )

    def mark(self) -> tuple[float, float, float, int, int]:
        """Of now, for `back_to`."""
        return self.inward, self.outward, self.weights_sent, len(self.updated), len(self.freed)

    def back_to(self, mark: tuple[float, float, float, int, int]) -> None:
        """As if nothing had been done since."""
        self.inward, self.outward, self.weights_sent, pieces, freed = mark
        del self.updated[pieces:], self.owed[pieces:], self.freed[freed:]

    def _send(self, piece: int) -> None:
        self.outward = max(self.outward, self.updated[piece]) + self.owed[piece]
