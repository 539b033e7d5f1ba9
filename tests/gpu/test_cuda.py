"""The engine on a CUDA GPU: against the CPU, against plain transformers, and laws 1, 2, 4 and 8 as
they hold there. Law 3 is in test_lanes.py.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from engine.errors import FitError
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.stalls import seconds_by_cause, waits_of
from engine.runtime.device.cuda_backend import CudaBackend
from engine.tools.bench.steps import Planes, RunSettings, random_rows, run_steps
from tests.gpu.measure import llama, peak_at_depth, synchronizations
from tests.support.bf16_parity import Rows, compare_in_bf16
from tests.support.same_bits import BASE, SAME_BITS, assert_same_bits, planes_after
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.gpu

RATE = 3e-3


@pytest.fixture(autouse=True)
def plain_float32():
    """No tf32, and nothing left on the device by the test before."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    yield
    gc.collect()
    torch.cuda.empty_cache()


# ---------------------------------------------------------------------- against the CPU, in float32


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gpt2", "phi3", "qwen3_moe"])
def test_cuda_equals_cpu_in_float32(family, tied):
    plain = plain_model(tiny_config(family, tie_word_embeddings=tied))
    choices = PlanChoices().changed(micro_batches=2)
    cpu, gpu = streamed(plain, choices), streamed(plain, choices, backend=CudaBackend())
    for step in range(1, 6):
        device_updates = []
        for run in (cpu, gpu):
            run.engine.train_step(step, random_batches(2, seed=step), RATE, device_updates.append)
            run.engine.drain()
        assert device_updates[1].loss == pytest.approx(device_updates[0].loss, rel=2e-5)
        assert device_updates[1].grad_norm == pytest.approx(device_updates[0].grad_norm, rel=1e-4)
        for unit in cpu.model.units:
            difference = gpu.host_states.tensor(unit.name, "grad") - cpu.host_states.tensor(
                unit.name, "grad"
            )
            # After the first step the two sets of weights differ by rounding, which training
            # amplifies.
            bound = 2e-6 if step == 1 else 5e-5
            assert difference.norm() / device_updates[0].grad_norm < bound, (
                f"step {step}: gradient of {unit.name}"
            )
    for unit in cpu.model.units:
        for spec in unit.layout.parameters:
            torch.testing.assert_close(
                gpu.host_states.parameters.master(unit.name, spec.name),
                cpu.host_states.parameters.master(unit.name, spec.name),
                rtol=1e-4,
                atol=2e-5,
                msg=lambda m: f"{spec.full_name}: {m}",
            )
    batches = random_batches(2, seed=99)
    assert gpu.engine.evaluate(batches) == pytest.approx(cpu.engine.evaluate(batches), rel=1e-4)
    rows = [[5, 6, 7], [8, 9]]
    torch.testing.assert_close(
        gpu.engine.last_logits(rows), cpu.engine.last_logits(rows), rtol=1e-3, atol=1e-3
    )
    cpu.close()
    gpu.close()


# ---------------------------------------------------------------------- against plain transformers,


def streamed_against_resident(backend, **changes) -> None:
    config = tiny_config(
        "qwen2",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        max_position_embeddings=256,
    )
    rows = Rows(count=4, length=128, loss_chunk=100)
    compare_in_bf16(config, rows, PlanChoices().changed(micro_batches=2, **changes), backend)


def test_streamed_equals_resident_in_bf16():
    streamed_against_resident(CudaBackend())


def test_compiled_equals_resident_in_bf16():
    streamed_against_resident(CudaBackend(), compiled=True, blocks_without_recompute=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_gives_the_same_bits_in_any_plan(deterministic, dtype):
    base = BASE.changed(compiled=True)
    expected = planes_after(base, CudaBackend(), dtype=dtype)
    for changes in (
        dict(blocks_without_recompute=3),
        dict(blocks_without_recompute=2, slots=3, prefetch_depth=2),
        dict(offloaded_block_inputs=True, slots=1),
        dict(rounds=2, main_grad="device", blocks_without_recompute=3),
    ):
        assert_same_bits(
            planes_after(base.changed(**changes), CudaBackend(), dtype=dtype), expected
        )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_optimizers_on_the_device_round_as_those_on_the_host(deterministic, compiled):
    base = BASE.changed(rounds=2, main_grad="device", blocks_without_recompute=3, compiled=compiled)
    device_updates = base.changed(
        device_updated_units=("embed", "block 0", "block 1", "head"), update_buffers=2
    )
    host, device = (
        planes_after(choices, CudaBackend(), dtype="float32") for choices in (base, device_updates)
    )
    for k, (ours, theirs) in enumerate(zip(device, host)):
        if k % 4 != 3:  # gradients that are updated where they are do not come to the host
            assert float((ours - theirs).abs().max()) <= 2e-5 * float(theirs.abs().max())


# ---------------------------------------------------------------------- law 2


@pytest.fixture(scope="module")
def reference():
    torch.use_deterministic_algorithms(True)
    planes = {
        (dtype, tied): planes_after(BASE, CudaBackend(), dtype=dtype, tied=tied)
        for dtype in ("float32", "bfloat16")
        for tied in (False, True)
    }
    torch.use_deterministic_algorithms(False)
    return planes


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["the same plan", *SAME_BITS])
def test_any_plan_gives_the_same_bits(deterministic, reference, name, dtype, tied):
    choices = BASE.changed(**SAME_BITS.get(name, {}))
    assert_same_bits(
        planes_after(choices, CudaBackend(), dtype=dtype, tied=tied), reference[dtype, tied]
    )


