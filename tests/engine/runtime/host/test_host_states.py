from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import FitError, ModelError
from engine.planning.layout.layout import ParameterSpec, lay_out
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.host import mapped_memory, parameters, ram_planes
from engine.runtime.host.host_states import HostStates
from engine.runtime.optimizer import fp32_chunks
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config


def layout(unit: str = "block.0", rows: int = 5, columns: int = 100):
    return lay_out(
        unit,
        [
            ParameterSpec("norm.weight", f"{unit}.norm.weight", (columns,), False),
            ParameterSpec("proj.weight", f"{unit}.proj.weight", (rows, columns), True),
        ],
    )


def filled(dtype: str, rows: int = 5, columns: int = 100, **options) -> HostStates:
    states = HostStates([layout(rows=rows, columns=columns)], dtype, **options)
    states.allocate_weights()
    return states


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int32).numpy().view(np.uint32)


def floats(values) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.uint32).view(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_allocates_what_the_layout_says_to_the_byte(dtype):
    layouts = [layout("embed", 7, 333), layout("block.0"), lay_out("empty", [])]
    states = HostStates(layouts, dtype)
    assert states.ram.nbytes == 0
    states.allocate_weights()
    weights = {"weight_high", "weight_low"} if dtype == "bfloat16" else {"weight_high"}
    assert states.ram.nbytes == sum(
        own.plane_bytes(dtype)[plane] for own in layouts for plane in weights
    )
    states.allocate_states()
    for own in layouts:
        found = {plane: states.array(own.unit, plane).nbytes for plane in states.planes}
        assert found == own.plane_bytes(dtype)
    assert states.ram.nbytes == sum(own.host_bytes(dtype) for own in layouts)
    states.close()
    assert states.ram.nbytes == 0


def test_memory_is_zeroed_and_shared_by_array_tensor_and_view():
    states = filled("bfloat16")
    states.allocate_states()
    kinds = {
        "weight_high": (np.uint16, torch.bfloat16),
        "weight_low": (np.int16, torch.int16),
        "exp_avg": (np.float32, torch.float32),
        "exp_avg_sq": (np.float32, torch.float32),
        "grad": (np.uint16, torch.bfloat16),
    }
    for plane, (array_type, tensor_type) in kinds.items():
        assert states.array("block.0", plane).dtype == array_type
        assert states.tensor("block.0", plane).dtype == tensor_type
        assert states.tensor("block.0", plane).shape == (states.layouts["block.0"].numel,)
        assert not states.array("block.0", plane).any()
    states.parameters.view("block.0", "proj.weight")[1, 2] = 1.5
    assert states.tensor("block.0", "weight_high")[102] == 1.5
    assert states.array("block.0", "weight_high")[102] == 0x3FC0
    assert states.parameters.view("block.0", "norm.weight").shape == (100,)
    states.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_fp32_survives_the_split_bit_for_bit(threads, monkeypatch):
    monkeypatch.setattr(
        parameters, "ranges", lambda a, b, size=0: [(i, min(i + 999, b)) for i in range(a, b, 999)]
    )
    generator = np.random.default_rng(0)
    values = generator.integers(0, 2**32, (50, 400), np.uint32)
    special = [
        0,
        0x80000000,
        1,
        0x80000001,
        0x007FFFFF,
        0x3F808000,
        0xBF808000,
        0x3F807FFF,
        0x3F818000,
        0x7F7F7FFF,
        0xFF7F7FFF,
        0x7F800000,
        0xFF800000,
    ]
    values[0, : len(special)] = special
    magnitude = values & 0x7FFFFFFF
    values[(magnitude >= 0x7F7F8000) & (magnitude != 0x7F800000)] = 0x3F800000
    states = filled("bfloat16", 50, 400, threads=threads)
    states.parameters.write("block.0", "proj.weight", floats(values))
    assert (bits(states.parameters.master("block.0", "proj.weight")) == values).all()
    high = states.array("block.0", "weight_high")[: values.size].reshape(values.shape)
    assert (high == ((values.astype(np.uint64) + 0x8000) >> 16)).all()
    states.close()


def test_nan_infinity_and_the_largest_values_are_told_truly():
    values = floats(
        [
            0x7F800001,
            0x7FFFFFFF,
            0xFFFFFFFF,
            0xFF800001,
            0x7F800000,
            0xFF800000,
            0x7F7FFFFF,
            0xFF7F8000,
        ]
    )
    states = filled("bfloat16", 1, 8)
    states.parameters.write("block.0", "proj.weight", values.view(1, 8))
    high, master = (
        states.parameters.view("block.0", "proj.weight")[0].float(),
        states.parameters.master("block.0", "proj.weight")[0],
    )
    for seen in (high, master):
        assert seen[:4].isnan().all()
        assert seen[4:6].tolist() == [float("inf"), float("-inf")]
        assert seen[6:].isfinite().all()
    assert bits(master)[6:].tolist() == [0x7F7F7FFF, 0xFF7F7FFF]
    states.close()


def test_bf16_source_is_copied_as_it_is():
    states = filled("bfloat16")
    states.parameters.write("block.0", "proj.weight", torch.randn(5, 100))
    source = torch.randn(5, 100).bfloat16()
    states.parameters.write("block.0", "proj.weight", source)
    assert torch.equal(states.parameters.view("block.0", "proj.weight"), source)
    assert torch.equal(states.parameters.master("block.0", "proj.weight"), source.float())
    states.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.half(),
        lambda t: t.double(),
        lambda t: t.t().contiguous().t(),
        lambda t: t.repeat(1, 2)[:, ::2],
        torch.nn.Parameter,
        lambda t: t.half().t().contiguous().t(),
    ],
)
@pytest.mark.parametrize("chunk", [1 << 22, 64, 250])
def test_any_float_tensor_of_the_shape_is_written(dtype, make, chunk, monkeypatch):
    monkeypatch.setattr(fp32_chunks, "_CHUNK", chunk)
    states = filled(dtype)
    states.parameters.write("block.0", "norm.weight", torch.full((100,), 7.0))
    source = make(torch.randn(5, 100))
    states.parameters.write("block.0", "proj.weight", source)
    assert torch.equal(states.parameters.master("block.0", "proj.weight"), source.detach().float())
    assert (states.parameters.master("block.0", "norm.weight") == 7).all()
    states.close()


