"""Sampling uses the model's own key-value cache. The capture pass finds it, and a trial shows once
whether it can be trusted.

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
"""Logits with and without a cache may differ by this much, relative to their spread. The bound is
well above what the order of sums changes, and below what a lost token does.
"""


@dataclass(frozen=True)
class CacheCost:
    """One row's cache takes these bytes on the device."""

    fixed: int
    per_token: int

    def of(self, tokens: int) -> int:
        """Returns the most bytes that a row of `tokens` takes: a sliding window keeps a whole
        prompt until the first step.
        """
        return self.fixed + self.per_token * tokens


def try_cache(engine: StreamingEngine) -> CacheCost | None:
    """Runs a short row with a cache, one token a step at its end, and without one. Returns None
    where the logits differ or the model cannot do it; its answers are then made without a cache.
    """
    text = engine.model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or _TRIAL_TOKENS
    length = min(_TRIAL_TOKENS, longest)
    first = length - _TRIAL_STEPS
    if first < 2:
        return None
    # The tokens differ: among equal ones a lost token would not be missed.
    row = [int(token) for token in np.linspace(0, text.vocab_size - 1, length + 2)[1:-1]]
    half = first // 2
    # Two rows of different lengths show what a token of a cache takes.
    caches: list[Any] = [None, None]
    try:
        both = engine.cached_logits([np.array([row[:first]]), np.array([row[:half]])], caches)
        whole_bytes, half_bytes = cache_bytes(caches[0]), cache_bytes(caches[1])
        logits = [both[0]]
        for token in row[first:]:
            next_logits = engine.cached_logits([np.array([[token]])], caches[:1])
            logits.append(next_logits[0])
    except CacheError:
        return None
    truth = engine.last_logits([row[:end] for end in range(first, length + 1)])
    if not _agree(torch.stack(logits), truth, _TOLERANCE[engine.model.dtype]):
        return None
    per_token = math.ceil(max(0, whole_bytes - half_bytes) / (first - half))
    return CacheCost(max(0, whole_bytes - first * per_token), per_token)


def _agree(logits: torch.Tensor, truth: torch.Tensor, tolerance: float) -> bool:
    """Says whether each row of logits [rows, vocabulary] is near the truth, as its spread goes."""
    spread = (truth - truth.mean(-1, keepdim=True)).norm(dim=-1)
    return bool(((logits - truth).norm(dim=-1) <= tolerance * spread).all())


def cache_bytes(cache: Any) -> int:
    """Returns the bytes of device memory that a cache holds. A view counts with all that it keeps
    alive.
    """
    storages: dict[int, int] = {}
    for _, tensor in tensors_in(cache):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
