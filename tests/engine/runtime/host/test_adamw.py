from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from engine.config.optimizers import MOMENTS, OptimizerSettings
from engine.paths import PROGRAM_ROOT
from engine.planning.layout.layout import ParameterSpec, lay_out
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.host_optimizer import GradientChunk, HostStep
from engine.runtime.host.host_states import HostStates
from engine.runtime.optimizer import host_threads
from engine.runtime.optimizer.host_kernels import kernel
from tests.support.optimizers import torch_optimizer

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1
SHAPES = {"proj.weight": (37, 41), "norm.weight": (41,)}


def new_states(dtype: str, shapes=SHAPES, seed: int = 0) -> HostStates:
    specs = [
        ParameterSpec(name, f"model.{name}", shape, len(shape) > 1)
        for name, shape in shapes.items()
    ]
    states = HostStates([lay_out("block.0", specs)], dtype, threads=1)
    states.allocate_weights()
    states.allocate_states()
    generator = torch.Generator().manual_seed(seed)
    for spec in specs:
        states.parameters.write(
            "block.0", spec.name, torch.randn(spec.shape, generator=generator) * 0.05
        )
    return states


def set_gradients(states: HostStates, seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Random gradients of very different sizes in the grad plane, and what each parameter got."""
    generator = torch.Generator().manual_seed(seed)
    found, layout = {}, states.layouts["block.0"]
    for spec, offset in zip(layout.parameters, layout.offsets):
        values = torch.randn(spec.shape, generator=generator) * 10 ** (
            torch.rand(spec.shape, generator=generator) * -6
        )
        target = states.tensor("block.0", "grad")[offset : offset + spec.numel].view(spec.shape)
        target.copy_(values * scale)
        found[spec.name] = target.float()
    return found


def reference(
    states: HostStates, rate: float
) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    specs = states.layouts["block.0"].parameters
    weights = {
        spec.name: torch.nn.Parameter(states.parameters.master("block.0", spec.name))
        for spec in specs
    }
    decayed = {spec.name for spec in specs if spec.decay}
    settings = OptimizerSettings(*BETAS, EPS, DECAY)
    return weights, torch_optimizer(weights, decayed, rate=rate, settings=settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("clip", [1.0, 0.37])
def test_equals_torch_adamw_with_fp32_masters(dtype, clip):
    states = new_states(dtype)
    weights, optimizer = reference(states, 0.0)
    host = HostAdamW(states, OptimizerSettings(*BETAS, EPS, DECAY), threads=2)
    for step in range(1, 9):
        rate = 1e-3 * step
        gradients = set_gradients(states, step)
        before = states.array("block.0", "grad").copy()
        host.update("block.0", HostStep(step, rate, clip))
        assert (states.array("block.0", "grad") == before).all()
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, weight in weights.items():
            weight.grad = gradients[name] * clip
        optimizer.step()
    layout = states.layouts["block.0"]
    for spec, offset in zip(layout.parameters, layout.offsets):
        weight, state = weights[spec.name], optimizer.state[weights[spec.name]]
        torch.testing.assert_close(
            states.parameters.master("block.0", spec.name), weight.data, rtol=0, atol=2.4e-6
        )
        for plane in ("exp_avg", "exp_avg_sq"):
            moment = states.tensor("block.0", plane)[offset : offset + spec.numel].view(spec.shape)
            torch.testing.assert_close(moment, state[plane], rtol=1e-5, atol=1e-9)
        if dtype == "bfloat16":
            assert (
                (states.parameters.view("block.0", spec.name).float() - weight.data).abs()
                <= weight.data.abs() * 2**-8
            ).all()
    host.close()
    states.close()


def test_updates_below_bf16_resolution_add_up():
    states = new_states("bfloat16", {"proj.weight": (64, 64)})
    states.parameters.write("block.0", "proj.weight", torch.ones(64, 64))
    states.tensor("block.0", "grad").fill_(1.0)
    host = HostAdamW(states, OptimizerSettings(0.9, 0.999, 1e-8, 0.0))
    for step in range(1, 21):
        host.update("block.0", HostStep(step, 1e-5))
    expected = torch.full((64, 64), 1 - 2e-4)
    torch.testing.assert_close(
        states.parameters.master("block.0", "proj.weight"), expected, rtol=0, atol=1e-6
    )
    assert (states.parameters.view("block.0", "proj.weight") == 1).all()
    host.close()
    states.close()


def test_decay_stops_where_the_decayed_range_ends():
    states = new_states("float32")
    states.parameters.write("block.0", "proj.weight", torch.ones(37, 41))
    states.parameters.write("block.0", "norm.weight", torch.ones(41))
    host = HostAdamW(states, OptimizerSettings(*BETAS, EPS, weight_decay=0.5))
    host.update("block.0", HostStep(1, 0.1))  # gradients are zero
    assert (states.parameters.master("block.0", "proj.weight") == np.float32(0.95)).all()
    assert (states.parameters.master("block.0", "norm.weight") == 1).all()
    host.close()
    states.close()


def in_one_pass(host: HostAdamW, step: HostStep) -> None:
    host.update("block.0", step)


def in_two_passes(host: HostAdamW, step: HostStep) -> None:
    for update in (host.update_weights, host.update_moments):
        update("block.0", step)


def in_chunks(host: HostAdamW, step: HostStep) -> None:
    """Updates the weights of all chunks first. One begins among the elements without decay."""
    gradients = host._states.array("block.0", "grad")
    cuts = (0, 700, 1530, len(gradients))
    chunks = [GradientChunk(a, gradients[a:b]) for a, b in itertools.pairwise(cuts)]
    for update in (host.update_weights, host.update_moments):
        for chunk in chunks:
            update("block.0", step, chunk)


def run_steps(dtype: str, shapes, threads: int, update=in_one_pass) -> list[bytes]:
    states = new_states(dtype, shapes)
    host = HostAdamW(states, OptimizerSettings(*BETAS, EPS, DECAY), threads)
    for step in (1, 2, 3):
        set_gradients(states, step)
        update(host, HostStep(step, 1e-3, 0.9))
    found = [states.array("block.0", plane).tobytes() for plane in states.planes]
    host.close()
    states.close()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_thread_count(dtype, monkeypatch):
    monkeypatch.setattr(host_threads, "SHARE", 256)
    one = run_steps(dtype, SHAPES, 1)
    assert all(run_steps(dtype, SHAPES, threads) == one for threads in (2, 5))


@pytest.mark.parametrize("update", [in_two_passes, in_chunks])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_may_be_updated_after_the_weights(dtype, update, monkeypatch):
    monkeypatch.setattr(host_threads, "SHARE", 256)
    assert run_steps(dtype, SHAPES, 2, update) == run_steps(dtype, SHAPES, 2)


def test_rounded_moments_are_updated_in_one_pass():
    states = new_states("bfloat16")
    states.release_states()
    states.allocate_states(optimizer="adamw_8bit")
    host = HostAdamW(states, OptimizerSettings(), 1)
    host.compile_for(two_passes=False)
    with pytest.raises(ValueError, match="not in fp32"):
        host.compile_for(two_passes=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_pass_leaves_moments_and_the_second_one_weights(dtype):
    states = new_states(dtype)
    host = HostAdamW(states, OptimizerSettings(*BETAS, EPS, DECAY), 1)
    set_gradients(states, 1)
    weights = [plane for plane in states.planes if plane.startswith("weight")]

    def bits(planes) -> list[bytes]:
        return [states.array("block.0", plane).tobytes() for plane in planes]

    moments, before = bits(MOMENTS), bits(weights)
    host.update_weights("block.0", HostStep(1, 1e-2))
    assert bits(MOMENTS) == moments and bits(weights) != before
    before = bits(weights)
    host.update_moments("block.0", HostStep(1, 1e-2))
    assert bits(weights) == before and bits(MOMENTS) != moments


@pytest.mark.parametrize(
    "columns",
    [host_threads.SHARE - 64, host_threads.SHARE - 1, host_threads.SHARE, host_threads.SHARE + 1],
)
def test_sizes_around_the_chunk(columns):
    shapes = {"proj.weight": (1, columns), "norm.weight": (1,)}
    states = new_states("bfloat16", shapes)
    weights, optimizer = reference(states, 1e-3)
    gradients = set_gradients(states, 1)
    host = HostAdamW(states, OptimizerSettings(*BETAS, EPS, DECAY), threads=2)
    host.update("block.0", HostStep(1, 1e-3))
    for name, weight in weights.items():
        weight.grad = gradients[name]
    optimizer.step()
    for name, weight in weights.items():
        torch.testing.assert_close(
            states.parameters.master("block.0", name), weight.data, rtol=0, atol=2.4e-6
        )
    host.close()
    states.close()


def test_alignment_gaps_stay_zero_even_with_an_eps_that_fp32_cannot_hold():
    states = new_states("float32")
    host = HostAdamW(states, OptimizerSettings(*BETAS, eps=1e-60, weight_decay=DECAY))
    host.update("block.0", HostStep(1, 1e-3))
    plane = states.tensor("block.0", "weight_high")
    assert plane.isfinite().all()
    assert not plane[37 * 41 : states.layouts["block.0"].decay_numel].any()
    host.close()
    states.close()


def test_moments_leave_the_subnormal_range_and_tiny_gradients_change_nothing():
    states = new_states("bfloat16", {"proj.weight": (64, 64)})
    before = states.parameters.master("block.0", "proj.weight")
    states.tensor("block.0", "exp_avg").fill_(1e-39)
    states.tensor("block.0", "exp_avg_sq").fill_(1e-39)
    states.tensor("block.0", "grad").fill_(1e-19)
    host = HostAdamW(states, OptimizerSettings(0.9, 0.999, 1e-8, 0.0))
    for step in (1, 2):
        host.update("block.0", HostStep(step, 1e-3))
    for plane in ("exp_avg", "exp_avg_sq"):
        assert (states.tensor("block.0", plane) >= 2.0**-126).all()
    states.tensor("block.0", "grad").zero_()
    states.tensor("block.0", "exp_avg").fill_(1e-39)
    host.update("block.0", HostStep(3, 1e-3))
    assert not states.tensor("block.0", "exp_avg").any()
    assert torch.equal(states.parameters.master("block.0", "proj.weight"), before)
    host.close()
    states.close()


def test_a_very_small_eps_still_counts_tiny_gradients():
    states = new_states("float32", {"proj.weight": (64, 64)})
    weights, optimizer = reference(states, 1e-3)
    optimizer.param_groups[0]["eps"] = 1e-18
    states.tensor("block.0", "grad").fill_(1e-17)
    weights["proj.weight"].grad = torch.full((64, 64), 1e-17)
    host = HostAdamW(states, OptimizerSettings(*BETAS, 1e-18, DECAY))
    host.update("block.0", HostStep(1, 1e-3))
    optimizer.step()
    torch.testing.assert_close(
        states.parameters.master("block.0", "proj.weight"),
        weights["proj.weight"].data,
        rtol=0,
        atol=2.4e-6,
    )
    host.close()
    states.close()


def test_nan_reaches_the_weights_where_it_can_be_found():
    states = new_states("bfloat16", {"proj.weight": (64, 64)})
    states.tensor("block.0", "grad")[5] = float("nan")
    host = HostAdamW(states, OptimizerSettings(*BETAS, EPS, DECAY))
    host.update("block.0", HostStep(1, 1e-3))
    assert states.tensor("block.0", "weight_high").isnan().nonzero().tolist() == [[5]]
    assert states.parameters.master("block.0", "proj.weight").isnan().sum() == 1
    host.close()
    states.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_in_a_chunk_reaches_the_caller(threads):
    done = []

    def task(number):
        if number == 3:
            raise ValueError("chunk 3")
        done.append(number)

    workers = host_threads.Workers(threads, "test")
    with pytest.raises(ValueError, match="chunk 3"):
        workers.run(task, [(number,) for number in range(100)])
    if threads == 1:
        assert done == [0, 1, 2]
    workers.run(done.append, [(7,), (7,)])
    assert done[-2:] == [7, 7]
    workers.close()


@pytest.mark.parametrize("threads", [1, 3, 14])
@pytest.mark.parametrize(
    "numel", [1, host_threads.SHARE, host_threads.SHARE + 1, 9 * host_threads.SHARE + 5]
)
def test_threads_share_every_element_once(threads, numel):
    """More than that would move a weight twice, fewer would leave one where it is."""
    decayed = numel // 3
    planes = [np.full(numel, value, np.float32) for value in (1.0, 1.0, 0.0, 0.0)]
    scalars = np.array([1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.125, 1.0, 0.0, 0.0], np.float32)
    clip, keep, take1, beta2, take2, step_size, root2, eps, bias = scalars[
        [0, 1, 2, 3, 4, 6, 5, 7, 8]
    ]
    workers = host_threads.Workers(threads, "test")
    workers.share(
        kernel("adamw_float"),
        numel,
        decayed,
        tuple(planes),
        (clip, keep, take1, beta2, take2, step_size, root2, eps, bias),
    )
    workers.close()
    assert (planes[1][:decayed] == 0.5 - 0.0625).all()
    assert (planes[1][decayed:] == 1.0 - 0.0625).all()
    assert (planes[2] == 1.0).all() and (planes[3] == 1.0).all()


@pytest.mark.parametrize(
    "cores,threads", [(1, 1), (2, 2), (7, 7), (8, 6), (16, 14), (34, 32), (192, 32)]
)
def test_of_many_cores_two_are_left_free(monkeypatch, cores, threads):
    monkeypatch.setattr(host_threads, "usable_cores", lambda: cores)
    assert host_threads.default_threads() == threads


def test_kernels_compile_where_no_cache_folder_can_be_written(tmp_path):
    program = (
        "from numba.core import caching\n"
        "def refuse(*args): raise OSError('read-only')\n"
        "caching._CacheLocator.ensure_cache_path = refuse\n"
        "from engine.runtime.optimizer.host_kernels import kernel\n"
        "import numpy as np\n"
        "low, high, back = np.zeros(3, np.int16), np.zeros(3, np.uint16), np.zeros(3, np.float32)\n"
        "kernel('split')(np.float32([1.1, -2.2, 3.3]), high, low)\n"
        "kernel('join')(high, low, back)\n"
        "print(back.tolist() == np.float32([1.1, -2.2, 3.3]).tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROGRAM_ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("name", ["adamw_split", "adamw_float", "touch"])
def test_a_kernel_gives_back_every_array_that_it_was_given(name):
    # A generator of numba kept the counter of each call. Such rests of 100 bytes, scattered in the
    # heap, made a run's memory grow by 270 KiB a step.
    halves = [np.zeros(1000, dtype) for dtype in (np.uint16, np.uint16, np.int16)]
    floats = [np.zeros(1000, np.float32) for _ in range(4)]
    planes = tuple(floats if name == "adamw_float" else [*halves, *floats[:2]])
    counter = np.zeros(1, np.int64)
    others: tuple = (planes,)
    if name != "touch":
        others = (500, planes, (np.float32(0.5),) * 9)
    before = [sys.getrefcount(array) for array in (counter, *planes)]
    for _ in range(10):
        counter[0] = 0
        kernel(name)(counter, 256, *others)
    assert counter[0] == 5  # four chunks, and the question that found none left
    assert [sys.getrefcount(array) for array in (counter, *planes)] == before
