"""AdamW on a piece of a unit's planes that was brought to the device: the arithmetic of
`engine.runtime.host_kernels`, in tensors.

Compiled it is one pass over the planes. Without a compiler it runs in pieces that keep its
temporaries small.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.runtime.compiled import compiled_function

_SMALLEST_NORMAL = 2.0**-126
_UNCOMPILED = 1 << 22
"""Elements at once where nothing is compiled: some 150 MiB of temporaries."""


def clip_of(norms: torch.Tensor, max_grad_norm: float | None) -> torch.Tensor:
    """float32 [2] on the device of `norms`: the factor of the gradients, and 1 where loss and norm
    are finite, else 0.

    norms: squared gradient norm of each unit, and the loss last. The same as the host's, without
    waiting for it.
    """
    squares = norms[:-1].double()
    norm = squares.sum().sqrt()
    factor = (
        torch.ones_like(norm)
        if max_grad_norm is None
        else (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    )
    return torch.stack([factor, (norm.isfinite() & norms[-1].isfinite()).double()]).float()


def update(
    planes: Mapping[str, torch.Tensor],
    grad: torch.Tensor,
    clip: torch.Tensor,
    scalars: torch.Tensor,
    decayed: int,
    compiled: bool,
) -> None:
    """Apply a step to `planes` (flat, without the gradient), in place; with a factor that says so,
    leave them as they are.

    clip: of `clip_of`. scalars: `HostAdamW.scalars`, float32 [8] on the device, the last of them
    what weight decay leaves. decayed: so many elements at the front are decayed.
    """
    function = _update_split if "weight_low" in planes else _update_float
    whole = grad.numel()
    run = compiled_function(function, dynamic=True) if compiled else function
    undecayed = scalars.clone()
    undecayed[-1] = 1.0
    for begin, end, given in ((0, decayed, scalars), (decayed, whole, undecayed)):
        start = begin
        while start < end:
            # A first call that finds out that it cannot be compiled must not find itself with a
            # whole piece, either.
            size = _UNCOMPILED if not compiled or run.problem or not run.ran else whole
            stop = min(start + size, end)
            run(grad[start:stop], *(plane[start:stop] for plane in planes.values()), clip, given)
            start = stop


def _moments(
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    clip: torch.Tensor,
    scalars: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New moments and what is taken off the weights."""
    take1, beta2, take2, step_size, root2, eps, bias = (scalars[k] for k in range(7))
    g = grad.float() * clip[0]
    m = exp_avg + (g - exp_avg) * take1
    m = torch.where(
        m.abs() < _SMALLEST_NORMAL, 0.0, m
    )  # as the host does: subnormal moments are slow there
    v = exp_avg_sq * beta2 + take2 * (g * g + bias)
    return m, v, step_size * (m / (v.sqrt() * root2 + eps))


def _update_split(
    grad: torch.Tensor,
    high: torch.Tensor,
    low: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    clip: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    apply = clip[1] > 0
    m, v, taken = _moments(grad, exp_avg, exp_avg_sq, clip, scalars)
    old_bits = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    bits = (old_bits.view(torch.float32) * scalars[7] - taken).view(torch.int32)
    magnitude, sign = bits & 0x7FFFFFFF, bits & -0x80000000
    # The largest value that bf16 rounds to infinity and fp32 does not, as the host's kernel.
    bits = torch.where(
        (magnitude >= 0x7F7F8000) & (magnitude < 0x7F800000), sign | 0x7F7F7FFF, bits
    )
    bits = torch.where(magnitude > 0x7F800000, sign | 0x7FC00000, bits)
    bits = torch.where(apply, bits, old_bits)
    high.copy_(((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16))
    low.copy_(bits.to(torch.int16))
    exp_avg.copy_(torch.where(apply, m, exp_avg))
    exp_avg_sq.copy_(torch.where(apply, v, exp_avg_sq))


def _update_float(
    grad: torch.Tensor,
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    clip: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    apply = clip[1] > 0
    m, v, taken = _moments(grad, exp_avg, exp_avg_sq, clip, scalars)
    weight.copy_(torch.where(apply, weight * scalars[7] - taken, weight))
    exp_avg.copy_(torch.where(apply, m, exp_avg))
    exp_avg_sq.copy_(torch.where(apply, v, exp_avg_sq))
