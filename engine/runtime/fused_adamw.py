"""AdamW on a GPU is one kernel here, written in Triton: each plane is read and written once.

Its results have the bits of the host's kernels (`engine.host.host_kernels`): products and sums are
not contracted to fused multiply-adds, and roots and quotients are rounded as in IEEE 754. A kernel
that torch compiles promises neither.

Triton needs a C compiler when it first runs. Where that is missing, or Triton is, the tensor
operations of `engine.runtime.device_adamw` run instead. They have the same bits, and take longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.errors import first_line

tl: Any = None
"""It is `triton.language`, once `_jit` has imported it. The kernels look it up here."""
_ELEMENTS = 1024
"""A program of the kernel updates this many elements."""


def _jit(kernel: Callable[..., None]) -> Any:
    global tl  # noqa: PLW0603  Triton looks up the names of a kernel in its module
    import triton
    import triton.language

    tl = triton.language
    return triton.jit(kernel)


class FusedAdamW:
    """A `FusedAdamW` launches the kernel, compiled when it first runs."""

    what = "AdamW on the GPU"

    def __init__(self) -> None:
        self.problem = ""
        """It says why the kernel cannot run, and is empty where it can."""

    def ran(
        self,
        planes: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        factors: tuple[torch.Tensor, torch.Tensor],
        decayed: int,
    ) -> bool:
        """Applies a step as `engine.runtime.device_adamw.update` does, on a GPU. Returns False
        where it cannot; the planes are unchanged then. `factors` are the clip factors and the
        scalars.
        """
        if self.problem or not grad.is_cuda:
            return False
        numel = grad.numel()
        if not numel:
            return True
        is_split = "weight_low" in planes
        weight = planes["weight_high"]
        tensors = [weight.view(torch.int16) if is_split else weight]
        tensors += [plane for name, plane in planes.items() if name != "weight_high"]
        programs = -(-numel // _ELEMENTS)
        try:
            kernel = _kernel(is_split)
            kernel[(programs,)](
                grad, *tensors, *factors, numel, decayed, BLOCK=_ELEMENTS, enable_fp_fusion=False
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  the compiler raises many kinds
            # Nothing was launched: the kernel is compiled first.
            self.problem = first_line(error)
            return False
        return True

    def try_again(self) -> None:
        """Tries to compile again, if that has failed."""
        self.problem = ""


@functools.cache
def _kernel(is_split: bool) -> Any:
    return _jit(_split if is_split else _float)


def _split(  # type: ignore[no-untyped-def]  # noqa: PLR0913  Triton reads the types
    grad,
    high,
    low,
    exp_avg,
    exp_avg_sq,
    clip,
    scalars,
    numel,
    decayed,
    BLOCK: tl.constexpr,  # noqa: N803
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    apply = tl.load(clip + 1) > 0
    keep = tl.where(at < decayed, tl.load(scalars + 7), 1.0)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * tl.load(clip)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    new_m = m + (g - m) * tl.load(scalars)
    # The host does the same, because subnormal moments are slow there.
    new_m = tl.where(tl.abs(new_m) < 1.1754943508222875e-38, 0.0, new_m)
    new_v = v * tl.load(scalars + 1) + tl.load(scalars + 2) * (g * g + tl.load(scalars + 6))
    below = tl.sqrt_rn(new_v) * tl.load(scalars + 4) + tl.load(scalars + 5)
    taken = tl.load(scalars + 3) * tl.div_rn(new_m, below)
    upper = tl.load(high + at, mask=inside, other=0).to(tl.int32) << 16
    old = upper + tl.load(low + at, mask=inside, other=0).to(tl.int32)
    bits = (old.to(tl.float32, bitcast=True) * keep - taken).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = bits ^ magnitude
    # A finite value that bf16 would round to infinity becomes the largest that it does not, and a
    # NaN the quiet NaN of its sign.
    is_large = (magnitude >= 0x7F7F8000) & (magnitude < 0x7F800000)
    bits = tl.where(is_large, sign | 0x7F7F7FFF, bits)
    bits = tl.where(magnitude > 0x7F800000, sign | 0x7FC00000, bits)
    bits = tl.where(apply, bits, old)
    tl.store(high + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
    tl.store(low + at, bits.to(tl.int16), mask=inside)
    tl.store(exp_avg + at, tl.where(apply, new_m, m), mask=inside)
    tl.store(exp_avg_sq + at, tl.where(apply, new_v, v), mask=inside)


def _float(  # type: ignore[no-untyped-def]  # noqa: PLR0913  Triton reads the types
    grad,
    weight,
    exp_avg,
    exp_avg_sq,
    clip,
    scalars,
    numel,
    decayed,
    BLOCK: tl.constexpr,  # noqa: N803
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    apply = tl.load(clip + 1) > 0
    keep = tl.where(at < decayed, tl.load(scalars + 7), 1.0)
    g = tl.load(grad + at, mask=inside, other=0.0) * tl.load(clip)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    w = tl.load(weight + at, mask=inside, other=0.0)
    new_m = m + (g - m) * tl.load(scalars)
    new_m = tl.where(tl.abs(new_m) < 1.1754943508222875e-38, 0.0, new_m)
    new_v = v * tl.load(scalars + 1) + tl.load(scalars + 2) * (g * g + tl.load(scalars + 6))
    below = tl.sqrt_rn(new_v) * tl.load(scalars + 4) + tl.load(scalars + 5)
    new_w = w * keep - tl.load(scalars + 3) * tl.div_rn(new_m, below)
    tl.store(weight + at, tl.where(apply, new_w, w), mask=inside)
    tl.store(exp_avg + at, tl.where(apply, new_m, m), mask=inside)
    tl.store(exp_avg_sq + at, tl.where(apply, new_v, v), mask=inside)
