"""The ops in which the host runs AdamW are here (lane HOST)."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.plan.buffers import Buffer
from engine.plan.ops import Lane, Op, OpKind


@dataclass(frozen=True, slots=True)
class Update(Op):
    """An `Update` runs AdamW on the planes of the unit. Where gradients are parked, it does so for
    one `piece`, whose gradient is in `ring`. Where the moments of the unit are on the disk, it does
    so for one `piece`, whose moments are in `states`.
    """

    kind, lane = OpKind.UPDATE, Lane.HOST
    piece: tuple[int, int] | None = field(kw_only=True, default=None)
    ring: Buffer | None = field(kw_only=True, default=None)
    states: Buffer | None = field(kw_only=True, default=None)
    late: bool | None = field(kw_only=True, default=None)
    """The moments stay as they are, and an `UpdateMoments` follows; None where they do not."""


@dataclass(frozen=True, slots=True)
class UpdateMoments(Op):
    """An `UpdateMoments` updates the moments of a unit, or of one `piece`, whose weights are
    updated already.
    """

    kind, lane = OpKind.UPDATE_MOMENTS, Lane.HOST
    piece: tuple[int, int] | None = field(kw_only=True, default=None)