def test_memory_that_is_not_aligned_is_written():
    raw = torch.zeros(500 * 4 + 2, dtype=torch.uint8)
    expected = torch.randn(5, 100)
    ctypes.memmove(raw.data_ptr() + 2, expected.data_ptr(), 2000)
    source = torch.frombuffer(memoryview(raw.numpy())[2:], dtype=torch.float32, count=500).view(
        5, 100
    )
    states = filled("bfloat16")
    states.parameters.write("block.0", "proj.weight", source)
    assert torch.equal(states.parameters.master("block.0", "proj.weight"), expected)
    states.close()


def test_wrong_shape_and_quantized_weights_are_refused_by_name():
    states = filled("bfloat16")
    with pytest.raises(
        ModelError, match=r"block\.0\.proj\.weight has the shape \(100, 5\).*\(5, 100\)"
    ):
        states.parameters.write("block.0", "proj.weight", torch.zeros(100, 5))
    with pytest.raises(ModelError, match=r"block\.0\.proj\.weight is stored as int8"):
        states.parameters.write("block.0", "proj.weight", torch.zeros(5, 100, dtype=torch.int8))
    states.close()


def test_host_states_that_were_never_closed_leave_nothing_registered():
    """The next one may get the same addresses, and would be refused."""
    known = {}
    states = HostStates([layout("a"), layout("b")], "bfloat16", known.setdefault, known.pop)
    states.allocate_weights()
    states.allocate_states()
    assert known
    del states
    gc.collect()
    assert not known


def is_kept_from_forks(address: int) -> bool:
    """Returns whether a forked process does not get the memory at `address` (proc(5), VmFlags)."""
    held = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            held = int(found[1], 16) <= address < int(found[2], 16)
        elif held and line.startswith("VmFlags:"):
            return "dc" in line.split()
    raise AssertionError("the address is not mapped")


def test_a_forked_process_gets_neither_planes_nor_block_inputs():
    known, backend = {}, CpuBackend()
    backend.register, backend.unregister = known.__setitem__, known.pop
    run = streamed(
        plain_model(tiny_config("qwen2")),
        PlanChoices().changed(offloaded_block_inputs=True),
        backend=backend,
    )
    assert run.engine.block_input_bytes in known.values()
    assert all(map(is_kept_from_forks, known))
    assert not is_kept_from_forks(np.ones(1).ctypes.data)
    run.close()


def test_an_engine_that_found_too_little_device_memory_leaves_nothing_registered(monkeypatch):
    known, backend, plain = {}, CpuBackend(), plain_model(tiny_config("qwen2"))
    backend.register, backend.unregister = known.setdefault, known.pop
    choices = PlanChoices().changed(offloaded_block_inputs=True)
    whole = streamed(plain, choices, backend=backend)
    assert known
    whole.close()
    assert not known

    def full(*_):
        assert known
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("engine.runtime.step.streaming_engine.DeviceState", full)
    with pytest.raises(torch.OutOfMemoryError):
        streamed(plain, choices, backend=backend)
    gc.collect()
    assert not known


