"""Evaluation on a GPU: one sweep of compiled kernels, whose loss is that of the CPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine.plan.choices import PlanChoices
from engine.plan.ops import Lane
from engine.runtime.cuda_backend import CudaBackend
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.gpu

CONFIG = tiny_config("qwen3", hidden_size=128, head_dim=32, num_hidden_layers=6)
ROWS = dict(rows=4, length=64)


class CountingBackend(CudaBackend):
    """It counts the ops that it is given, by lane."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[Lane] = Counter()

    def submit(self, lane, waits, work):
        self.counts[lane] += 1
        return super().submit(lane, waits, work)


def opened(backend=None, dtype="float32", **changes):
    choices = PlanChoices(micro_batches=2, **changes)
    size = ROWS["rows"] * ROWS["length"]
    return streamed(plain_model(CONFIG), choices, backend=backend, dtype=dtype, tokens=size)


@pytest.mark.parametrize("dtype, bound", [("float32", 1e-4), ("bfloat16", 2e-3)])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_loss_is_that_of_the_cpu(compiled, dtype, bound):
    batches = [*random_batches(7, **ROWS), *random_batches(1, rows=1, length=48, masked=0.9)]
    cpu = opened(dtype=dtype)
    expected = cpu.engine.evaluate(batches)
    gpu = opened(CountingBackend(), dtype, compiled=compiled)
    assert gpu.engine.evaluate(batches) == pytest.approx(expected, rel=bound)
    again = gpu.engine.evaluate(batches)
    assert gpu.engine.evaluate(batches) == again
    assert not gpu.engine.state.compiling[1]
    cpu.close()
    gpu.close()


@pytest.mark.parametrize("resident", [0, 3])
def test_little_free_memory_makes_groups_and_changes_no_bit(monkeypatch, resident):
    backend = CountingBackend()
    gpu = opened(backend, host_boundaries=True, resident_blocks=resident)
    batches = random_batches(8, **ROWS)
    backend.counts.clear()
    expected = gpu.engine.evaluate(batches)
    assert backend.counts[Lane.H2D] == 8
    monkeypatch.setattr(backend, "free_memory", lambda: 0)
    backend.counts.clear()
    assert gpu.engine.evaluate(batches) == expected
    # Resident blocks are there from the pass before. The slots hold the last two streamed blocks,
    # so each of the four groups fetches all of those.
    assert backend.counts[Lane.H2D] == 2 + 4 * (6 - resident)
    gpu.close()


def test_groups_keep_no_masks_and_tables_of_the_groups_before(monkeypatch):
    backend = CudaBackend()
    gpu = opened(backend, host_boundaries=True)
    monkeypatch.setattr(backend, "free_memory", lambda: 0)
    peaks = []
    for count in (8, 64):
        batches = random_batches(count, **ROWS)
        gpu.engine.evaluate(batches)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        gpu.engine.evaluate(batches)
        peaks.append(torch.cuda.max_memory_allocated())
    tokens = 56 * ROWS["rows"] * ROWS["length"]
    assert peaks[1] - peaks[0] <= 4 * 8 * tokens, "more than token ids, labels and places"
    gpu.close()
