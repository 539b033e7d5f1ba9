"""Out of memory, explained by item: what the plan gave to what, what each took, and which took
more. Pure, no torch.

What a process cannot measure by item is counted as the rest of it: resident bytes minus what it
holds on purpose. Other programs are what is in use and not ours, now and when the plan was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.fit.memory_items import Item, MemoryItem, PartName, items_of
from engine.fit.predicted import loading_peak
from engine.fit.sizes import CUDA_CONTEXT_BYTES
from engine.plan.buffers import Word
from engine.words import MIB, in_gib

NOTABLE_BYTES = 16 * MIB
"""Less than this above the plan is not what broke it."""


class ShareName(Word):
    """What the account of a shortage tells apart; it is told so."""

    # Of the host.
    PLANES = "planes"
    BOUNDARIES = "boundaries"
    DATA = "data"
    REST = "the rest of it"
    OTHERS = "everything else"
    # Of the GPU.
    ACTIVATIONS = "activations and the working set"
    BUFFERS = "buffers"
    GAPS = "gaps between tensors"
    OTHERS_ON_GPU = "other programs on the card"

    @property
    def alone(self) -> str:
        """Its words where no account stands before it."""
        return {ShareName.REST: "the rest of this process", ShareName.OTHERS: "other programs"}.get(
            self, self.value
        )


@dataclass(frozen=True)
class Share:
    """What one kind of memory was planned to take and what it takes, in bytes. `ours`: of this
    process; of other programs, `planned` is what they took when the plan was made.
    """

    name: ShareName
    planned: int
    measured: int
    ours: bool = True

    @property
    def excess(self) -> int:
        return self.measured - self.planned

    def __str__(self) -> str:
        against = "planned" if self.ours else "when the plan was made"
        return f"{self.name} {in_gib(self.measured)}, {in_gib(self.planned)} {against}"


@dataclass(frozen=True)
class GpuFigures:
    """GPU memory when an allocation failed, in bytes. `peak`: the most that tensors took;
    `buffers`: of these, what lives all run long; `reserved`: what the allocator holds, `allocated`
    of it in tensors; `free` and `total` of the whole card.
    """

    buffers: int
    allocated: int
    peak: int
    reserved: int
    free: int
    total: int

    @property
    def others(self) -> int:
        """What other programs hold on the card; our context is not told apart from theirs by the
        driver.
        """
        return max(0, self.total - self.free - self.reserved - CUDA_CONTEXT_BYTES)


# ---------------------------------------------------------------------- the host


def others_on_host(limit: int, available: int, rss: int) -> int:
    """Bytes that are in use within the limit and not ours."""
    return max(0, limit - available - rss)


def host_shares(
    report: Mapping[str, Any],
    held: Mapping[ShareName, int],
    rss: int,
    others: int,
    others_before: int,
    loading: bool = False,
) -> tuple[Share, ...]:
    """The host's memory by item.

    report: `FitReport.to_dict()`. held: bytes of planes, boundaries and data, as they are
    allocated. rss: resident bytes of this process. loading: weights are being read; once more
    planes than theirs are held, they have been.
    """
    items = items_of(report, PartName.HOST)
    taken = [item for item in items if item.kind.is_there_in_training]
    planes = sum(item.bytes for item in taken if item.kind.is_plane)
    boundaries = sum(item.bytes for item in taken if item.kind == MemoryItem.HOST_BOUNDARIES)
    data = sum(item.bytes for item in taken if item.kind == MemoryItem.DATA)
    rest = sum(item.bytes for item in taken) - planes - boundaries - data
    weights = sum(item.bytes for item in taken if item.kind.is_weights)
    if loading and held.get(ShareName.PLANES, 0) <= weights:
        planes, boundaries = weights, 0
        rest = max(0, round(loading_peak(items, report.get("model") or {})) - planes - data)
    shares = (
        Share(ShareName.PLANES, planes, held.get(ShareName.PLANES, 0)),
        Share(ShareName.BOUNDARIES, boundaries, held.get(ShareName.BOUNDARIES, 0)),
        Share(ShareName.DATA, data, held.get(ShareName.DATA, 0)),
        Share(ShareName.REST, rest, max(0, rss - sum(held.values()))),
        Share(ShareName.OTHERS, others_before, others, ours=False),
    )
    return tuple(share for share in shares if share.planned or share.measured)


def host_shortage(shares: Sequence[Share], rss: int) -> str:
    """Which item broke the plan, then all of them."""
    ours = "; ".join(str(share) for share in shares if share.ours)
    others = "".join(f"; {share}" for share in shares if not share.ours)
    return f"{blamed(shares)} (this process takes {in_gib(rss)}: {ours}{others})"


# ---------------------------------------------------------------------- the GPU


def gpu_shares(items: Iterable[Item], figures: GpuFigures, others_before: int) -> tuple[Share, ...]:
    """The GPU's memory by item. items: the plan's."""
    planned = dict.fromkeys((ShareName.ACTIVATIONS, ShareName.BUFFERS, ShareName.GAPS), 0)
    for item in items:
        if item.kind == MemoryItem.CUDA_CONTEXT:  # it is in none of the figures
            continue
        planned[
            ShareName.ACTIVATIONS
            if item.kind.is_activation
            else ShareName.GAPS
            if item.kind == MemoryItem.ALLOCATOR_SLACK
            else ShareName.BUFFERS
        ] += item.bytes
    gaps = max(0, figures.reserved - max(figures.peak, figures.allocated))
    return (
        Share(
            ShareName.ACTIVATIONS,
            planned[ShareName.ACTIVATIONS],
            max(0, figures.peak - figures.buffers),
        ),
        Share(ShareName.BUFFERS, planned[ShareName.BUFFERS], figures.buffers),
        Share(ShareName.GAPS, planned[ShareName.GAPS], gaps),
        Share(ShareName.OTHERS_ON_GPU, others_before, figures.others, ours=False),
    )


def gpu_shortage(shares: Sequence[Share]) -> str:
    """Which item broke the plan, then all of them."""
    return f"{blamed(shares)} ({'; '.join(map(str, shares))})"


# ---------------------------------------------------------------------- words


def blamed(shares: Sequence[Share]) -> str:
    """The item that is furthest above its plan, with both figures; or that none is."""
    worst = max(shares, key=lambda share: share.excess, default=None)
    if worst is None or worst.excess < NOTABLE_BYTES:
        return "nothing took more than planned, so the plan left too little room"
    than = "planned" if worst.ours else "when the plan was made"
    return (
        f"{worst.name.alone} took {in_gib(worst.measured)}, {in_gib(worst.excess)} more than {than}"
    )


def others_are_blamed(shares: Sequence[Share]) -> bool:
    """Whether memory is short because other programs took more."""
    worst = max(shares, key=lambda share: share.excess, default=None)
    return worst is not None and not worst.ours and worst.excess >= NOTABLE_BYTES
