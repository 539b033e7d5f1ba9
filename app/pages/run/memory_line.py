"""Memory over time in a small place: one line for the host and one for the GPU, each with what was
predicted, and a sentence with the word flat where they are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from app.labels import GIB, in_bytes
from app.pages.run.ranks import fullest_gpu
from app.shared.charts.axes import Axis, Line, curve, figure, level, one_row, places
from app.shared.charts.curve_points import downsample
from app.shared.charts.drawing import BLUE, GRAY, VIOLET, Figure
from app.verdict.memory_kinds import MemoryKind, memory_kinds, predicted_bytes
from engine.runs.record.snapshot import RunSnapshot

MARGIN = {"l": 48, "r": 10, "t": 8, "b": 22}


def memory_line_figure(snapshot: RunSnapshot, axis: Axis) -> Figure:
    """Returns memory in GiB, as used by the run."""
    memory = snapshot.memory
    x = places(snapshot, memory, axis)
    data = []
    for kind in memory_kinds(snapshot):
        is_host = kind.name == "host"
        peaks = memory.gpu_peak if any(memory.gpu_peak) else memory.gpu_allocated
        used = np.asarray(memory.host_rss if is_host else peaks, dtype=float) / GIB
        line = Line(BLUE if is_host else VIOLET)
        data.append(curve("RAM" if is_host else "GPU", *downsample(x, used), line))
        if kind.predicted:
            data.append(level(f"{data[-1]['name']} predicted", x, kind.predicted / GIB, GRAY))
    drawn = figure(data, axis, {"yaxis": one_row(from_zero=True)})
    drawn["layout"] |= {"margin": MARGIN, "showlegend": False}
    drawn["layout"]["xaxis"]["title"] = {"text": ""}
    drawn["layout"]["yaxis"] |= {"nticks": 3, "ticksuffix": " GiB"}
    return drawn


def memory_text(snapshot: RunSnapshot) -> str:
    """Returns the peak of each kind of memory, what was predicted, and whether it is flat."""
    kinds = memory_kinds(snapshot)
    fullest = fullest_gpu(snapshot)
    if fullest is not None:
        kinds = [_with_peak(kind, fullest["gpu_peak"]) for kind in kinds]
    texts = [_kind_text(kind, snapshot) for kind in kinds]
    if len(texts) == 1:
        return texts[0]
    return "; ".join(f"{_label(kind, snapshot)}: {text}" for kind, text in zip(kinds, texts))


def predicted_text(snapshot: RunSnapshot) -> str:
    """Returns what was predicted, before anything is measured."""
    names = {"RAM": "host_bytes", "GPU": "gpu_peak_bytes"}
    predicted = {label: predicted_bytes(snapshot, name) for label, name in names.items()}
    texts = [f"{label} {in_bytes(count)}" for label, count in predicted.items() if count]
    return f"predicted: {', '.join(texts)}" if texts else ""


def flat_text(snapshot: RunSnapshot) -> str:
    """Returns the memory in a few words, of the GPU where there is one."""
    kinds = memory_kinds(snapshot)
    if not kinds:
        return ""
    kind = kinds[-1]
    return f"memory {in_bytes(kind.most)}{', flat' if is_flat(kind) else ''}"


def is_flat(kind: MemoryKind) -> bool:
    """Returns whether memory is measured to stay as it is."""
    return kind.growth.steady_since is not None and not kind.growth.is_growing


def _with_peak(kind: MemoryKind, peak: int) -> MemoryKind:
    return kind if kind.name == "host" else replace(kind, most=max(kind.most, peak))


def _label(kind: MemoryKind, snapshot: RunSnapshot) -> str:
    if kind.name == "host":
        return "RAM"
    return f"fullest of {len(snapshot.ranks)} GPUs" if snapshot.ranks else "GPU"


def _kind_text(kind: MemoryKind, snapshot: RunSnapshot) -> str:
    predicted = f" (predicted {in_bytes(kind.predicted)})" if kind.predicted else ""
    parts = [f"peak {in_bytes(kind.most)}{predicted}"]
    if kind.growth.is_growing:
        parts.append(f"grew by {in_bytes(kind.growth.grown)}")
    elif is_flat(kind):
        parts.append("flat")
    if kind.limit and not snapshot.is_over:
        parts.append(f"{in_bytes(max(0, kind.limit - kind.most))} free")
    return " · ".join(parts)