def test_only_dma_planes_are_registered_and_unregistered_while_they_still_hold_their_values():
    known, order = {}, []

    def unregister(address):
        order.append(ctypes.c_uint16.from_address(address).value)
        del known[address]

    states = HostStates([layout("a"), layout("b")], "bfloat16", known.setdefault, unregister)
    states.allocate_weights()
    states.allocate_states()
    expected = {
        states.array(unit, plane).ctypes.data: states.layouts[unit].numel * 2
        for unit in "ab"
        for plane in ("weight_high", "grad")
    }
    assert known == expected
    assert states.ram.pinned_bytes == sum(expected.values())
    for unit in "ab":
        states.array(unit, "weight_high")[0] = states.array(unit, "grad")[0] = 77
    states.close()
    assert not known
    assert order == [77] * 4
    assert states.ram.pinned_bytes == 0
    states.close()


def test_a_view_outlives_the_host_states_without_its_memory():
    states = filled("bfloat16")
    view = states.parameters.view("block.0", "norm.weight")
    view.fill_(3)
    states.close()
    assert not view.any()


def test_progress_counts_every_byte_and_its_error_undoes_the_allocation():
    known, seen = {}, []
    states = HostStates([layout("a"), layout("b")], "float32", known.setdefault, known.pop)
    states.allocate_weights(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (states.ram.nbytes,) * 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    before, held = dict(known), states.ram.nbytes

    def cancel(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        states.allocate_states(cancel)
    assert known == before and states.ram.nbytes == held
    states.allocate_states()
    states.close()


def test_too_much_is_refused_in_one_sentence_before_anything_is_touched(monkeypatch):
    states = HostStates([layout("a", 1 << 20, 1 << 20)], "bfloat16")
    with pytest.raises(
        FitError, match=r"weights need 4096\.0 GiB \(4,398,\d{3},\d{3},\d{3} bytes\)"
    ):
        states.allocate_weights()
    monkeypatch.setattr(ram_planes, "sample_host_memory", lambda: (0, 1 << 62))
    states = HostStates([layout("small"), layout("a", 1 << 28, 1 << 20)], "bfloat16")
    with pytest.raises(
        FitError, match=r"refused 1048576\.0 GiB \(\S+ bytes\) of RAM for the weights"
    ):
        states.allocate_weights()
    assert states.ram.nbytes == 0


def test_older_kernels_touch_memory_too(monkeypatch):
    monkeypatch.setattr(mapped_memory, "_MADV_POPULATE_WRITE", 9999)
    states = filled("bfloat16")
    assert not states.array("block.0", "weight_high").any()
    states.close()


def test_a_forked_child_does_not_inherit_the_planes():
    states = filled("bfloat16", 1024, 1024)
    address = states.array("block.0", "weight_high").ctypes.data
    flags = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    assert "dc" in flags
    states.close()


def test_memory_that_the_system_does_not_register_is_used_and_counted():
    """As on WSL2, where little memory can be locked: copies are slower, results are the same."""
    plain = plain_model(tiny_config("qwen2"))
    planes = []
    for granted in (True, False):
        backend = CpuBackend()
        backend.register = lambda *_, granted=granted: granted
        unregistered = []
        backend.unregister = unregistered.append
        run = streamed(plain, PlanChoices().changed(offloaded_block_inputs=True), backend=backend)
        assert (run.engine.refused_bytes > 0) == (not granted)
        run.engine.train_step(1, random_batches(1), 1e-2)
        run.engine.drain()
        planes.append(
            [run.host_states.tensor(unit.name, "weight_high").clone() for unit in run.model.units]
        )
        run.close()
        assert bool(unregistered) == granted
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*planes))
    states = HostStates([layout("a")], "bfloat16", lambda *_: False, lambda _: None)
    states.allocate_weights()
    assert (
        states.ram.refused_bytes == states.array("a", "weight_high").nbytes
        and not states.ram.pinned_bytes
    )
    states.close()


@pytest.mark.parametrize(
    "setting, huge",
    [
        ("always within_size advise [never] deny force", False),
        ("always within_size [advise] never deny force", True),
        (None, True),
    ],
)
def test_the_kernel_says_whether_shared_memory_has_huge_pages(tmp_path, monkeypatch, setting, huge):
    path = tmp_path / "shmem_enabled"
    if setting is not None:
        path.write_text(setting)
    monkeypatch.setattr(mapped_memory, "_SHARED_PAGES", path)
    assert mapped_memory.shared_memory_has_huge_pages() == huge
