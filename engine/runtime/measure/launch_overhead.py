"""On the CPU, norms, rotary embedding, gated activation and residual sums take time in addition to
a block's matrix products and attention. This file measures that time on a typical block, run
uncompiled (one operator after another), forward and backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.model.build.library import transformers

TINY, SMALL = (1, 8, 16), (8, 128, 128)
"""Rows, tokens and width of a block: the first is so small that its time is call overhead only; the
vectors of the second fit in a cache, as those of small models do.
"""
HEADS = 4
GATE = 3
"""The inner width of the gated MLP is this many times the width."""
LEAST_PASSES = 5


@dataclass(frozen=True)
class Pass:
    """Seconds that one forward and backward take together, and the work in them."""

    seconds: float
    products: float
    """FLOPs of the matrix products of forward."""
    attention: float
    """FLOPs of the attention of forward."""
    kept: int
    """Bytes that autograd keeps."""


def eager_rates(seconds: float, matmul: float, attention: float) -> tuple[float, float]:
    """Returns the seconds that call overhead takes in one forward, and the rate of the passes over
    kept tensors in bytes a second, as `engine.planning.fit.cost_model.Cost` counts them.

    A backward costs twice as much as a forward for calls, products and passes, and two and a half
    times as much for attention. `matmul` and `attention` are FLOPs a second. Two blocks run, each
    for `seconds`.
    """
    tiny, small = _measured(TINY, seconds), _measured(SMALL, seconds)
    known = 3 * small.products / matmul + 3.5 * small.attention / attention
    # If inexact timers or other programs leave no time for the passes, a tenth of the measured time
    # is assumed.
    rest = max(small.seconds - tiny.seconds - known, 0.1 * small.seconds)
    return tiny.seconds / 3, 6 * small.kept / rest


def _measured(size: tuple[int, int, int], seconds: float) -> Pass:
    """Measures a block of `size` (rows, tokens, width) for `seconds`."""
    rows, tokens, width = size
    library = transformers()
    config = library.AutoConfig.for_model(
        "llama",
        hidden_size=width,
        intermediate_size=GATE * width,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=8,
    )
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32).model
    block = model.layers[0]
    positions = torch.arange(tokens)[None]
    weights = list(block.parameters())
    hidden = torch.randn(rows, tokens, width, requires_grad=True)
    turns = model.rotary_emb(hidden, positions)

    def forward() -> torch.Tensor:
        out = block(hidden, position_embeddings=turns, position_ids=positions)
        return out[0] if isinstance(out, tuple) else out

    with torch.enable_grad():
        out, kept = _kept_bytes(forward, [*weights, *turns])
        ones = torch.ones_like(out)
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < LEAST_PASSES or time.perf_counter() < end:
            began = time.perf_counter()
            torch.autograd.grad(forward(), [hidden, *weights], ones)
            times.append(time.perf_counter() - began)
    products = 2.0 * rows * tokens * sum(weight.numel() for weight in weights if weight.dim() > 1)
    attention = 2.0 * rows * tokens * tokens * width
    return Pass(statistics.median(times), products, attention, kept)


def _kept_bytes(
    forward: Callable[[], torch.Tensor], given: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, int]:
    """Returns the result of `forward` [rows, tokens, width] and the bytes that autograd keeps for
    its backward, without those of `given`.
    """
    known = {tensor.untyped_storage()._cdata for tensor in given}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = forward()
    return out, sum(kept.values())
