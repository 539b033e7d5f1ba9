"""Sampling uses the model's own key-value cache. The capture pass finds the cache, and one trial
run shows whether it can be trusted.

The model's forward creates its cache (sliding, linear, recurrent: whatever the family uses) and its
blocks fill it, so this file contains no knowledge of model families. The trial computes a few
tokens with and without a cache and compares the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.errors import CacheError
from engine.model.blocks.block_inputs import tensors_in
from engine.planning.fit.sampling_memory import CacheCost
from engine.runtime.step.streaming_engine import StreamingEngine

_TRIAL_TOKENS, _TRIAL_STEPS = 16, 2
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Difference, relative to their spread, up to which logits with and without a cache count as equal.
The bound is well above the effect of a different order of sums, and below that of a lost token.
"""


@dataclass(frozen=True)
class NoCache:
    """A cache that a model cannot use. `why` is a clause in words."""

    why: str

    @staticmethod
    def after(error: CacheError) -> NoCache:
        """Returns why a cache failed, according to `error`."""
        sentence = str(error).rstrip(". !")
        return NoCache(f"{sentence[:1].lower()}{sentence[1:]}")


def too_short_for_a_trial(positions: int) -> NoCache:
    """Returns why no cache is tried where a row has so few positions."""
    return NoCache(f"its rows of {positions} tokens are too short to try one")


def try_cache(engine: StreamingEngine) -> CacheCost | NoCache:
    """Runs a short row without a cache and with one, at its end one token at a time. Answers are
    computed without one where the logits differ or the model cannot use a cache.
    """
    text = engine.model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or _TRIAL_TOKENS
    length = min(_TRIAL_TOKENS, longest)
    first = length - _TRIAL_STEPS
    if first < 2:
        return too_short_for_a_trial(length)
    # The tokens differ, because a lost token would not be noticed among equal ones.
    row = [int(token) for token in np.linspace(0, text.vocab_size - 1, length + 2)[1:-1]]
    half = first // 2
    # Two rows of different lengths show how many bytes each token of a cache takes.
    caches: list[Any] = [None, None]
    try:
        both = engine.cached_logits([np.array([row[:first]]), np.array([row[:half]])], caches)
        whole_bytes, half_bytes = cache_bytes(caches[0]), cache_bytes(caches[1])
        logits = [both[0]]
        for token in row[first:]:
            next_logits = engine.cached_logits([np.array([[token]])], caches[:1])
            logits.append(next_logits[0])
    except CacheError as error:
        return NoCache.after(error)
    truth = engine.last_logits([row[:end] for end in range(first, length + 1)])
    found = disagreement(torch.stack(logits), truth, TOLERANCE[engine.model.dtype])
    if found is not None:
        return found
    per_token = math.ceil(max(0, whole_bytes - half_bytes) / (first - half))
    return CacheCost(max(0, whole_bytes - first * per_token), per_token)


def disagreement(logits: torch.Tensor, truth: torch.Tensor, tolerance: float) -> NoCache | None:
    """Returns None if each row of logits [rows, vocabulary] is close to the truth, relative to its
    spread.
    """
    spread = (truth - truth.mean(-1, keepdim=True)).norm(dim=-1)
    away = (logits - truth).norm(dim=-1)
    if bool((away <= tolerance * spread).all()):
        return None
    share = float((away / spread).max())
    by = f"{100 * share:.2g} %" if math.isfinite(share) else "no finite number"
    return NoCache(f"logits with it differ by {by}")


def cache_bytes(cache: Any) -> int:
    """Returns the bytes of device memory that a cache holds. A view counts with the whole memory
    that it keeps alive.
    """
    storages: dict[int, int] = {}
    for _, tensor in tensors_in(cache):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
