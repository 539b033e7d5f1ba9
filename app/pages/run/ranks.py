"""The ranks of a run, side by side, where it has several. Pure functions of a snapshot."""

from __future__ import annotations

from typing import Any

from app.labels import in_bytes
from engine.runs.record.events import RankSample
from engine.runs.record.snapshot import RunSnapshot

MOST_DRAWN = 64
"""Largest number of ranks that are drawn, since a damaged record may name any number."""


def ranks_text(snapshot: RunSnapshot) -> str:
    """Returns how many ranks compute a run, as in "2 GPUs"; empty for one."""
    count = snapshot.rank_count
    if count == 1:
        return ""
    return f"{count} GPUs" if snapshot.device == "cuda" else f"{count} processes"


def rank_table(snapshot: RunSnapshot) -> dict[str, Any] | None:
    """Returns the memory of each rank: a sentence, the heads of the columns, and a row for each.
    Returns None for one rank, and before the first sample.
    """
    ranks = snapshot.ranks[:MOST_DRAWN]
    if len(ranks) < 2:
        return None
    has_gpus = any(rank["gpu_total"] for rank in ranks)
    has_power = any(rank["power"] for rank in ranks)
    heads = ["Rank", "RAM of its own"]
    if has_gpus:
        heads += ["GPU memory, peak", "Whole card"]
    if has_power:
        heads.append("Power")
    rows = []
    for rank in ranks:
        row = [str(rank["rank"]), in_bytes(rank["host"])]
        if has_gpus:
            total = in_bytes(rank["gpu_total"])
            row += [f"{in_bytes(rank['gpu_peak'])} of {total}", in_bytes(rank["gpu_driver"])]
        if has_power:
            row.append(f"{rank['power']:,.0f} W")
        rows.append(row)
    text = (
        f"{ranks_text(snapshot)} compute each step together: each takes its share of the rows, "
        "and updates its share of the weights. RAM holds weights and states once for all."
    )
    return {"caption": text, "heads": heads, "rows": rows}


def fullest_gpu(snapshot: RunSnapshot) -> RankSample | None:
    """Returns the latest sample of the rank whose GPU is fullest; None for one rank."""
    return max(snapshot.ranks, key=lambda rank: rank["gpu_peak"], default=None)
