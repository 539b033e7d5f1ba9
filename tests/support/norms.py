"""Norms that the engine finds, and those of float64. Torch's own `clip_grad_norm_` is no reference:
on the CPU, its norms of large tensors are too low.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from engine.runtime.step.main_grad import add_squares

CLOSE = 1e-6
"""A norm is at most this far from that of float64."""
AT_ONCE = 1 << 22


def gradient_like(numel: int, device: str = "cpu") -> torch.Tensor:
    """Returns float32 [numel] whose size changes along the way, as that of gradients does."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.empty(numel, device=device)
    for number, piece in enumerate(values.split(AT_ONCE)):
        piece.normal_(0.0, 1e-3 * (1 + number % 3), generator=generator)
    return values


def norm_in_float64(values: torch.Tensor) -> float:
    """Returns the norm of float32 values [n]."""
    return math.sqrt(math.fsum(float(p.double().square().sum()) for p in values.split(AT_ONCE)))


def squares_of(values: torch.Tensor, unit: str = "block 0", piece: int = 0) -> torch.Tensor:
    """Returns what the engine adds to the squared norm of a unit."""
    norms = torch.zeros(2, dtype=torch.float64, device=values.device)
    context = SimpleNamespace(
        state=SimpleNamespace(norms=norms),
        positions={unit: 0},
        plan=SimpleNamespace(embed_chunk=piece),
    )
    add_squares(context, unit, values, 0)
    return norms[0]
