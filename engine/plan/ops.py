"""The ordered ops of one training step as plain data.

An op runs on one lane. Ops of one lane run in plan order; between lanes, only `waits` order them. Every op declares
what it reads and writes, so `validate` can show, without running anything, that no op reads a buffer before it is
filled or overwrites one that is still needed - within a step and across two consecutive steps.

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

H2D, COMPUTE, D2H, HOST = "H2D", "COMPUTE", "D2H", "HOST"
STATES_IN, UPDATE, STATES_OUT = "STATES IN", "UPDATE", "STATES OUT"
UPDATES = (STATES_IN, UPDATE, STATES_OUT)
"""Lanes of optimizers on the device."""
LANES = (H2D, COMPUTE, D2H, HOST, *UPDATES)
EMBED, HEAD = "embed", "head"


@dataclass(frozen=True)
class Op:
    """One piece of work of one unit on one lane.

    `kind` is one of
      prefetch         H2D      weight_high plane of `unit` -> `slot`
      embed            COMPUTE  capture pass of `micro_batch`: token ids -> first hidden state and block arguments
      forward          COMPUTE  block on its boundary; keeps the boundary (or all activations)
      store_boundary   D2H      device ring buffer `ring` -> host boundary
      fetch_boundary   H2D      host boundary -> device ring buffer `ring`
      loss             COMPUTE  final norm, head and loss, forward and (in training) backward, in chunks
      backward         COMPUTE  recompute from the boundary if needed, then backward; gradient into `grad`
      embed_backward   COMPUTE  capture again with gradients on, then backward
      fetch_grad       H2D      host grad plane -> staging buffer (sum over rounds on the host)
      reduce           COMPUTE  squared norm of the fp32 sum; rounds it into staging buffer `staging`
      offload          D2H      staging buffer -> host grad plane
      lend             COMPUTE  memory of activations becomes update buffers
      reclaim          COMPUTE  and the other way round
      summary          COMPUTE  clip factor on the device; loss and norms to pinned memory
      clip             HOST     clip factor; a non-finite loss or norm stops the run here
      update           HOST     AdamW on the planes of `unit`
      fetch_states     STATES IN   planes of a piece of `unit`, all but the gradient -> buffer `states`
      fetch_gradient   STATES IN   gradient plane of the piece -> buffer `states`
      device_update    UPDATE      AdamW in buffer `states`; into `slot` too where the unit has one of its own
      offload_weights  STATES OUT  updated weights -> plane of the piece, first: a prefetch may wait for them
      offload_states   STATES OUT  the other updated planes of buffer `states` -> planes of the piece
      home             HOST     nothing: it waits for all pieces
    """

    index: int
    kind: str
    lane: str
    unit: str
    micro_batch: int | None = None
    round: int = 0
    slot: str | None = None
    grad: str | None = None
    staging: str | None = None
    ring: str | None = None
    first: bool = False
    """A backward that overwrites its gradient buffer rather than adding to it; a reduce of the first round."""
    last: bool = False
    """A reduce of the last round: it also computes the norm."""
    piece: tuple[int, int] | None = None
    """Elements of the planes, from and to, that an op of an optimizer on the device is about."""
    states: str | None = None
    reads: tuple[tuple[str, str], ...] = ()
    writes: tuple[tuple[str, str], ...] = ()
    waits: tuple[int, ...] = ()
    """Ops of this step, on other lanes, that must have finished."""
    waits_previous: tuple[int, ...] = ()
    """The same for ops of the step before (plans of consecutive steps are equal)."""

    @property
    def label(self) -> str:
        at = "" if self.micro_batch is None else f"[{self.micro_batch}]"
        return f"{self.kind} {self.unit}{at}"


@dataclass(frozen=True)
class StepPlan:
    """One step. `slots`, `grads`, `stagings` and `rings` name the device buffers that the ops use, with the units
    (or boundaries) each must be able to hold."""

    ops: tuple[Op, ...]
    slots: dict[str, tuple[str, ...]] = field(default_factory=dict)
    grads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    stagings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rings: tuple[str, ...] = ()
    kept_units: frozenset[str] = frozenset()
    """Blocks whose activations are kept (no recompute)."""
    host_boundaries: bool = False
    rounds: int = 1
    micro_batches: int = 1
    gradient_sum: str = "vertical"
    """vertical: one round, one fp32 sum, one rounding; device: fp32 sums of every unit stay on the device over the
    rounds, one rounding; host: one bf16 rounding a round."""
    compiled: bool = False
    """Blocks and the loss run compiled."""
    device_homes: tuple[str, ...] = ()
    """Units whose optimizer runs on the device."""
    placed: tuple[tuple[str, str], ...] = ()
    """(unit, slot) of those of them whose weights are in a slot when a step ends: they are fetched before the first step
    after everything was home, and updated there from then on."""
    update_buffers: tuple[str, ...] = ()
    spare_buffers: tuple[str, ...] = ()
    """Those of them that are made from memory of activations, from `lend` to the next step's `reclaim`."""
    piece_numel: int = 0
    """Elements of each plane in one of them."""
    arena: tuple[str, ...] = ()
    """Blocks in the order of their fp32 sums in one stretch of memory, at the front of which the update buffers lie:
    sums are of no use between the end of a step and the first backward of the next."""


@dataclass(frozen=True)
class Span:
    """When one op ran, in seconds on the backend's clock."""

    op: Op
    start: float
    end: float
