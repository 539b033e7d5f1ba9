"""AdamW runs here on a chunk of a unit's planes that was copied to the device. The arithmetic is
that of `engine.runtime.optimizer.host_kernels`, written as tensor operations.

- The formula is the same, and so are its rounding and the split of an fp32 weight into two planes,
  in which ties are rounded away from zero. With moments in fp32, results have the host's bits.
- As on the host, subnormal first moments become 0, and the same bias is added to squared gradients.
- Whether a step is applied is decided on the device: `clip_of` computes a flag of 0 or 1, so that
  no update waits for the host to check that loss and norm are finite.
- On a GPU, an update is one pass over the planes (`engine.runtime.optimizer.fused_adamw`). Without
  a compiler it runs in chunks that keep its temporaries small.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine.planning.schedule.shards import cut
from engine.runtime.device.compiled import report_problems_of
from engine.runtime.optimizer.fused_adamw import FusedAdamW, FusedChunk

_SMALLEST_NORMAL = 2.0**-126
AT_ONCE = 1 << 22
"""Number of elements on which tensor operations run at once, which takes about 150 MiB of
temporaries. They are whole blocks of codes.
"""


@dataclass(frozen=True)
class StepFactors:
    """A step is applied with these factors, which are tensors on the device."""

    clip: torch.Tensor
    """The result of `clip_of` is float32 [2]."""
    scalars: torch.Tensor
    """The values of `HostAdamW.scalars` are float32 [8]. The last one is the factor by which weight
    decay scales a weight.
    """

    def undecayed(self) -> StepFactors:
        """Returns the factors for elements that weight decay does not apply to."""
        scalars = self.scalars.clone()
        scalars[-1] = 1.0
        return StepFactors(self.clip, scalars)


def clip_of(norms: torch.Tensor, max_grad_norm: float | None, before: torch.Tensor) -> torch.Tensor:
    """Returns float32 [2] on the device of `norms`: the clip factor of the gradients, and a flag
    that is 1 where loss and norm are finite and 0 otherwise.

    `norms`, float64 [units + 1], holds the squared gradient norms of the units, followed by the
    loss. The factor is that of torch's `clip_grad_norm_`. The device does not wait for the host. So
    it may compute a step after one that was not applied: where the flag of the step `before` is 0,
    this one is 0, too.
    """
    norm = norms[:-1].sum().sqrt()
    if max_grad_norm is None:
        factor = torch.ones_like(norm)
    else:
        factor = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    may_apply = norm.isfinite() & norms[-1].isfinite() & (before[1] > 0)
    return torch.stack([factor, may_apply.double()]).float()


def update(
    planes: Mapping[str, torch.Tensor],
    grad: torch.Tensor,
    factors: StepFactors,
    decayed: int,
    compiled: bool,
) -> None:
    """Applies a step to `planes`, in place, with the gradient `grad`. All are flat, shape [numel].
    Where the flag in `factors.clip` is 0, no bit of the planes changes.

    Weight decay applies to the first `decayed` elements.
    """
    if compiled:
        named = dict(planes)
        moments = [named.pop("exp_avg"), named.pop("exp_avg_sq")]
        part = FusedChunk(
            grad, list(named.values()), moments, (factors.clip, factors.scalars), decayed
        )
        if fused().in_fp32(part):
            return
    run: Callable[..., None] = _update_split if "weight_low" in planes else _update_float
    for begin, end, each in ((0, decayed, factors), (decayed, grad.numel(), factors.undecayed())):
        for start, stop in cut(end - begin, AT_ONCE):
            chunks = [plane[begin + start : begin + stop] for plane in planes.values()]
            run(grad[begin + start : begin + stop], *chunks, each.clip, each.scalars)


@functools.cache
def fused() -> FusedAdamW:
    """Returns the kernels of this process."""
    made = FusedAdamW()
    report_problems_of(made)
    return made


def new_moments(
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    clip: torch.Tensor,
    scalars: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the new moments and the amount to subtract from the weights, each [numel]."""
    one_minus_beta1, beta2, one_minus_beta2, step_size, root, eps, bias = (
        scalars[k] for k in range(7)
    )
    g = grad.float() * clip[0]
    m = exp_avg + (g - exp_avg) * one_minus_beta1
    # The host does the same, because subnormal moments are slow there.
    m = torch.where(m.abs() < _SMALLEST_NORMAL, 0.0, m)
    v = exp_avg_sq * beta2 + one_minus_beta2 * (g * g + bias)
    return m, v, step_size * (m / (_root(v) * root + eps))


def _root(values: torch.Tensor) -> torch.Tensor:
    """Returns the correctly rounded roots of fp32 values."""
    if values.device.type != "cpu":
        return values.sqrt()
    # On the CPU, torch calls a library whose roots may be off by one bit. The root in fp64 is near
    # enough: no root of an fp32 value is closer than 2**-51 of it to the middle of two of them.
    return values.double().sqrt().float()


def write_weights(
    weights: list[torch.Tensor], taken: torch.Tensor, keep: torch.Tensor, apply: torch.Tensor
) -> None:
    """Scales weights by `keep` and subtracts `taken`, where the flag `apply` says so. The weights
    are one plane in fp32, or the planes of split ones, each flat, shape [numel].
    """
    if len(weights) == 1:
        (weight,) = weights
        weight.copy_(torch.where(apply, weight * keep - taken, weight))
        return
    high, low = weights
    old_bits = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    bits = (old_bits.view(torch.float32) * keep - taken).view(torch.int32)
    # The bit patterns are literals, because the compiler may treat a global integer as a variable.
    magnitude, sign = bits & 0x7FFFFFFF, bits & -0x80000000
    # A finite value that bf16 would round to infinity becomes the largest that it does not.
    bits = torch.where(
        (magnitude >= 0x7F7F8000) & (magnitude < 0x7F800000), sign | 0x7F7F7FFF, bits
    )
    # A NaN becomes the quiet NaN of its sign.
    bits = torch.where(magnitude > 0x7F800000, sign | 0x7FC00000, bits)
    bits = torch.where(apply, bits, old_bits)
    high.copy_(((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16))
    low.copy_(bits.to(torch.int16))


def _update_split(  # an update takes all planes
    grad: torch.Tensor,
    high: torch.Tensor,
    low: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    clip: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    """Updates split weights. All planes are flat, shape [numel]."""
    apply = clip[1] > 0
    m, v, taken = new_moments(grad, exp_avg, exp_avg_sq, clip, scalars)
    write_weights([high, low], taken, scalars[7], apply)
    exp_avg.copy_(torch.where(apply, m, exp_avg))
    exp_avg_sq.copy_(torch.where(apply, v, exp_avg_sq))


def _update_float(  # an update takes all planes
    grad: torch.Tensor,
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    clip: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    """Updates fp32 weights. All planes are flat, shape [numel]."""
    apply = clip[1] > 0
    m, v, taken = new_moments(grad, exp_avg, exp_avg_sq, clip, scalars)
    write_weights([weight], taken, scalars[7], apply)
    exp_avg.copy_(torch.where(apply, m, exp_avg))
    exp_avg_sq.copy_(torch.where(apply, v, exp_avg_sq))
