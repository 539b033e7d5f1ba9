"""Predicted against measured: what the fit report said of a run beside what the run came to. No torch here.

The report's items are summed by their names, so that items may come and go: those called a margin are room that is set
aside and not taken, the one that names the loading is there while weights are read and not afterwards.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.events import ForecastChecked
from engine.layout import PLANE_ITEM_BYTES
from engine.recorder import EVENTS_FILE, last_of_kind
from engine.sizes import CUDA_CONTEXT_BYTES
from engine.watch import PeakMemory

QUANTITIES = {
    "loading_peak_bytes": "RAM while loading", "host_bytes": "RAM while training", "gpu_peak_bytes": "GPU memory",
    "step_seconds": "Step", "checkpoint_bytes": "Checkpoint",
}
"""In the order in which they are shown, with their words. What ends in `_bytes` is bytes, in `_seconds` seconds."""

FIRST_STEPS = 2
"""Steps of a session that the median leaves out: they compile, and touch memory for the first time."""
KNOWN_STEPS = FIRST_STEPS + 3
"""Steps after which the measured values are first recorded."""
MEDIAN_STEPS = 1000
"""The latest steps, of which the median is taken."""


# ---------------------------------------------------------------------- what was predicted

PLANES = frozenset().union(*PLANE_ITEM_BYTES.values())
"""Names of the items that are planes."""


def is_margin(name: str) -> bool:
    """Whether a host item is room that is set aside."""
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


class Forecast:
    """Gathers what one session of a run comes to. Make it when training begins: host memory is measured from then on.

    predicted: by `predictions`. loading_peak: bytes, None where nothing was loaded or measured. gpu: the backend's
    `memory`, None on the CPU. Any thread may call, one at a time.
    """

    def __init__(self, predicted: Mapping[str, float], loading_peak: int | None,
                 gpu: Callable[[], Mapping[str, int]] | None):
        self._predicted = dict(predicted)
        if loading_peak is None:  # nothing to compare it with
            self._predicted.pop("loading_peak_bytes", None)
        self._measured: dict[str, float] = {} if loading_peak is None else {"loading_peak_bytes": loading_peak}
        self._gpu = gpu
        self._host = PeakMemory()
        self._steps = 0
        self._seconds: deque[float] = deque(maxlen=MEDIAN_STEPS)

    def step(self, seconds: float) -> bool:
        """A step is home, from home to home; True when enough are for a first comparison."""
        self._steps += 1
        if self._steps > FIRST_STEPS:
            self._seconds.append(seconds)
        return self._steps == KNOWN_STEPS

    def checkpoint(self, nbytes: int) -> None:
        """A checkpoint is written."""
        self._measured["checkpoint_bytes"] = nbytes

    def event(self, step: int, moment: str, seconds: float | None = None) -> ForecastChecked:
        """The comparison as it stands. seconds: of a step, while no median is known."""
        measured = self._measured | {"host_bytes": self._host.read()}
        if self._seconds:
            seconds = statistics.median(self._seconds)
        if seconds is not None:
            measured["step_seconds"] = seconds
        if self._gpu is not None:
            # Gaps are part of what is predicted. The allocator does not count the context; the driver counts all programs on
            # the card.
            measured["gpu_peak_bytes"] = self._gpu()["peak_reserved"] + CUDA_CONTEXT_BYTES
        return ForecastChecked(step, moment, compared(self._predicted, measured))


def forecast_of(folder: Path) -> dict[str, Any]:
    """The latest comparison in a run folder's record: ``{quantity: {predicted, measured, error}}``; empty where there is
    none, as in records of older versions. Raises RunError when the record cannot be read."""
    record = last_of_kind(folder / EVENTS_FILE, ForecastChecked.kind)
    return record.event.quantities if record is not None else {}
