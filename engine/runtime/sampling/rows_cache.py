"""A key-value cache of many rows of different lengths, in tensors that stay where they are.

Each row begins at position 0 of its line of the cache, so rows are not padded, and a finished row's
line is given to the next row. The model's blocks write the keys and values of a step's tokens
through transformers' cache interface, and read all positions that any row uses
(`engine.model.build.attention_rows` hides the others).

A prompt is computed with a cache of transformers' own, and copied into its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.errors import CacheError
from engine.model.build.attention_rows import CachedRows
from engine.model.build.library import transformers
from engine.planning.fit.sampling_memory import POSITIONS, CacheCost
from engine.planning.shape.activation_sizes import DOCUMENTS
from engine.runtime.sampling.kv_cache import (
    TOLERANCE,
    NoCache,
    disagreement,
    too_short_for_a_trial,
)
from engine.runtime.step.inference_passes import pass_groups
from engine.runtime.step.streaming_engine import StreamingEngine

_TRIAL_TOKENS, _TRIAL_STEPS = 16, 2


class _Seen:
    """What the pass under way sees of a cache that has `positions`. Layers share this instead of
    knowing their cache: a circle would keep its memory until the next garbage collection.
    """

    def __init__(self, positions: int):
        self.positions = positions
        self.rows: CachedRows | None = None


class _Layer:
    """Keys and values of one block: what transformers asks of a layer of a cache."""

    is_compileable = False
    is_sliding = False
    is_initialized = True

    def __init__(self, seen: _Seen, keys: torch.Tensor, values: torch.Tensor):
        self._seen = seen
        self.keys, self.values = keys, values

    def lazy_initialization(self, *_: Any) -> None:
        """Does nothing, since the tensors are there."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new token of each row, [rows, heads, 1, width], and returns all positions."""
        return self._written(self.keys, keys), self._written(self.values, values)

    def _written(self, target: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        rows = self._rows
        if new.shape[2] != 1 or new.shape[0] != rows.at.shape[0]:
            raise CacheError("The model does not add one token to each row of its cache.")
        seen = target[: new.shape[0], :, : rows.positions]
        seen.scatter_(2, rows.at.view(-1, 1, 1, 1).expand_as(new), new)
        return seen

    @property
    def _rows(self) -> CachedRows:
        assert self._seen.rows is not None  # a pass is under way
        return self._seen.rows

    def get_seq_length(self) -> int:
        return self._rows.positions - 1

    def get_max_length(self) -> int:
        return self._seen.positions

    get_max_cache_shape = get_max_length  # its name before transformers 5.24

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return self._rows.positions, 0


@functools.cache
def _layer_type() -> type[_Layer]:
    """Returns `_Layer` as one of the library's layers, by whose class its `Cache` knows them."""
    return type("RowsLayer", (_Layer, transformers().cache_utils.CacheLayerMixin), {})


class RowsCache:
    """Cache of `rows` rows of up to `positions` tokens, for layers like those of `prompt`, a cache
    of transformers that holds keys and values.
    """

    def __init__(self, prompt: Any, rows: int, positions: int):
        self.rows, self.positions = rows, positions
        self._seen = _Seen(positions)
        layers = [
            _layer_type()(self._seen, self._empty(layer.keys), self._empty(layer.values))
            for layer in prompt.layers
        ]
        self._layers = layers
        self.of_model: Any = transformers().Cache(layers=layers)
        """What blocks are given."""

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        heads, width = like.shape[1], like.shape[3]
        return like.new_zeros(self.rows, heads, self.positions, width)

    def enter(self, at: torch.Tensor, positions: int) -> None:
        """Says at which positions, int64 [rows], the next pass writes the first rows' tokens, and
        how many positions it reads.
        """
        self._seen.rows = self.of_model.cached_rows = CachedRows(at, positions)

    def take_prompts(self, prompt: Any, places: Sequence[Sequence[int]]) -> None:
        """Copies the keys and values of computed prompts: those of the first one into the rows
        `places[0]`, and so on.
        """
        sources = [source for source, rows in enumerate(places) for _ in rows]
        targets = [place for rows in places for place in rows]
        for layer, computed in zip(self._layers, prompt.layers):
            for target, source in ((layer.keys, computed.keys), (layer.values, computed.values)):
                length = source.shape[2]
                index = torch.tensor([sources, targets]).to(source.device)
                # Positions behind the end of a prompt hold padding, which its tokens overwrite.
                target[:, :, :length].index_copy_(0, index[1], source[index[0]])

    def move(self, place: int, to: int) -> None:
        """Copies a row to another place."""
        for layer in self._layers:
            for tensor in (layer.keys, layer.values):
                tensor[to].copy_(tensor[place])

    def resized(self, rows: int, positions: int) -> RowsCache:
        """Returns another cache with the same contents, as far as they fit into it."""
        other = RowsCache(self, rows, positions)
        rows, positions = min(rows, self.rows), min(positions, self.positions)
        for mine, theirs in zip(self._layers, other._layers):
            for old, new in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                new[:rows, :, :positions] = old[:rows, :, :positions]
        return other

    @property
    def layers(self) -> Sequence[_Layer]:
        return self._layers


def computed_prompts(
    engine: StreamingEngine, prompts: Sequence[Sequence[int]]
) -> list[tuple[list[int], Any, torch.Tensor]]:
    """Runs prompts through the model once. Returns micro-batches: the numbers of its prompts, a
    cache with their keys and values, and logits [prompts, vocabulary] after each prompt's last
    token, on the device.

    Prompts of similar length share a micro-batch, padded on the right, which causal attention never
    reads. Raises CacheError where the model does not keep keys and values of all tokens.
    """
    groups = pass_groups(prompts)
    padded, last = [], []
    for group in groups:
        length = len(prompts[group[-1]])
        ids = np.zeros((len(group), length), dtype=np.int64)
        for place, number in enumerate(group):
            ids[place, : len(prompts[number])] = prompts[number]
        padded.append(ids)
        last.append(
            np.array([place * length + len(prompts[n]) - 1 for place, n in enumerate(group)])
        )
    library = transformers()
    caches: list[Any] = [library.DynamicCache() for _ in groups]
    logits = engine.device_logits(padded, last, caches)
    for ids, cache in zip(padded, caches):
        for layer in cache.layers:
            keys = getattr(layer, "keys", None)
            if type(layer) is not library.cache_utils.DynamicLayer or keys is None:
                raise CacheError("The model keeps more than keys and values of its tokens.")
            if keys.ndim != 4 or keys.shape[2] != ids.shape[1]:
                raise CacheError("The model keeps the keys of some tokens only.")
    return list(zip(groups, caches, logits))


def try_rows_cache(engine: StreamingEngine) -> CacheCost | NoCache:
    """Runs two rows of different lengths without a cache, and with a `RowsCache`, at its end one
    token at a time. Returns what a row takes, unless the logits differ or the model cannot use such
    a cache.
    """
    text = engine.model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or _TRIAL_TOKENS
    length = min(_TRIAL_TOKENS, longest)
    ends = (length - _TRIAL_STEPS, length // 2 - _TRIAL_STEPS + 1)
    if min(ends) < 2:
        return too_short_for_a_trial(length)
    if text._attn_implementation != DOCUMENTS:
        return NoCache(f"its attention is {text._attn_implementation}, which has no such cache")
    # The tokens differ, because a lost token would not be noticed among equal ones.
    tokens = [int(token) for token in np.linspace(0, text.vocab_size - 1, length + 4)]
    rows = (tokens[1 : length + 1], tokens[3 : length + 3])
    device = engine.backend.device
    try:
        found = computed_prompts(engine, [row[:end] for row, end in zip(rows, ends)])
        cache = RowsCache(found[0][1], 2, POSITIONS)
        logits: list[list[torch.Tensor]] = [[], []]
        for numbers, computed, after in found:
            cache.take_prompts(computed, [[number] for number in numbers])
            for place, number in enumerate(numbers):
                logits[number].append(after[place])
        for step in range(_TRIAL_STEPS):
            at = torch.tensor([end + step for end in ends]).to(device)
            ids = torch.tensor([row[end + step] for row, end in zip(rows, ends)]).to(device)
            cache.enter(at, length)
            after = engine.next_logits(ids, at, cache.of_model)
            for number in range(2):
                logits[number].append(after[number])
    except CacheError as error:
        return NoCache.after(error)
    steps = range(_TRIAL_STEPS + 1)
    truth = engine.last_logits([row[: end + n] for row, end in zip(rows, ends) for n in steps])
    together = torch.stack([each.cpu() for of_row in logits for each in of_row])
    different = disagreement(together, truth, TOLERANCE[engine.model.dtype])
    if different is not None:
        return different
    elements = sum(
        tensor.shape[1] * tensor.shape[3] * tensor.itemsize
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
    )
    return CacheCost(0, elements)
