"""Out of memory, explained by item: what the plan gave to what, what each took, and which took more. Pure, no torch.

What a process cannot measure by item is counted as the rest of it: resident bytes minus what it holds on purpose. Other
programs are what is in use and not ours, now and when the plan was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.fit.predicted import PLANES, is_loading, is_margin, loading_peak
from engine.fit.sizes import CUDA_CONTEXT_BYTES, Item
from engine.words import MIB, in_gib

NOTABLE_BYTES = 16 * MIB
"""Less than this above the plan is not what broke it."""

ACTIVATIONS = ("Boundaries", "Hidden states", "Rotary embeddings", "Kept activations", "Working set", "Tokens and masks")
"""Items of device memory that come and go within a step; buffers live all run long."""


@dataclass(frozen=True)
class Share:
    """What one kind of memory was planned to take and what it takes, in bytes. `ours`: of this process; of other programs,
    `planned` is what they took when the plan was made."""

    name: str
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
    """GPU memory when an allocation failed, in bytes. `peak`: the most that tensors took; `buffers`: of these, what lives all
    run long; `reserved`: what the allocator holds, `allocated` of it in tensors; `free` and `total` of the whole card."""

    buffers: int
    allocated: int
    peak: int
    reserved: int
    free: int
    total: int

    @property
    def others(self) -> int:
        """What other programs hold on the card; our context is not told apart from theirs by the driver."""
        return max(0, self.total - self.free - self.reserved - CUDA_CONTEXT_BYTES)


# ---------------------------------------------------------------------- the host

def others_on_host(limit: int, available: int, rss: int) -> int:
    """Bytes that are in use within the limit and not ours."""
    return max(0, limit - available - rss)


def host_shares(report: Mapping[str, Any], held: Mapping[str, int], rss: int, others: int, others_before: int,
                loading: bool = False) -> tuple[Share, ...]:
    """The host's memory by item.

    report: `FitReport.to_dict()`. held: bytes of planes, boundaries and data, as they are allocated. rss: resident bytes of
    this process. loading: weights are being read; once more planes than theirs are held, they have been.
    """
    items = (report.get("host") or {}).get("items") or ()
    taken = [item for item in items if not is_margin(item["name"]) and not is_loading(item["name"])]
    planes = sum(item["bytes"] for item in taken if item["name"] in PLANES)
    boundaries = sum(item["bytes"] for item in taken if item["name"].lower().startswith("boundaries on the host"))
    data = sum(item["bytes"] for item in taken if "data" in item["name"].lower())
    rest = sum(item["bytes"] for item in taken) - planes - boundaries - data
    weights = sum(item["bytes"] for item in taken if item["name"].startswith("weight_"))
    if loading and held.get("planes", 0) <= weights:
        planes, boundaries = weights, 0
        rest = max(0, round(loading_peak(items, report.get("model") or {})) - planes - data)
    shares = (Share("planes", planes, held.get("planes", 0)), Share("boundaries", boundaries, held.get("boundaries", 0)),
              Share("data", data, held.get("data", 0)),
              Share("the rest of it", rest, max(0, rss - sum(held.values()))),
              Share("everything else", others_before, others, ours=False))
    return tuple(share for share in shares if share.planned or share.measured)


def host_shortage(shares: Sequence[Share], rss: int) -> str:
    """Which item broke the plan, then all of them."""
    ours = "; ".join(str(share) for share in shares if share.ours)
    others = "".join(f"; {share}" for share in shares if not share.ours)
    return f"{blamed(shares)} (this process takes {in_gib(rss)}: {ours}{others})"


# ---------------------------------------------------------------------- the GPU

def gpu_shares(items: Iterable[Item], figures: GpuFigures, others_before: int) -> tuple[Share, ...]:
    """The GPU's memory by item. items: the plan's."""
    planned = dict.fromkeys(("buffers", "activations", "gaps"), 0)
    for item in items:
        kind = ("activations" if item.name in ACTIVATIONS else "gaps" if "slack" in item.name.lower()
                else None if "context" in item.name.lower() else "buffers")
        if kind is not None:
            planned[kind] += item.bytes
    return (Share("activations and the working set", planned["activations"], max(0, figures.peak - figures.buffers)),
            Share("buffers", planned["buffers"], figures.buffers),
            Share("gaps between tensors", planned["gaps"], max(0, figures.reserved - max(figures.peak, figures.allocated))),
            Share("other programs on the card", others_before, figures.others, ours=False))


def gpu_shortage(shares: Sequence[Share]) -> str:
    """Which item broke the plan, then all of them."""
    return f"{blamed(shares)} ({'; '.join(map(str, shares))})"


# ---------------------------------------------------------------------- words

def blamed(shares: Sequence[Share]) -> str:
    """The item that is furthest above its plan, with both figures; or that none is."""
    worst = max(shares, key=lambda share: share.excess, default=None)
    if worst is None or worst.excess < NOTABLE_BYTES:
        return "nothing took more than planned, so the plan left too little room"
    name = {"the rest of it": "the rest of this process", "everything else": "other programs"}.get(worst.name, worst.name)
    than = "planned" if worst.ours else "when the plan was made"
    return f"{name} took {in_gib(worst.measured)}, {in_gib(worst.excess)} more than {than}"


def others_are_blamed(shares: Sequence[Share]) -> bool:
    """Whether memory is short because other programs took more."""
    worst = max(shares, key=lambda share: share.excess, default=None)
    return worst is not None and not worst.ours and worst.excess >= NOTABLE_BYTES
