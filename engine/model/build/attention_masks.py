"""Models from transformers receive patterns in place of attention masks.

`forward` runs a model and remembers, for its thread, which documents are in its rows. The model's
own code then requests masks from transformers, which calls `mask`, the function that
engine/model/build/attention.py registers. `mask` returns a `Pattern` instead of a tokens x tokens
tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.errors import ModelError
from engine.model.build.attention_documents import Documents, Pattern
from engine.model.build.attention_rows import CachedRows, RowsMask
from engine.model.build.library import transformers
from engine.planning.shape.activation_sizes import DOCUMENTS


class _Capture(threading.local):
    """For each thread, the data from which the masks of its current forward pass are made."""

    documents: Documents | None = None
    kinds: dict[int, str] | None = None
    rows: CachedRows | None = None


_capture = _Capture()

CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")
"""Names of the key-value cache among the arguments of a model's `forward`. The first is the name of
every family since transformers 5.24.
"""


def forward(
    model: Any,
    input_ids: torch.Tensor,
    documents: Documents | None = None,
    kinds: dict[int, str] | None = None,
    **given: Any,
) -> Any:
    """Runs `model`'s own forward pass on `input_ids` (int64 [rows, tokens]) and returns its output.

    `model` is a causal language model from transformers, and `given` is passed to it unchanged.
    `documents` are those of `position_ids` in `given`; if they are not given, they are read from
    `position_ids`, which waits for the device. `kinds` caches, across calls, the kind of local
    attention for each size, because finding it out also waits for the device. With a key-value
    cache nothing is packed, and the library's masks are used, unless the cache has `CachedRows` as
    its `cached_rows`.
    """
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        given["output_router_logits"] = False  # the engine computes the loss that needs them
    caches = [given[name] for name in CACHE_KEYWORDS if given.get(name) is not None]
    has_cache = given.pop("use_cache", False) or bool(caches)
    rows = getattr(caches[0], "cached_rows", None) if caches else None
    if rows is not None:
        return _forward_of_rows(model, input_ids, rows, kinds, given)
    if has_cache or model.config.get_text_config()._attn_implementation != DOCUMENTS:
        return model(input_ids=input_ids, use_cache=has_cache, **given)
    if documents is None:
        documents = _documents_of(input_ids, given.get("position_ids"))
    _capture.documents = documents
    _capture.kinds = {} if kinds is None else kinds
    try:
        # If the library is given a mask, it does not search for documents, which would wait for the
        # device.
        return model(
            input_ids=input_ids, use_cache=False, attention_mask=torch.ones_like(input_ids), **given
        )
    finally:
        _capture.documents = None
        _capture.kinds = None


def _forward_of_rows(
    model: Any,
    input_ids: torch.Tensor,
    rows: CachedRows,
    kinds: dict[int, str] | None,
    given: dict[str, Any],
) -> Any:
    """Runs `model` on one new token of each row, int64 [rows, 1]."""
    _capture.rows = rows
    _capture.kinds = {} if kinds is None else kinds
    try:
        return model(input_ids=input_ids, use_cache=True, **given)
    finally:
        _capture.rows = None
        _capture.kinds = None


def mask(
    *,
    mask_function: Callable | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **given: Any,
) -> Pattern | RowsMask | torch.Tensor | None:
    """Returns a mask when transformers requests one. The arguments are those of its mask interface.

    The result is a RowsMask for new tokens of cached rows, a Pattern, or None for plain causal
    attention over whole rows. Outside `forward`, and for whole rows of a kind that no pattern
    describes, it is the library's dense mask [rows, 1, tokens, tokens]. Raises ModelError for
    packed rows of such a kind.
    """
    masking = transformers().masking_utils
    mask_function = mask_function or masking.causal_mask_function
    documents, kinds = _capture.documents, _capture.kinds
    if _capture.rows is not None and kinds is not None:
        kind = "other"
        if not use_vmap and mask_function is masking.causal_mask_function:
            kind = "causal"
        elif not use_vmap and local_size is not None:
            kind = _known_local_kind(kinds, mask_function, local_size, device)
        if kind == "other":
            raise ModelError("The model's attention mask cannot be made for rows of a cache.")
        window = local_size if kind == "sliding" else None
        chunk = local_size if kind == "chunked" else None
        return _capture.rows.mask(window, chunk, given.get("dtype", torch.float32))
    if documents is not None and kinds is not None:
        given["attention_mask"] = None  # `forward` passed one that hides nothing
        kind = "other"
        if allow_is_causal_skip and not use_vmap:
            if mask_function is masking.causal_mask_function:
                kind = "causal"
            elif local_size is not None:
                kind = _known_local_kind(kinds, mask_function, local_size, device)
        if kind != "other":
            return _pattern(documents, kind, local_size)
        if not documents.whole:
            raise ModelError(
                "The model asks for an attention mask that cannot be split into documents; set "
                "data.packing to false."
            )
    return masking.sdpa_mask(
        mask_function=mask_function,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        device=device,
        **given,
    )


def _documents_of(input_ids: torch.Tensor, positions: torch.Tensor | None) -> Documents:
    """Returns the documents according to `positions`, or one document per row if there are no
    positions.
    """

    def upload(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(input_ids.device)

    if positions is None:
        rows, tokens = input_ids.shape
        return Documents.whole_rows(rows, tokens, upload)
    return Documents.of(positions.cpu().numpy(), upload)


def _pattern(documents: Documents, kind: str, local_size: int | None) -> Pattern | None:
    """Returns the pattern for a `kind` of attention, or None for plain causal attention."""
    is_local = kind != "causal" and local_size is not None and local_size < documents.longest
    if not is_local:
        return None if documents.whole else Pattern(documents)
    if kind == "sliding":
        return Pattern(documents, window=local_size)
    return Pattern(documents, chunk=local_size)


def _known_local_kind(
    kinds: dict[int, str], mask_function: Callable, size: int, device: torch.device | str
) -> str:
    """Returns the kind of local attention of a size, and keeps it in `kinds`."""
    if size not in kinds:
        kinds[size] = _local_kind(mask_function, size, device)
    return kinds[size]


def _local_kind(mask_function: Callable, size: int, device: torch.device | str) -> str:
    """Returns `sliding`, `chunked` or `other`, according to what the tokens around the borders of a
    window and of a chunk see.
    """
    tried = torch.tensor([size - 1, size, size + 1, 2 * size + 1], device=device)
    queries = tried[None, None, :, None]
    keys = torch.arange(2 * size + 2, device=device)[None, None, None, :]
    first = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    seen = mask_function(first, first, queries, keys)
    past = keys <= queries
    if bool((seen == (past & (keys > queries - size))).all()):
        return "sliding"
    if bool((seen == (past & (keys // size == queries // size))).all()):
        return "chunked"
    return "other"
