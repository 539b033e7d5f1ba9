"""A step of AdamW with moments in 8 bits, computed in double precision from a given state. With it,
tests compare our optimizers with that of bitsandbytes: both start a step from the same codes, so
that a code that differs does not change the steps after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.config.optimizers import BLOCK, MOMENTS, OptimizerSettings
from engine.planning.layout.layout import ParameterSpec, lay_out
from engine.planning.layout.optimizer_states import BLOCK_BYTES, MAXIMUM_BYTES
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.host_optimizer import HostStep
from engine.runtime.host.host_states import HostStates
from engine.runtime.optimizer.device_adamw import StepFactors
from engine.runtime.optimizer.device_moments import (
    RoundedPlanes,
    RoundedStep,
    moment_tables,
    update_rounded,
)
from engine.runtime.optimizer.moment_codes import moment_map
from tests.support.moment_kernels import gradients

UNIT = "block 0"
SETTINGS = OptimizerSettings(0.9, 0.999, 1e-8, 0.1)
RATE = 3e-3
SIZES = (4096, 100_000)
"""bitsandbytes keeps parameters from 4,096 elements on in 8 bits, as we do. Of 100,000 elements,
the last block is shorter.
"""
NOTHING = 1e-30
"""Of a block whose largest magnitude is below this, codes mean nothing. Ours are of the bias that
is added to squared gradients.
"""
ZERO = (127, 0)
"""These are the codes of 0."""
ROUNDED = 1e-6
"""Computing in fp32 changes a moment by at most this part of the numbers that are added."""


@dataclass(frozen=True)
class Kept:
    """The state of one parameter. Tuples are of exp_avg and of exp_avg_sq."""

    weights: np.ndarray
    """They are float32 [numel]."""
    codes: tuple[np.ndarray, np.ndarray]
    """They are uint8 [numel]."""
    largest: tuple[np.ndarray, np.ndarray]
    """They are float32 [blocks]."""

    def moments(self) -> list[np.ndarray]:
        """Both moments, float64 [numel]."""
        return [
            moment_map(signed).values[codes].astype(np.float64) * of_elements(largest, codes.size)
            for codes, largest, signed in zip(self.codes, self.largest, (True, False))
        ]


@dataclass(frozen=True)
class Exact:
    """A step in double precision. Arrays are float64 [numel]."""

    weights: np.ndarray
    """They decay first, and are updated then."""
    taken: np.ndarray
    """This is subtracted from decayed weights."""
    taken_doubt: np.ndarray
    """It differs by no more than this because the first moment does."""
    moments: list[np.ndarray]
    doubts: list[np.ndarray]
    """A moment that is computed in fp32 differs by no more than this."""

    def largest(self, moment: int) -> np.ndarray:
        """The largest magnitudes of blocks, float64 [blocks]."""
        values = np.abs(self.moments[moment])
        return np.maximum.reduceat(values, np.arange(0, values.size, BLOCK))


def of_elements(of_blocks: np.ndarray, numel: int) -> np.ndarray:
    """A value for each element, [numel], from one for each block."""
    return np.repeat(of_blocks, BLOCK)[:numel]


def gradient(numel: int, number: int) -> np.ndarray:
    """Gradients of all kinds, float32 [numel]. The ninth block ranges over six decades."""
    found = gradients(numel, number)
    random = np.random.default_rng(number)
    found[9 * BLOCK : 10 * BLOCK] *= (10 ** random.uniform(-6, 0, BLOCK)).astype(np.float32)
    return found


def exact_step(kept: Kept, grad: np.ndarray, step: int, rounded_betas: bool = False) -> Exact:
    """Applies step `step` (from 1) to a state.

    rounded_betas: betas are rounded to fp32 before they are subtracted from 1.
    """
    beta1, beta2, g = SETTINGS.beta1, SETTINGS.beta2, grad.astype(np.float64)
    first, second = kept.moments()
    one, two = (float(np.float32(b)) if rounded_betas else b for b in (beta1, beta2))
    m = one * first + (1 - one) * g
    v = two * second + (1 - two) * g * g
    root = np.sqrt(v / (1 - beta2**step))
    divisor = (1 - beta1**step) / RATE * (root + SETTINGS.eps)
    decayed = kept.weights.astype(np.float64) * (1 - RATE * SETTINGS.weight_decay)
    doubts = [ROUNDED * (beta1 * np.abs(first) + (1 - beta1) * np.abs(g)), ROUNDED * v]
    return Exact(decayed - m / divisor, m / divisor, doubts[0] / divisor, [m, v], doubts)


def assert_near(kept: Kept, exact: Exact, decays_last: bool = False, part: float = 1e-5) -> None:
    """Asserts that weights and largest magnitudes are those of a step but for rounding.

    decays_last: weights are updated first, and decay then. part: the update may be wrong by this
    part of it.
    """
    decay = 1 - RATE * SETTINGS.weight_decay
    wanted = exact.weights + (exact.taken * (1 - decay) if decays_last else 0)
    away = np.abs(kept.weights - wanted)
    doubt = exact.taken_doubt + part * np.abs(exact.taken) + 3e-7 * np.abs(wanted) + 1e-12
    assert (away <= doubt).all(), (away - doubt).max()
    for moment in (0, 1):
        largest = exact.largest(moment)
        away = np.abs(kept.largest[moment] - largest)
        assert (away <= 4 * ROUNDED * largest + NOTHING).all(), (moment, away.max())


def wrong_codes(
    kept: Kept,
    exact: Exact,
    moment: int,
    coarse: float = 0.0,
    above_zero: bool = False,
    keeps_signs: bool = False,
) -> np.ndarray:
    """Where codes are not those of the nearest numbers, bool [numel].

    coarse: the nearest number of any value may be taken that differs by this part of the largest
    magnitude. above_zero: second moments never get the code of 0. keeps_signs: negative moments
    never get the code of 0.
    """
    map_ = moment_map(signed=moment == 0)
    numel = kept.codes[moment].size
    scale = of_elements(exact.largest(moment), numel)
    divisor = np.maximum(scale, NOTHING)
    values = exact.moments[moment] / divisor
    doubt = exact.doubts[moment] / divisor + 4 * ROUNDED * np.abs(values) + coarse
    lower, upper = (
        np.searchsorted(map_.boundaries.astype(np.float64), np.clip(values + change, -1, 1))
        for change in (-doubt, doubt)
    )
    if above_zero:
        lower, upper = np.maximum(lower, 1), np.maximum(upper, 1)
    if keeps_signs:
        zero = ZERO[moment]
        lower = np.where((lower == zero) & (values - doubt < 0), zero - 1, lower)
        upper = np.where((upper == zero) & (values + doubt < 0), zero - 1, upper)
    codes = kept.codes[moment].astype(np.int64)
    return ((codes < lower) | (codes > upper)) & (scale > NOTHING)


def differing(ours: Kept, theirs: Kept, moment: int) -> float:
    """The share of codes that differ, of blocks that are not zero."""
    counts = of_elements(theirs.largest[moment] > NOTHING, theirs.codes[moment].size)
    return float(np.mean((ours.codes[moment] != theirs.codes[moment])[counts]))


def apart(ours: Kept, theirs: Kept, moment: int) -> np.ndarray:
    """How far moments are apart, in parts of the largest magnitudes of their blocks, [numel]."""
    mine, other = (kept.moments()[moment] for kept in (ours, theirs))
    largest = of_elements(theirs.largest[moment].astype(np.float64), mine.size)
    return np.abs(mine - other) / np.maximum(largest, NOTHING)


# ---------------------------------------------------------------- our optimizers


class Ours:
    """One parameter of fp32 weights in host states, updated on the host or on a device."""

    def __init__(self, numel: int, device: str = "", compiled: bool = False):
        self.numel = numel
        self._device, self._compiled = device, compiled
        layout = lay_out(UNIT, [ParameterSpec("w", "w", (numel,), True)])
        self.host_states = HostStates([layout], "float32", threads=1)
        self.host_states.allocate_weights()
        self.host_states.allocate_states(optimizer="adamw_8bit")
        self._adamw = HostAdamW(self.host_states, SETTINGS, threads=2)

    def step(self, grad: np.ndarray, step: int) -> None:
        self.host_states.array(UNIT, "grad")[: self.numel] = grad
        if self._device:
            update_on(self._device, self.host_states, self._adamw, step, self._compiled)
        else:
            self._adamw.update(UNIT, HostStep(step, RATE))

    def kept(self) -> Kept:
        codes, largest = zip(*(self._codes_and_largest(name) for name in MOMENTS))
        weights = self.host_states.array(UNIT, "weight_high")[: self.numel].copy()
        return Kept(weights, tuple(part[: self.numel].copy() for part in codes), largest)

    def start_from(self, kept: Kept) -> None:
        self.host_states.array(UNIT, "weight_high")[: self.numel] = kept.weights
        # Elements behind the parameter, which align the next one, are zero.
        for name, codes, largest, zero in zip(MOMENTS, kept.codes, kept.largest, ZERO):
            plane = self.host_states.array(UNIT, name)
            blocks = np.zeros(-(-plane.size // BLOCK_BYTES) * BLOCK_BYTES, np.uint8)
            rows = blocks.reshape(-1, BLOCK_BYTES)
            there = np.full((largest.size, BLOCK), zero, np.uint8)
            there.flat[: self.numel] = codes
            rows[:, :MAXIMUM_BYTES] = largest.astype(np.float32).view(np.uint8).reshape(-1, 4)
            rows[:, MAXIMUM_BYTES:] = there
            plane[:] = blocks[: plane.size]

    def _codes_and_largest(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        plane = self.host_states.array(UNIT, name)
        blocks = np.zeros(-(-plane.size // BLOCK_BYTES) * BLOCK_BYTES, np.uint8)
        blocks[: plane.size] = plane
        rows = blocks.reshape(-1, BLOCK_BYTES)
        largest = rows[:, :MAXIMUM_BYTES].copy().view(np.float32).reshape(-1)
        return rows[:, MAXIMUM_BYTES:].reshape(-1), largest

    def close(self) -> None:
        self._adamw.close()
        self.host_states.close()


def update_on(
    device: str, states: HostStates, adamw: HostAdamW, step: int, compiled: bool, clip: float = 1.0
) -> None:
    """Updates the unit of host states on a device, and copies its planes back."""
    (unit,) = states.layouts
    layout = states.layouts[unit]
    here = {name: states.tensor(unit, name).to(device).clone() for name in states.planes}
    weights = [name for name in here if name.startswith("weight")]
    factors = StepFactors(
        torch.tensor([clip, 1.0], device=device),
        torch.from_numpy(adamw.scalars(step, RATE)).to(device),
    )
    piece = RoundedPlanes(
        layout.state_ranges(states.optimizer)["exp_avg"],
        0,
        here["grad"],
        [here[name] for name in weights],
        [here[name] for name in MOMENTS],
    )
    tables = moment_tables(torch.device(device))
    rounded = RoundedStep(factors, tables, adamw.key(unit, step))
    update_rounded(piece, rounded, layout.decay_numel, compiled)
    for name in (*weights, *MOMENTS):
        states.tensor(unit, name).copy_(here[name])


# ---------------------------------------------------------------- bitsandbytes' optimizer


class Theirs:
    """bitsandbytes' AdamW with moments in 8 bits, on one parameter of random fp32 weights."""

    def __init__(self, numel: int, device: str):
        from bitsandbytes.optim import AdamW8bit

        random = torch.Generator().manual_seed(numel)
        weights = torch.randn(numel, generator=random) * 0.02
        self._parameter = torch.nn.Parameter(weights.to(device))
        betas = (SETTINGS.beta1, SETTINGS.beta2)
        self._adamw = AdamW8bit(
            [self._parameter],
            lr=RATE,
            betas=betas,
            eps=SETTINGS.eps,
            weight_decay=SETTINGS.weight_decay,
        )

    def step(self, grad: np.ndarray, step: int) -> None:
        self._parameter.grad = torch.from_numpy(grad).to(self._parameter.device)
        self._adamw.step()
        assert self._adamw.state[self._parameter]["step"] == step

    def kept(self) -> Kept:
        weights = self._parameter.detach().cpu().numpy().copy()
        state = self._adamw.state[self._parameter]
        if not state:
            blocks = -(-weights.size // BLOCK)
            zero = tuple(np.full(weights.size, code, np.uint8) for code in ZERO)
            return Kept(weights, zero, (np.zeros(blocks, np.float32),) * 2)
        codes, largest = (
            tuple(state[f"{name}{k}"].cpu().numpy().copy() for k in (1, 2))
            for name in ("state", "absmax")
        )
        return Kept(weights, codes, largest)
