"""The memory and the time that a fit report predicts for a run are compared here with the measured
values. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.planning.fit.memory_items import Item, MemoryItem, PartName, items_of
from engine.planning.layout.layout import PLANE_ITEM_BYTES

QUANTITIES = {
    "loading_peak_bytes": "RAM while loading",
    "host_bytes": "RAM while training",
    "gpu_peak_bytes": "GPU memory",
    "step_seconds": "Step",
    "checkpoint_bytes": "Checkpoint",
    "disk_offloaded_bytes": "To the disk in a step",
}
"""Quantities in the order in which they are shown, each with its description. A name that ends in
`_bytes` means bytes, one in `_seconds` seconds.
"""


# ---------------------------------------------------------------------- what was predicted


def predictions(report: Mapping[str, Any], checkpoint_bytes: int | None = None) -> dict[str, float]:
    """Returns the quantities that a report predicts, by name. Quantities that the report does not
    cover are left out.

    Host memory is without margins. GPU memory is all of the report's items, the CUDA context and
    the allocator's gaps included. The loading peak is the memory in use just before the optimizer
    states are allocated. It is predicted for weights that are read and for weights that are drawn.

    report: `FitReport.to_dict()`. checkpoint_bytes: the size of one checkpoint, without weights
    that are not trained, which all checkpoints of a run share.
    """
    found: dict[str, float] = {}
    items = items_of(report, PartName.HOST)
    if items:
        found["loading_peak_bytes"] = loading_peak(items, report.get("model") or {})
        found["host_bytes"] = _total(item for item in items if item.kind.is_there_in_training)
    gpu = items_of(report, PartName.GPU)
    if gpu:
        found["gpu_peak_bytes"] = _total(gpu)
    disk_offload = report.get("disk_offload")
    if disk_offload:
        found["disk_offloaded_bytes"] = disk_offload["step_bytes"]
    seconds = (report.get("time") or {}).get("step_seconds")
    if seconds:
        found["step_seconds"] = seconds
    if checkpoint_bytes:
        found["checkpoint_bytes"] = checkpoint_bytes
    return found


def loading_peak(items: Sequence[Item], model: Mapping[str, Any]) -> float:
    """Returns the bytes that the report expects while weights are read.

    The report's loading item is the memory that loading takes beyond that of the planes and
    block inputs of training. Where it is 0, the peak consists of the weight planes, the items that
    every run needs, and the weights that are being read (none where they are drawn).

    items: those of the host. model: the report's part about the model.
    """
    general = _total(item for item in items if item.kind.is_there_from_the_start)
    loading = [item for item in items if item.kind == MemoryItem.LOADING_PEAK]
    if _total(loading):
        kept = _total(item for item in items if item.kind.is_there_while_loading)
        return general + kept + _total(loading)
    weights = _total(item for item in items if item.kind.is_weights)
    copy = 0
    if loading:
        item_bytes = PLANE_ITEM_BYTES[model.get("dtype", "bfloat16")]["weight_high"]
        copy = model.get("read_ahead", 0) * item_bytes
    return general + weights + copy


def _total(items: Iterable[Item]) -> int:
    return sum(item.bytes for item in items)


# ---------------------------------------------------------------------- both, side by side


def compared(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, dict[str, float | None]]:
    """Returns ``{predicted, measured, error}`` for every quantity that was predicted or measured,
    with None for an unknown value. The error is measured / predicted - 1, which is positive where
    the run took more than predicted.
    """
    found = {}
    for name in QUANTITIES:
        said, came = predicted.get(name), measured.get(name)
        if said is None and came is None:
            continue
        error = None
        if said and came is not None:
            error = came / said - 1
        found[name] = {"predicted": said, "measured": came, "error": error}
    return found