def test_fp32_sums_over_rounds_keep_their_bits(deterministic, reference):
    choices = BASE.changed(rounds=2, main_grad="device")
    assert_same_bits(
        planes_after(choices, CudaBackend(), dtype="bfloat16"), reference["bfloat16", False]
    )


def test_dropout_draws_the_same_numbers_in_the_recompute(deterministic):
    recomputed = planes_after(BASE, CudaBackend(), family="gpt2", dropout=0.2)
    kept = BASE.changed(blocks_kept_in_slots=3, blocks_without_recompute=3)
    assert_same_bits(planes_after(kept, CudaBackend(), family="gpt2", dropout=0.2), recomputed)


# ---------------------------------------------------------------------- what runs at once, and what


def test_transfers_run_under_compute():
    planes, backend = None, CudaBackend()
    try:
        planes = Planes.open(llama(8, 1024), backend)
        figures = run_steps(
            planes,
            random_rows([4, 4], 512, 512),
            RunSettings(
                PlanChoices().changed(micro_batches=2, offloaded_block_inputs=True), 3, 1e-4
            ),
        )
    finally:
        if planes is not None:
            planes.close()
        backend.close()
    for pair in ("H2D+COMPUTE", "D2H+COMPUTE", "H2D+D2H", "H2D+COMPUTE+D2H", "HOST+COMPUTE"):
        assert sum(step.overlap[pair] for step in figures.steps) > 0, pair
    for step in figures.steps:
        assert all(seconds >= 0 for seconds in step.exposed.values())
        assert step.busy["COMPUTE"] > 0
        assert sum(step.exposed.values()) + step.busy["COMPUTE"] <= 1.1 * step.seconds, step


def test_peak_memory_does_not_grow_with_depth():
    backend = CudaBackend()
    try:
        peak_at_depth(backend, 2, 512)  # libraries allocate their workspaces in the first run
        peaks = [peak_at_depth(backend, depth, 512)[0] for depth in (8, 32, 96)]
    finally:
        backend.close()
    assert max(peaks) <= 1.02 * min(peaks), peaks


def test_watching_a_step_adds_no_synchronization():
    """Law 8."""
    run = streamed(
        plain_model(tiny_config("qwen2")),
        PlanChoices().changed(micro_batches=2),
        backend=CudaBackend(),
    )
    batches = random_batches(2, seed=1)
    run.engine.train_step(1, batches, RATE)
    run.engine.drain()
    bare = synchronizations(run.engine, 2, batches, RATE)
    device_updates = []

    def watch(home):
        device_updates.append(
            (seconds_by_cause(waits_of(home.spans, None, inline=False)), run.backend.memory())
        )

    added = synchronizations(run.engine, 3, batches, RATE, watch) - bare
    run.close()
    assert device_updates and not added, added


# ---------------------------------------------------------------------- errors


def test_running_out_of_device_memory_is_told_plainly():
    backend = CudaBackend()
    run = streamed(
        plain_model(tiny_config("qwen2")), PlanChoices().changed(micro_batches=1), backend=backend
    )
    backend.limit_memory(torch.cuda.memory_reserved() + (64 << 20))
    try:
        with pytest.raises(FitError, match="ran out of memory"):
            run.engine.train_step(1, random_batches(1, rows=16384, length=64), RATE)
        with pytest.raises(FitError):
            run.engine.drain()
    finally:
        backend.limit_memory(backend.memory()["total"])
    device_updates = []
    run.engine.train_step(1, random_batches(1), RATE, device_updates.append)
    run.engine.drain()
    assert np.isfinite(device_updates[0].loss)
    run.close()


def test_memory_that_cannot_be_registered_is_told_plainly_and_leaves_the_device_usable():
    backend = CudaBackend()
    memory = torch.zeros(1 << 20)
    assert backend.register(memory.data_ptr(), memory.nbytes)
    assert not backend.register(memory.data_ptr(), memory.nbytes)
    assert torch.ones(4, device=backend.device).sum().item() == 4
    backend.unregister(memory.data_ptr())
    assert backend.unregistered_rate() > 1e8
    backend.close()


@pytest.mark.parametrize("home", ["host", "device"])
def test_steps_on_memory_that_is_not_registered_give_the_same_bits(
    deterministic, monkeypatch, home
):
    """As on WSL2 beyond its limit of locked memory."""
    changes = (
        dict(device_updated_units=("embed", "block 0"), update_buffers=2)
        if home == "device"
        else {}
    )
    choices = PlanChoices().changed(micro_batches=2, offloaded_block_inputs=True, **changes)
    plain, planes = plain_model(tiny_config("qwen2")), []
    for refused in (False, True):
        with monkeypatch.context() as patched:
            if refused:
                patched.setattr(CudaBackend, "register", lambda *_: False)
            run = streamed(plain, choices, backend=CudaBackend(), dtype="bfloat16")
        assert (run.engine.refused_bytes > 0) == refused
        for step in (1, 2, 3):
            run.engine.train_step(step, random_batches(2, seed=step), RATE)
        run.engine.drain()
        planes.append(
            [run.host_states.tensor(unit.name, "weight_high").clone() for unit in run.model.units]
        )
        run.close()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*planes))
