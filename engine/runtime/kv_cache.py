"""Key-value caches for sampling: the model's own, found by the capture pass, tried once before they
are trusted.

The model's forward makes its cache (sliding, linear, recurrent: whatever the family has) and its
blocks fill it, so there is nothing here to know about a family. What could go wrong is found by
doing it: a few tokens with and without a cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.errors import CacheError
from engine.model.skeleton import tensors_in
from engine.runtime.streaming_engine import StreamingEngine

_TRIAL_TOKENS, _TRIAL_STEPS = 16, 2
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest trusted distance between logits with and without a cache, relative to their spread: well
above what the order of sums changes, below what a lost token does.
"""


@dataclass(frozen=True)
class CacheCost:
    """Bytes that one row's cache takes on the device."""

    fixed: int
    per_token: int

    def of(self, tokens: int) -> int:
        """Bytes of a row of `tokens`, from above: a sliding window keeps a whole prompt until the
        first step.
        """
        return self.fixed + self.per_token * tokens


def try_cache(engine: StreamingEngine) -> CacheCost | None:
    """Run a short row with a cache, one token a step at its end, and without one. None where the
    logits differ or the model cannot do it: its answers are then made without a cache.
    """
    text = engine.model.config.get_text_config()
    length = min(_TRIAL_TOKENS, getattr(text, "max_position_embeddings", None) or _TRIAL_TOKENS)
    first = length - _TRIAL_STEPS
    if first < 2:
        return None
    # Tokens that differ: among equal ones a lost token would not be missed.
    row = [int(token) for token in np.linspace(0, text.vocab_size - 1, length + 2)[1:-1]]
    caches: list[Any] = [None, None]
    try:
        logits = [
            engine.cached_logits([np.array([row[:first]]), np.array([row[: first // 2]])], caches)[
                0
            ]
        ]
        whole, half = cache_bytes(caches[0]), cache_bytes(caches[1])
        for token in row[first:]:
            logits.append(engine.cached_logits([np.array([[token]])], caches[:1])[0])
    except CacheError:
        return None
    truth = engine.last_logits([row[:k] for k in range(first, length + 1)])
    spread = (truth - truth.mean(-1, keepdim=True)).norm(dim=-1)
    if not (
        (torch.stack(logits) - truth).norm(dim=-1) <= _TOLERANCE[engine.model.dtype] * spread
    ).all():
        return None
    per_token = math.ceil(max(0, whole - half) / (first - first // 2))
    return CacheCost(max(0, whole - first * per_token), per_token)


def cache_bytes(cache: Any) -> int:
    """Bytes of device memory that a cache holds; a view counts with all that it keeps alive."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for _, tensor in tensors_in(cache)
    }
    return sum(storages.values())
