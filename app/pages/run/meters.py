"""The meters show host and GPU memory now, each against its limit."""

from __future__ import annotations

from typing import Any

import numpy as np

from app.labels import in_bytes
from app.pages.run.ranks import fullest_gpu
from engine.runs.record.snapshot import RunSnapshot
from engine.text import GIB

LEAST_FREE_SHARE, LEAST_FREE = 0.05, GIB
"""Share of the limit, and number of bytes, below which free memory is short."""
FORECASTS = {"host": "host_bytes", "GPU": "gpu_peak_bytes"}
"""Name of the prediction for each kind of memory."""


def meters(snapshot: RunSnapshot) -> list[dict[str, Any]]:
    """Returns a meter for each kind of memory whose limit is known: its name, the shares of the
    limit that are used now, that were used at most, and that were predicted, and words for them.
    """
    memory = snapshot.memory
    if not len(memory):
        return []
    found = [_meter(snapshot, "host", memory.host_rss, memory.host_total[-1])]
    if memory.gpu_total[-1]:
        # The allocated amount varies within a step, so its peak is shown if it was recorded.
        used = [*(memory.gpu_peak if any(memory.gpu_peak) else memory.gpu_allocated)]
        fullest = fullest_gpu(snapshot)
        if fullest is not None:
            used.append(fullest["gpu_peak"])
        found.append(_meter(snapshot, "GPU", used, memory.gpu_total[-1]))
    return [meter for meter in found if meter is not None]


def _meter(snapshot: RunSnapshot, name: str, used: Any, limit: int) -> dict[str, Any] | None:
    if not limit:
        return None
    now, most = int(used[-1]), int(np.max(used))
    free = max(0, limit - now)
    prediction_check = _prediction_check(snapshot, FORECASTS[name])
    text = f"{in_bytes(now)} of {in_bytes(limit)}"
    notes = [f"{in_bytes(free)} free", f"at most {in_bytes(most)} so far"]
    if prediction_check:
        notes.append(f"{in_bytes(prediction_check)} predicted")
    if name == "GPU" and snapshot.ranks:
        notes.append(f"of {len(snapshot.ranks)} GPUs, the fullest")
    return {
        "name": "GPU memory" if name == "GPU" else "Host memory",
        "share": round(min(1.0, now / limit), 4),
        "most": round(min(1.0, most / limit), 4),
        "predicted": round(min(1.0, prediction_check / limit), 4) if prediction_check else None,
        "text": text,
        "note": "; ".join(notes),
        "tone": "warn" if free < max(LEAST_FREE_SHARE * limit, LEAST_FREE) else "good",
    }


def _prediction_check(snapshot: RunSnapshot, name: str) -> float | None:
    """Returns the predicted bytes, or None where nothing was predicted."""
    if snapshot.prediction_check is None:
        return None
    return snapshot.prediction_check.quantities.get(name, {}).get("predicted")
