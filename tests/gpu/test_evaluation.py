"""Evaluation on a GPU: one sweep of compiled kernels, whose loss is that of the CPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch._inductor.utils import fresh_cache

from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import Lane
from engine.runtime.device.compiled import CompiledBlock
from engine.runtime.device.cuda_backend import CudaBackend
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
    choices = PlanChoices().changed(micro_batches=2, **changes)
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
    assert not gpu.engine.templates.compiling[1]
    cpu.close()
    gpu.close()


@pytest.mark.parametrize("resident", [0, 3])
def test_little_free_memory_makes_groups_and_changes_no_bit(monkeypatch, resident):
    backend = CountingBackend()
    gpu = opened(backend, offloaded_block_inputs=True, blocks_kept_in_slots=resident)
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
    gpu = opened(backend, offloaded_block_inputs=True)
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


WIDE = tiny_config("llama", intermediate_size=16384, num_hidden_layers=1)


@pytest.mark.parametrize("has_room, rows", [(False, 64), (True, 96)], ids=["without", "with"])
def test_what_the_compiler_times_is_not_copied_to_pinned_memory(monkeypatch, has_room, rows):
    """Without room below the peak it is, which shows that this test would see it."""
    if not has_room:
        monkeypatch.setattr(CompiledBlock, "_make_room", lambda *_: None)
    backend = CudaBackend()
    choices = PlanChoices().changed(micro_batches=1, compiled=True)
    wide = streamed(plain_model(WIDE), choices, backend=backend, dtype="bfloat16", tokens=rows * 64)
    widest = rows * 64 * 16384 * 2
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_peak_host_memory_stats()
    # What is in use, and not what is allocated: an earlier test may have left a free block.
    before = torch.cuda.host_memory_stats()["active_bytes.current"]
    with fresh_cache():  # what was timed once is known to later processes
        wide.engine.evaluate(random_batches(1, rows=rows, length=64))
    taken = torch.cuda.host_memory_stats()["active_bytes.peak"] - before
    assert taken < widest / 8 if has_room else taken >= widest
    wide.close()
