"""The memory that a fit report predicts for a run, item by item, beside what was measured. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.fit.memory_items import Item, MemoryItem, PartName, items_of
from engine.model.layout import PLANE_ITEM_BYTES

QUANTITIES = {
    "loading_peak_bytes": "RAM while loading",
    "host_bytes": "RAM while training",
    "gpu_peak_bytes": "GPU memory",
    "step_seconds": "Step",
    "checkpoint_bytes": "Checkpoint",
}
"""In the order in which they are shown, with their words. What ends in `_bytes` is bytes, in
`_seconds` seconds.
"""


# ---------------------------------------------------------------------- what was predicted


def predictions(report: Mapping[str, Any], checkpoint_bytes: int | None = None) -> dict[str, float]:
    """The quantities that a report predicts, by name; those it says nothing of are missing.

    report: `FitReport.to_dict()`. checkpoint_bytes: of one checkpoint. Host memory is without
    margins; GPU memory is all of the report's items, the CUDA context and the allocator's gaps
    included. The loading peak is predicted for weights that are read, and for those that are drawn:
    what is there before the optimizer states are.
    """
    found: dict[str, float] = {}
    items = items_of(report, PartName.HOST)
    if items:
        found["loading_peak_bytes"] = loading_peak(items, report.get("model") or {})
        found["host_bytes"] = _total(item for item in items if item.kind.is_there_in_training)
    gpu = items_of(report, PartName.GPU)
    if gpu:
        found["gpu_peak_bytes"] = _total(gpu)
    seconds = (report.get("time") or {}).get("step_seconds")
    if seconds:
        found["step_seconds"] = seconds
    if checkpoint_bytes:
        found["checkpoint_bytes"] = checkpoint_bytes
    return found


def loading_peak(items: Sequence[Item], model: Mapping[str, Any]) -> float:
    """Bytes that the report expects while weights are read. items: the host's. model: of the
    report.

    Its loading item is what loading takes more than the planes and boundaries of training do. Where
    that is nothing: the weight planes, what every run needs, and the one copy of the weights that
    is being read (none where they are drawn).
    """
    general = _total(item for item in items if item.kind.is_there_from_the_start)
    loading = [item for item in items if item.kind == MemoryItem.LOADING_PEAK]
    if _total(loading):
        kept = _total(
            item for item in items if item.kind.is_plane or item.kind == MemoryItem.HOST_BOUNDARIES
        )
        return general + kept + _total(loading)
    weights = _total(item for item in items if item.kind.is_weights)
    copy = (
        model.get("parameters", 0) * PLANE_ITEM_BYTES[model.get("dtype", "bfloat16")]["weight_high"]
        if loading
        else 0
    )
    return general + weights + copy


def _total(items: Iterable[Item]) -> int:
    return sum(item.bytes for item in items)


# ---------------------------------------------------------------------- both, side by side


def compared(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, dict[str, float | None]]:
    """For every quantity that is known either way: ``{predicted, measured, error}``, None for what
    is not known. The error is measured / predicted - 1: above 0 where the run took more than was
    predicted.
    """
    found = {}
    for name in QUANTITIES:
        said, came = predicted.get(name), measured.get(name)
        if said is not None or came is not None:
            found[name] = {
                "predicted": said,
                "measured": came,
                "error": came / said - 1 if said and came is not None else None,
            }
    return found
