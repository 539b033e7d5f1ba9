"""A fit report with known bytes."""

from __future__ import annotations

from engine.text import GIB


def item(name: str, size: float) -> dict:
    return {"name": name, "bytes": round(size * GIB), "note": ""}


REPORT = {
    "host": {
        "items": [
            item("Runtime", 1),
            item("Margin", 0.25),
            item("weight_high", 2),
            item("weight_low", 2),
            item("exp_avg", 4),
            item("exp_avg_sq", 4),
            item("grad", 2),
            item("Block inputs in RAM", 3),
            item("Tokenized data", 0.5),
            item("Loading peak", 0),
        ]
    },
    "gpu": {
        "items": [item("Block slots", 4), item("CUDA context", 0.5), item("Allocator slack", 0.1)]
    },
    "model": {"parameters": GIB, "read_ahead": GIB, "dtype": "bfloat16"},
    "time": {"step_seconds": 2.5},
}
