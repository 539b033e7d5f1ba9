"""A run from its configuration to its export on a GPU, through the same calls as the app and the
command line.
"""

from __future__ import annotations

import pytest
import torch

from engine.runs.record.events import ForecastChecked, MemorySampled, RunStarted, StepFinished
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.text import MIB
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.loop.run import resume_run, start_run
from tests.support.gpu_configs import gpu_config
from tests.support.trained_runs import events_of, execute, planes_on_disk

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("states", ["host", "auto"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_stop_save_and_resume_equal_the_undisturbed_run_to_the_bit(
    deterministic, tmp_path, dtype, states
):
    config = gpu_config(tmp_path, dtype, **{"engine.states": states})
    before = torch.cuda.memory_reserved()
    whole = start_run(config, tmp_path / "runs")
    assert execute(whole).state == "finished", whole.recorder.snapshot.reason
    (started,) = events_of(whole, RunStarted)
    assert started.device == "cuda"
    memory = events_of(whole, MemorySampled)[-1]
    assert memory.host_pinned > 0 or states == "auto"  # the whole model may live on the card
    assert 0 < memory.gpu_allocated <= memory.gpu_peak <= memory.gpu_driver
    for step in events_of(whole, StepFinished)[1:]:
        assert sum(step.exposed.values()) <= step.seconds + 1e-5
    part = start_run(config, tmp_path / "runs")
    assert execute(part, {3: "stop"}).state == "stopped"
    assert newest_checkpoint(part.folder.checkpoints_path).step < 8
    again = resume_run(tmp_path / "runs", part.id)
    assert execute(again).state == "finished"
    found, expected = planes_on_disk(again), planes_on_disk(whole)
    assert [name for name in expected if found[name] != expected[name]] == []
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_a_run_with_a_dry_run_equals_one_without_to_the_bit(
    deterministic, tmp_path, monkeypatch, kernels
):
    config = gpu_config(tmp_path, "bfloat16", **{"engine.kernels": kernels, "train.steps": 12})
    dry = start_run(config, tmp_path / "runs")
    assert execute(dry).state == "finished", dry.recorder.snapshot.reason
    first, *_, last = events_of(dry, ForecastChecked)
    assert (first.moment, last.moment) == ("dry_run", "end")
    peak = first.quantities["gpu_peak_bytes"]
    measured = last.quantities["gpu_peak_bytes"]["measured"]
    # The dry run leaves out the optimizer and the recording of CUDA graphs, and only these may take
    # more. The allocator keeps segments of 20 MiB for each stream of its own. While blocks are
    # recorded, forward and backward call cuBLAS in two threads, each of which keeps a workspace of
    # 32 MiB (seen in the allocator's snapshot on an H100).
    left_out = 3 * 20 * MIB + (2 * 32 * MIB if kernels == "compiled" else 0)
    assert measured - left_out <= peak["measured"]
    assert peak["measured"] <= measured
    assert measured <= peak["predicted"]
    assert last.quantities["step_seconds"]["measured"] > 0
    monkeypatch.setattr("engine.training.loop.step_loop.LEAST_STEPS", 13)
    without = start_run(config, tmp_path / "runs")
    assert execute(without).state == "finished"
    assert [event.moment for event in events_of(without, ForecastChecked)] == ["running", "end"]
    assert planes_on_disk(dry) == planes_on_disk(without)


def test_a_card_that_is_too_small_ends_the_run_in_its_dry_run_by_item(tmp_path, monkeypatch):
    real = StreamingEngine.dry_run

    def dry_run(self, *arguments):
        self.backend.limit_memory(self.backend.memory()["reserved"])
        real(self, *arguments)

    monkeypatch.setattr(StreamingEngine, "dry_run", dry_run)
    run = start_run(
        gpu_config(
            tmp_path,
            "float32",
            **{
                "train.steps": 12,
                "data.max_seq_len": 256,
                "train.batch_size": 256,
                "train.micro_batch_size": 256,
            },
        ),
        tmp_path / "runs",
    )
    try:
        ended = execute(run)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert ended.error_type == "GpuMemoryError" and not events_of(run, StepFinished)
    assert "activations and the working set " in ended.reason
    assert "other programs on the card " in ended.reason
