"""The memory that a fit report predicts for a run, item by item, beside what was measured. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.model.layout import PLANE_ITEM_BYTES

QUANTITIES = {
    "loading_peak_bytes": "RAM while loading", "host_bytes": "RAM while training", "gpu_peak_bytes": "GPU memory",
    "step_seconds": "Step", "checkpoint_bytes": "Checkpoint",
}
"""In the order in which they are shown, with their words. What ends in `_bytes` is bytes, in `_seconds` seconds."""


# ---------------------------------------------------------------------- what was predicted

PLANES = frozenset().union(*PLANE_ITEM_BYTES.values())
"""Names of the items that are planes."""


def is_margin(name: str) -> bool:
    """Whether a host item is space that is set aside."""
    return "margin" in name.lower()


def is_loading(name: str) -> bool:
    """Whether a host item is only there while weights are read."""
    return "loading" in name.lower()


def predictions(report: Mapping[str, Any], checkpoint_bytes: int | None = None) -> dict[str, float]:
    """The quantities that a report predicts, by name; those it says nothing of are missing.

    report: `FitReport.to_dict()`. checkpoint_bytes: of one checkpoint. Host memory is without margins; GPU memory is all of
    the report's items, the CUDA context and the allocator's gaps included. The loading peak is predicted for weights that
    are read, and for those that are drawn: what is there before the optimizer states are.
    """
    found: dict[str, float] = {}
    items = (report.get("host") or {}).get("items") or ()
    if items:
        found["loading_peak_bytes"] = loading_peak(items, report.get("model") or {})
        found["host_bytes"] = _total(item for item in items if not is_margin(item["name"]) and not is_loading(item["name"]))
    gpu = (report.get("gpu") or {}).get("items") or ()
    if gpu:
        found["gpu_peak_bytes"] = _total(gpu)
    seconds = (report.get("time") or {}).get("step_seconds")
    if seconds:
        found["step_seconds"] = seconds
    if checkpoint_bytes:
        found["checkpoint_bytes"] = checkpoint_bytes
    return found


def loading_peak(items: Sequence[Mapping[str, Any]], model: Mapping[str, Any]) -> float:
    """Bytes that the report expects while weights are read. items: the host's. model: of the report.

    Its loading item is what loading takes more than the planes and boundaries of training do. Where that is nothing: the
    weight planes, what every run needs, and the one copy of the weights that is being read (none where they are drawn).
    """
    named = {item["name"].lower(): item["bytes"] for item in items}
    general = sum(size for name, size in named.items() if name.startswith(("runtime", "tokenised data")))
    loading = [size for name, size in named.items() if is_loading(name)]
    if sum(loading):
        kept = sum(size for name, size in named.items() if name in PLANES or name.startswith("boundaries on the host"))
        return general + kept + sum(loading)
    weights = sum(size for name, size in named.items() if name.startswith("weight_"))
    copy = model.get("parameters", 0) * PLANE_ITEM_BYTES[model.get("dtype", "bfloat16")]["weight_high"] if loading else 0
    return general + weights + copy


def _total(items: Iterable[Mapping[str, Any]]) -> int:
    return sum(item["bytes"] for item in items)


# ---------------------------------------------------------------------- both, side by side

def compared(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """For every quantity that is known either way: ``{predicted, measured, error}``, None for what is not known. The error is
    measured / predicted - 1: above 0 where the run took more than was predicted."""
    found = {}
    for name in QUANTITIES:
        said, came = predicted.get(name), measured.get(name)
        if said is not None or came is not None:
            found[name] = {"predicted": said, "measured": came,
                           "error": came / said - 1 if said and came is not None else None}
    return found
