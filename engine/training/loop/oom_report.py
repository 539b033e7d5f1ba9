"""A shortage of memory item by item: what was planned for each, what each took, and which took
more.

Memory that a process cannot attribute to an item counts as the rest: its resident bytes minus those
that it holds on purpose. Memory in use that is not ours belongs to other programs; it is measured
now and when the plan was made. This module queries nothing on the machine and does not import
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.planning.fit.device_memory import CUDA_CONTEXT_BYTES
from engine.planning.fit.memory_items import Item, MemoryItem, PartName, items_of
from engine.planning.fit.predictions import loading_peak
from engine.planning.schedule.buffers import Word
from engine.text import MIB, in_gib

NOTABLE_BYTES = 16 * MIB
"""Bytes above its plan from which an item is blamed for the shortage."""


class ShareName(Word):
    """Items of the report of a shortage."""

    # Of the host.
    PLANES = "planes"
    BLOCK_INPUTS = "block inputs"
    DATA = "data"
    COPIES = "checkpoint copies"
    REST = "the rest of it"
    OTHERS = "everything else"
    # Of the GPU.
    ACTIVATIONS = "activations and the working set"
    BUFFERS = "buffers"
    GAPS = "gaps between tensors"
    OTHERS_ON_GPU = "other programs on the card"

    @property
    def alone(self) -> str:
        """Name to use in a sentence that does not list the other items."""
        if self == ShareName.REST:
            return "the rest of this process"
        if self == ShareName.OTHERS:
            return "other programs"
        return self.value


@dataclass(frozen=True)
class Share:
    """One item of memory: what it was planned to take and what it takes, in bytes.

    ours: it belongs to this process. For other programs, `planned` is what they took when the plan
    was made.
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
    """Figures of GPU memory, in bytes, when an allocation failed.

    `peak` is the most that tensors took; `buffers` is what of it lives as long as the run.
    `reserved` is what the allocator holds, of which `allocated` bytes are in tensors. `free` and
    `total` refer to the whole card.
    """

    buffers: int
    allocated: int
    peak: int
    reserved: int
    free: int
    total: int

    @property
    def others(self) -> int:
        """Bytes that other programs hold on the card.

        The driver does not distinguish our CUDA context from theirs, so its usual size is
        subtracted.
        """
        return max(0, self.total - self.free - self.reserved - CUDA_CONTEXT_BYTES)


@dataclass(frozen=True)
class HostFigures:
    """Figures of host memory, in bytes.

    `held` is what planes, block_inputs, data and copies hold on purpose. `rss` is the resident
    memory of this process, with what other processes of the run have for themselves. `others` is
    what other programs take, and `others_before` what they took when the plan was made. loading:
    weights are being read; once the planes take more than the weights alone, reading is over.
    """

    held: Mapping[ShareName, int]
    rss: int
    others: int
    others_before: int
    loading: bool = False


# ---------------------------------------------------------------------- the host


def others_on_host(limit: int, available: int, rss: int) -> int:
    """Returns the bytes in use within the limit that do not belong to this process."""
    return max(0, limit - available - rss)


def host_shares(report: Mapping[str, Any], figures: HostFigures) -> tuple[Share, ...]:
    """Returns the host's memory by item. `report` is `FitReport.to_dict()`."""
    held = figures.held
    items = items_of(report, PartName.HOST)
    taken = [item for item in items if item.kind.is_there_in_training]
    planes = sum(item.bytes for item in taken if item.kind.is_plane)
    on_host = (MemoryItem.HOST_BLOCK_INPUTS, MemoryItem.DISK_RINGS)
    block_inputs = sum(item.bytes for item in taken if item.kind in on_host)
    data = sum(item.bytes for item in taken if item.kind == MemoryItem.DATA)
    copies = sum(item.bytes for item in taken if item.kind == MemoryItem.STAGING_BUFFERS)
    rest = sum(item.bytes for item in taken) - planes - block_inputs - data - copies
    weights = sum(item.bytes for item in taken if item.kind.is_weights)
    if figures.loading and held.get(ShareName.PLANES, 0) <= weights:
        # While loading, the plan includes only the weights and the memory needed to read them.
        planes, block_inputs, copies = weights, 0, 0
        rest = max(0, round(loading_peak(items, report.get("model") or {})) - planes - data)
    shares = (
        Share(ShareName.PLANES, planes, held.get(ShareName.PLANES, 0)),
        Share(ShareName.BLOCK_INPUTS, block_inputs, held.get(ShareName.BLOCK_INPUTS, 0)),
        Share(ShareName.DATA, data, held.get(ShareName.DATA, 0)),
        Share(ShareName.COPIES, copies, held.get(ShareName.COPIES, 0)),
        Share(ShareName.REST, rest, max(0, figures.rss - sum(held.values()))),
        Share(ShareName.OTHERS, figures.others_before, figures.others, ours=False),
    )
    return tuple(share for share in shares if share.planned or share.measured)


def host_oom_report(shares: Sequence[Share], rss: int, processes: int = 1) -> str:
    """Names the item that exceeded its plan, then lists all items, of a run of this number of
    processes that take `rss` bytes.
    """
    ours = "; ".join(str(share) for share in shares if share.ours)
    others = "".join(f"; {share}" for share in shares if not share.ours)
    take = "this process takes" if processes == 1 else f"the {processes} processes of the run take"
    return f"{blamed(shares)} ({take} {in_gib(rss)}: {ours}{others})"


# ---------------------------------------------------------------------- the GPU


def gpu_shares(items: Iterable[Item], figures: GpuFigures, others_before: int) -> tuple[Share, ...]:
    """Returns the GPU's memory by item. `items` are the memory items of the plan."""
    planned = dict.fromkeys((ShareName.ACTIVATIONS, ShareName.BUFFERS, ShareName.GAPS), 0)
    for item in items:
        if item.kind in (MemoryItem.CUDA_CONTEXT, MemoryItem.COLLECTIVE):  # no figure includes them
            continue
        if item.kind.is_activation:
            name = ShareName.ACTIVATIONS
        elif item.kind == MemoryItem.ALLOCATOR_SLACK:
            name = ShareName.GAPS
        else:
            name = ShareName.BUFFERS
        planned[name] += item.bytes
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


def gpu_oom_report(shares: Sequence[Share]) -> str:
    """Names the item that exceeded its plan, then lists all items."""
    return f"{blamed(shares)} ({'; '.join(map(str, shares))})"


# ---------------------------------------------------------------------- text


def blamed(shares: Sequence[Share]) -> str:
    """Returns a text that names the item furthest above its plan, or states that no item is above
    it.
    """
    worst = max(shares, key=lambda share: share.excess, default=None)
    if worst is None or worst.excess < NOTABLE_BYTES:
        return "nothing took more than planned, so the plan left too little room"
    than = "planned" if worst.ours else "when the plan was made"
    return (
        f"{worst.name.alone} took {in_gib(worst.measured)}, {in_gib(worst.excess)} more than {than}"
    )


def others_are_blamed(shares: Sequence[Share]) -> bool:
    """Returns whether memory is short because other programs took more than before."""
    worst = max(shares, key=lambda share: share.excess, default=None)
    return worst is not None and not worst.ours and worst.excess >= NOTABLE_BYTES
