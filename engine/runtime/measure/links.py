"""How fast two GPUs of this machine receive from each other is measured here, in another process: a
GPU that a process has used once keeps memory for it as long as it runs.
"""

from __future__ import annotations

import contextlib
import json
import time

import torch

from engine.helper_process import HelperProcess, take_output

_PROGRAM = "from engine.runtime.measure.links import main; main()"
_BYTES = 256 << 20
"""Number of bytes copied at a time, each way."""
_COPIES = 10
_PATIENCE = 120.0
"""Seconds within which the other process must answer."""


def link_rate() -> float:
    """Returns how many bytes a second a GPU receives from another one while it sends as many; 0
    where there is one GPU, or where that cannot be measured now.
    """
    if torch.cuda.device_count() < 2:
        return 0.0
    try:
        with contextlib.closing(HelperProcess(_PROGRAM, {}, quiet=True)) as process:
            answer = process.next_line(_PATIENCE) or {}
    except OSError:
        return 0.0
    return float(answer.get("rate", 0.0))


def main() -> None:
    """Measures the link between the first two GPUs, and writes the rate as a line of JSON."""
    answers = take_output()
    answers.write(json.dumps({"rate": _measured()}).encode() + b"\n")
    answers.flush()


def _measured() -> float:
    pairs = []
    for source, target in ((0, 1), (1, 0)):
        sent = torch.zeros(_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
        received = torch.zeros(_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
        pairs.append((sent, received, torch.cuda.Stream(source)))

    def copy_all(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            for sent, received, stream in pairs:
                with torch.cuda.stream(stream):
                    received.copy_(sent, non_blocking=True)
        for device in (0, 1):
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    copy_all(2)  # the first copies set the link up
    return _COPIES * _BYTES / copy_all(_COPIES)
