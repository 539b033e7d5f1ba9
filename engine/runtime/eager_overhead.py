"""What a block takes on the CPU besides its matrix products and its attention, measured on one of a
common family as the library runs it: norms, rotary embedding, gated activation and residual sums,
one operator after another, forward and backward.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from engine.model.library import transformers

TINY, SMALL = (1, 8, 16), (8, 128, 128)
"""Rows, tokens and width: a block that is nothing but calls, and one whose vectors fit in a cache
as those of small models do.
"""
HEADS, GATE = 4, 3
"""Heads, and times the width: inner width of the gated part."""
LEAST_PASSES = 5


@dataclass(frozen=True)
class Pass:
    """Seconds of forward and backward together, and what they are made of: FLOPs of matrix products
    and of attention in forward, and bytes that autograd keeps.
    """

    seconds: float
    products: float
    attention: float
    kept: int


def eager_rates(seconds: float, matmul: float, attention: float) -> tuple[float, float]:
    """(seconds that calls take in one forward, bytes a second of the passes over what is kept), as
    `engine.fit.cost.Cost` counts them: a backward is two forwards of calls, of products and of
    passes, and two and a half of attention. matmul, attention: FLOPs a second. Each of two blocks
    is run for `seconds`.
    """
    tiny, small = _measured(TINY, seconds), _measured(SMALL, seconds)
    known = 3 * small.products / matmul + 3.5 * small.attention / attention
    # Where timers or other programs leave nothing, the passes are as fast as in a tenth of the
    # time.
    rest = max(small.seconds - tiny.seconds - known, 0.1 * small.seconds)
    return tiny.seconds / 3, 6 * small.kept / rest


def _measured(size: tuple[int, int, int], seconds: float) -> Pass:
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
    block, positions = model.layers[0], torch.arange(tokens)[None]
    weights = list(block.parameters())
    hidden = torch.randn(rows, tokens, width, requires_grad=True)
    turns = model.rotary_emb(hidden, positions)
    given = {tensor.untyped_storage()._cdata for tensor in (*weights, *turns)}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in given:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    def forward() -> torch.Tensor:
        out = block(hidden, position_embeddings=turns, position_ids=positions)
        return out[0] if isinstance(out, tuple) else out

    with torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = forward()
        ones, times = torch.ones_like(out), []
        end = time.perf_counter() + seconds
        while len(times) < LEAST_PASSES or time.perf_counter() < end:
            began = time.perf_counter()
            torch.autograd.grad(forward(), [hidden, *weights], ones)
            times.append(time.perf_counter() - began)
    products = 2.0 * rows * tokens * sum(weight.numel() for weight in weights if weight.dim() > 1)
    return Pass(
        statistics.median(times), products, 2.0 * rows * tokens * tokens * width, sum(kept.values())
    )
