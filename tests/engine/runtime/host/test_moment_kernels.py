"""AdamW with moments in 8 bits and in bf16, against a slow reference to the bit: numpy rounds, and
the kernel for moments in fp32 updates.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.config.optimizers import BLOCK, MOMENTS, OptimizerSettings, StateFormat
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.host_optimizer import HostStep
from engine.runtime.optimizer.host_kernels import kernel
from engine.runtime.optimizer.moment_codes import moment_map
from tests.support.moment_kernels import new_states, set_gradient
from tests.support.optimizers import ROUNDED

pytestmark = pytest.mark.computing

SETTINGS = OptimizerSettings(0.9, 0.999, 1e-8, 0.1, seed=7)
RATE, CLIP = 3e-3, 0.7


# ---------------------------------------------------------------- the reference


def hashed(position, key):
    word = (position.astype(np.uint64) + np.uint64(key)) & np.uint64(0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word ^= word >> np.uint64(shift)
        word = (word * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return (word ^ (word >> np.uint64(16))).astype(np.uint32)


def in_codes(values, signed):
    """A moment in 8 bits, block by block: the largest magnitude, then the codes."""
    found = b""
    boundaries = moment_map(signed).boundaries
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK]
        largest = np.abs(block).max()
        inverse = np.float32(1) / largest if largest else np.float32(1)
        scaled = block * inverse
        codes = np.array([sum(boundary < value for boundary in boundaries) for value in scaled])
        if not signed and largest > 0:
            codes = np.maximum(codes, 1)
        found += largest.tobytes() + codes.astype(np.uint8).tobytes()
    return np.frombuffer(found, np.uint8)


def from_codes(plane, numel, signed):
    found = []
    while plane.size:
        size = min(BLOCK, numel)
        largest = plane[:4].view(np.float32)[0]
        found.append(moment_map(signed).values[plane[4 : 4 + size]] * largest)
        plane, numel = plane[4 + size :], numel - size
    return np.concatenate(found)


def in_halves(values, noise):
    bits = values.view(np.uint32).astype(np.uint64) + noise
    return (bits >> np.uint64(16)).astype(np.uint16).view(np.uint8)


def referred(states, unit, adamw, step):
    """All planes after a step, from those before it, by the reference."""
    planes = {plane: states.array(unit, plane).copy() for plane in states.planes}
    here = states.layouts[unit]
    clip, (*others, keep) = np.float32(CLIP), adamw.scalars(step, RATE)
    weights = [name for name in planes if name.startswith("weight")]
    for part in here.state_ranges(states.optimizer)["exp_avg"]:
        between, numel = slice(part.start, part.stop), part.stop - part.start
        place = slice(part.place, part.place + part.bytes)
        kept = [planes[name][place] for name in MOMENTS]
        if part.kind == StateFormat.CODES:
            both = [from_codes(kept[0], numel, True), from_codes(kept[1], numel, False)]
        elif part.kind == StateFormat.BF16:
            halves = [moment.view(np.uint16).astype(np.uint32) << 16 for moment in kept]
            both = [half.view(np.float32) for half in halves]
        else:
            both = [moment.view(np.float32).copy() for moment in kept]
        decayed = min(max(0, here.decay_numel - part.start), numel)
        arrays = tuple(planes[name][between] for name in ("grad", *weights))
        kernel("adamw_split" if states.dtype == "bfloat16" else "adamw_float")(
            np.zeros(1, np.int64), 64, decayed, (*arrays, *both), (clip, keep, *others)
        )
        if part.kind == StateFormat.CODES:
            both = [in_codes(both[0], True), in_codes(both[1], False)]
        elif part.kind == StateFormat.BF16:
            noise = hashed(np.arange(part.start, part.stop), adamw.key(unit, step))
            both = [in_halves(both[0], noise & 0xFFFF), in_halves(both[1], noise >> 16)]
        for name, moment in zip(MOMENTS, both):
            planes[name][place] = moment.view(np.uint8)
    return planes


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("unit", ["block 0", "embed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("optimizer", ROUNDED)
def test_four_steps_have_the_bits_of_the_reference(optimizer, dtype, unit, threads, monkeypatch):
    monkeypatch.setattr("engine.runtime.optimizer.host_threads.SHARE", 2 * BLOCK)
    states = new_states(optimizer, dtype, unit)
    adamw = HostAdamW(states, SETTINGS, threads)
    for step in range(1, 5):
        set_gradient(states, unit, step)
        wanted = referred(states, unit, adamw, step)
        adamw.update(unit, HostStep(step, RATE, CLIP))
        for name, plane in wanted.items():
            there = states.array(unit, name)
            assert there.tobytes() == plane.tobytes(), (step, name)
    adamw.close()
    states.close()


def test_codes_of_all_edges_are_those_of_a_search():
    for signed in (True, False):
        map_ = moment_map(signed)
        random = np.random.default_rng(0)
        around = [map_.boundaries, map_.values, [0.0, 1.0, 2.0**-24, 1e-45, 1.1754944e-38]]
        values = np.concatenate([*around, np.exp(random.uniform(-40, 0, 4096))])
        values = values.astype(np.float32)
        values = np.concatenate(
            [values, np.nextafter(values, np.float32(2)), np.nextafter(values, np.float32(0))]
        )
        if signed:
            values = np.concatenate([values, -values])
        values = values[np.abs(values) <= 1]
        # The first element of each block is 1, so that the others are not scaled.
        rows = np.ones((-(-values.size // (BLOCK - 1)), BLOCK), np.float32)
        rows[:, 1:].flat[: values.size] = values
        plane = np.zeros(rows.shape[0] * (BLOCK + 4), np.uint8)
        from engine.runtime.optimizer.moment_kernels import moment_kernel

        moment_kernel("encode")(rows.reshape(-1), map_.entries, plane.view(np.float32), plane)
        wanted = map_.codes(rows)
        if not signed:
            wanted = np.maximum(wanted, 1)
        assert (plane.reshape(rows.shape[0], BLOCK + 4)[:, 4:] == wanted).all()
