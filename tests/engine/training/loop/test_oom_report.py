"""A shortage of memory is explained by item: the sentences for invented figures, the watch with a
fake sampler, and the end of a run.
"""

from __future__ import annotations

import mmap

import pytest
import torch

import engine.training.loop.memory_watch
from engine.errors import GpuMemoryError, HostMemoryError
from engine.planning.fit.device_memory import CUDA_CONTEXT_BYTES
from engine.planning.fit.memory_items import Item, MemoryItem
from engine.runs.record.events import JobProgressed
from engine.runtime.device.cpu_backend import CpuBackend
from engine.text import GIB, MIB
from engine.training.loop.explain import MemoryNote, explained, note_memory
from engine.training.loop.memory_watch import MemoryWatch, PeakMemory
from engine.training.loop.oom_report import (
    GpuFigures,
    HostFigures,
    Share,
    blamed,
    gpu_oom_report,
    gpu_shares,
    host_oom_report,
    host_shares,
)
from engine.training.loop.run import start_run
from tests.support.failing import at_event, failed
from tests.support.folders import make_config
from tests.support.forecasts import REPORT

HELD = {"planes": 14 * GIB, "block inputs": 3 * GIB, "data": GIB // 2}


def shares_of(rss: float, others: float, held=HELD, loading=False) -> tuple[Share, ...]:
    return host_shares(
        REPORT, HostFigures(held, round(rss * GIB), round(others * GIB), 2 * GIB, loading)
    )


# ---------------------------------------------------------------------- the host


def test_the_item_above_its_plan_is_named_with_both_figures():
    took_more = host_shares(
        REPORT, HostFigures(HELD | {"block inputs": 31 * GIB}, 47 * GIB, 2 * GIB, 2 * GIB)
    )
    assert host_oom_report(took_more, 47 * GIB) == (
        "block inputs took 31.0 GiB, 28.0 GiB more than planned (this process takes 47.0 GiB: "
        "planes "
        "14.0 GiB, 14.0 GiB planned; block inputs 31.0 GiB, 3.0 GiB planned; data 512 MiB, 512 MiB "
        "planned; the rest of it 1.5 GiB, 1.0 GiB planned; everything else 2.0 GiB, 2.0 GiB when "
        "the plan was made)"
    )


@pytest.mark.parametrize(
    "rss, others, reported",
    [
        (30.5, 2, "the rest of this process took 13.0 GiB, 12.0 GiB more than planned"),
        (18.6, 9, "other programs took 9.0 GiB, 7.0 GiB more than when the plan was made"),
        (18.5, 2, "nothing took more than planned, so the plan left too little room"),
        (16.0, 1, "nothing took more than planned, so the plan left too little room"),
    ],
    ids=["leak", "other programs", "tight", "below"],
)
def test_who_is_to_blame(rss, others, reported):
    assert blamed(shares_of(rss, others)) == reported


def test_while_weights_are_read_only_they_and_their_copy_are_planned():
    held = {"planes": 4 * GIB, "data": GIB // 2}
    found = {share.name: share.planned / GIB for share in shares_of(7.5, 2, held, loading=True)}
    assert found == {"planes": 4, "data": 0.5, "the rest of it": 3, "everything else": 2}
    then = {
        share.name: share.planned / GIB
        for share in shares_of(9, 2, {"planes": 14 * GIB}, loading=True)
    }
    assert then["planes"] == 14 and then["the rest of it"] == 1, "then come the optimizer states"


def test_a_report_without_items_blames_nobody_wrongly():
    assert blamed(()) == "nothing took more than planned, so the plan left too little room"
    assert host_shares({}, HostFigures({}, 0, 0, 0)) == ()


class Sampler:
    """A `Sampler` returns the next pair (resident, available) at each call, and then the last one
    forever.
    """

    def __init__(self, *available: int):
        self.rest = list(available)

    def __call__(self) -> tuple[int, int]:
        return 30 * GIB, self.rest.pop(0) if len(self.rest) > 1 else self.rest[0]


@pytest.mark.parametrize(
    "left, looks",
    [
        ((60 * MIB,), 1),
        ((8 * GIB, 100 * MIB, 90 * MIB), 3),
        ((100 * MIB, 8 * GIB, 100 * MIB, 8 * GIB), None),
    ],
)
def test_the_watch_tells_the_account_of_the_moment(monkeypatch, left, looks):
    monkeypatch.setattr(engine.training.loop.memory_watch, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(engine.training.loop.memory_watch, "sample_host_memory", Sampler(*left))
    watch = MemoryWatch(lambda rss, available: f"{rss // GIB} and {available // MIB}")
    for poll in range(1, 6):
        if poll == looks:
            with pytest.raises(HostMemoryError, match=f"^30 and {left[-1] // MIB}$"):
                watch.check()
            return
        watch.check()
    assert looks is None


def test_the_peak_is_of_what_came_after():
    peak = PeakMemory()
    if not peak._marked:
        pytest.skip("this system does not set its mark back")
    before = peak.read()
    with mmap.mmap(-1, 96 * MIB) as ballast:  # certain to be returned to the system
        ballast[:] = bytes([1]) * len(ballast)
    assert peak.read() - before > 60 * MIB
    assert PeakMemory().read() < peak.read()


def test_memory_that_runs_low_while_weights_are_read_ends_the_run_by_item(
    capsys, preset, runs, monkeypatch
):
    def low():
        monkeypatch.setattr(engine.training.loop.memory_watch, "POLL_SECONDS", 0.0)
        monkeypatch.setattr(
            engine.training.loop.memory_watch, "sample_host_memory", lambda: (20 * GIB, MIB)
        )

    at_event(monkeypatch, lambda e: isinstance(e, JobProgressed) and e.job == "allocate", low)
    sentence = failed(capsys, runs, preset, code=1)
    assert "RAM ran low, with 1 MiB left of " in sentence
    assert "the rest of this process took 20.0 GiB, " in sentence
    assert sentence.endswith(
        "; nothing was trained yet, so free some memory or choose a smaller model or batch, and "
        "start again."
    )


# ---------------------------------------------------------------------- the GPU

ITEMS = (
    Item(MemoryItem.BLOCK_SLOTS, 4 * GIB),
    Item(MemoryItem.MAIN_GRADS, 6 * GIB),
    Item(MemoryItem.BLOCK_INPUTS, 3 * GIB),
    Item(MemoryItem.WORKING_SET, 5 * GIB, "backward of one block"),
    Item(MemoryItem.CUDA_CONTEXT, CUDA_CONTEXT_BYTES),
    Item(MemoryItem.ALLOCATOR_SLACK, GIB // 4),
)


def figures(peak=18.0, reserved=18.25, others=0.0, buffers=10.0) -> GpuFigures:
    free = 24 * GIB - round((reserved + others) * GIB) - CUDA_CONTEXT_BYTES
    return GpuFigures(
        round(buffers * GIB),
        round((peak - 1) * GIB),
        round(peak * GIB),
        round(reserved * GIB),
        free,
        24 * GIB,
    )


@pytest.mark.parametrize(
    "measured, reported",
    [
        (
            figures(peak=22, reserved=22.2),
            "activations and the working set took 12.0 GiB, 4.0 GiB more than planned",
        ),
        (
            figures(peak=20, reserved=20, buffers=12),
            "buffers took 12.0 GiB, 2.0 GiB more than planned",
        ),
        (figures(reserved=21.0), "gaps between tensors took 3.0 GiB, 2.8 GiB more than planned"),
        (
            figures(others=5.0),
            "other programs on the card took 5.0 GiB, 4.0 GiB more than when the plan was made",
        ),
        (figures(others=1.0), "nothing took more than planned"),
    ],
    ids=["activations", "buffers", "gaps", "other programs", "tight"],
)
def test_the_gpu_by_item(measured, reported):
    sentence = gpu_oom_report(gpu_shares(ITEMS, measured, GIB))
    assert sentence.startswith(reported)
    for name in (
        "activations and the working set",
        "buffers",
        "gaps between tensors",
        "other programs on the card",
    ):
        assert sentence.count(f"{name} ") >= 1


def test_an_error_of_the_gpu_keeps_what_was_measured_when_it_came():
    for error in (
        torch.OutOfMemoryError("CUDA out of memory."),
        GpuMemoryError("17.0 GiB in use of 24.0"),
    ):
        note_memory(error, lambda: MemoryNote("", figures(others=5.0), GIB))
        note_memory(
            error, lambda: MemoryNote("", figures(), GIB)
        )  # memory may have been freed by now
        found = str(explained(error, ITEMS))
        assert found.startswith("The GPU ran out of memory (17.0 GiB in use of 24.0")
        assert (
            ": other programs on the card took 5.0 GiB, 4.0 GiB more than when the plan was made ("
            in found
        )
        assert "where the plan takes" in found
        assert "Working set 5.0 GiB (backward of one block)" in found
        assert "; end the other programs on the card, or lower train.micro_batch_size" in found


def test_a_node_that_refuses_memory_is_told_by_item_and_other_errors_carry_nothing():
    error, other = MemoryError(), ValueError("no")
    for each in (error, other):
        note_memory(each, lambda: MemoryNote("planes took 3 GiB", figures(), 0))
    assert "The host ran out of memory: planes took 3 GiB; free" in str(explained(error))
    assert not vars(other)
    silent = MemoryError()
    note_memory(silent, lambda: 1 / 0)  # a device that no longer responds
    assert str(explained(silent)).startswith("The host ran out of memory: this process takes ")


def test_the_plans_buffers_are_what_the_engine_allocates(tmp_path):
    """Both sums count the same buffers, so that everything beyond them is activations."""
    from engine.training.loop.trainer import Trainer

    seen = {}

    class Stop(Exception):
        pass

    def poll(self: Trainer):
        prepared = self.prepared
        seen["engine"] = prepared.engine.state.fixed_bytes()
        seen["planned"] = {
            share.name: share.planned
            for share in gpu_shares(prepared.chosen.gpu_items, figures(), 0)
        }
        breakdown = prepared.planned.breakdown
        seen["held"], seen["host"] = (
            breakdown.held(),
            host_shares(breakdown.report, HostFigures(breakdown.held(), 0, 0, 0)),
        )
        raise Stop

    run = start_run(make_config(tmp_path), tmp_path / "runs")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "run", poll)
        assert run.execute().error_type == "Stop"
    assert seen["planned"]["buffers"] == seen["engine"] > 0
    planes = next(share for share in seen["host"] if share.name == "planes")
    assert planes.planned == seen["held"]["planes"] > 0 and seen["held"]["data"] > 0


def test_a_run_out_of_gpu_memory_ends_with_the_account(capsys, preset, runs, monkeypatch):
    from engine.runtime.step.streaming_engine import StreamingEngine

    memory = {
        "allocated": 20 * GIB,
        "peak": 22 * GIB,
        "reserved": 22 * GIB,
        "total": 24 * GIB,
        "free": 0,
        "retries": 0,
        "peak_reserved": 0,
    }

    def full(self, number, *arguments):
        monkeypatch.setattr(CpuBackend, "memory", lambda self: memory)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(StreamingEngine, "train_step", full)
    sentence = failed(capsys, runs, preset, code=1)
    assert (
        "(20.0 GiB in use of 24.0 GiB): activations and the working set took 22.0 GiB, " in sentence
    )
    assert "other programs on the card 1.4 GiB, 0 KiB when the plan was made" in sentence


def test_the_memory_of_further_processes_is_the_run_s_own(monkeypatch):
    rss, available, of_ranks = 10 * GIB, 2 * GIB, {1: 3 * GIB, 2: GIB}
    monkeypatch.setattr(
        engine.training.loop.memory_watch, "sample_host_memory", lambda: (rss, available)
    )
    alone = MemoryWatch(lambda taken, _: f"{taken // GIB}")
    together = MemoryWatch(lambda taken, _: f"{taken // GIB}", lambda: of_ranks)
    assert alone.poll() == (rss, available) and together.poll() == (14 * GIB, available)
    available = 1 << 20
    together.poll()
    with pytest.raises(HostMemoryError, match="14"):
        together.check()
    assert "the 3 processes of the run take 14.0 GiB" in host_oom_report([], 14 * GIB, 3)
