"""Attention keeps the documents of a row apart without a tokens x tokens mask.

transformers lets a program register an attention function and the function that makes its masks
(https://huggingface.co/docs/transformers/attention_interface). Ours work as follows:

- In place of a mask, a family's code receives a `Pattern`: the documents of each row, and how far a
  token looks back inside its document. See engine/model/build/attention_masks.py.
- Rows that are not packed and have plain causal attention get no pattern. They take transformers'
  own path.
- On a GPU, torch's variable-length kernel attends to all documents in one call.
- On other devices, plain attention runs on each document's slice of the row, with one call per
  document. If rows are so short that these calls would take longer, a single call with a mask is
  used instead.
- Torch's fused attention does not support soft caps and sinks. For these, the family's own eager
  function is called, also document by document.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as torch_functional
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.errors import ModelError
from engine.model.build.attention_documents import Documents, Pattern
from engine.model.build.attention_masks import mask
from engine.model.build.attention_rows import RowsMask
from engine.model.build.library import transformers
from engine.planning.shape.activation_sizes import DOCUMENTS, MASK_ELEMENTS

KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""The kernels of torch's fused attention on a GPU, in order of preference."""

_HARMLESS_TENSORS = {"position_ids", "cache_position", "s_aux", "sinks"}
"""Tensor arguments, besides query, key and value, that are as valid for a single document as for a
whole row.
"""
_MASKED_AT_ONCE = 2_000_000
"""Bound of the elements of the queries, times the tokens in a row, divided by the number of
documents, up to which one call with a mask is faster on a CPU than a call per document.
"""
_FAMILY_OWN = ("softcap", "s_aux", "sinks")
"""Arguments that only a family's eager function honors."""


class Heads(NamedTuple):
    """The three inputs of an attention call, each [rows, heads, tokens, width].

    If queries share keys and values, `key` and `value` have fewer heads.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one attention call in a module, apart from the heads and the mask."""

    module: nn.Module
    dropout: float
    scaling: float | None
    others: dict[str, Any]
    """Further arguments, which differ from family to family."""


_Attend = Callable[[Heads, torch.Tensor | None], torch.Tensor]
"""A function that attends with a mask [rows, 1, tokens, tokens], or causally if the mask is None,
and returns [rows, tokens, heads, width].
"""


@functools.cache
def register() -> None:
    """Makes `attn_implementation=DOCUMENTS` known to transformers."""
    library = transformers()
    library.AttentionInterface.register(DOCUMENTS, attention)
    library.AttentionMaskInterface.register(DOCUMENTS, mask)


@functools.cache
def leave_uncompiled() -> None:
    """Makes compiled blocks call the attention without compiling it.

    Its kernel is chosen at run time, and the documents are known only on the host. Neither can be
    compiled.
    """
    register()
    transformers().AttentionInterface.register(DOCUMENTS, torch.compiler.disable(attention))


def attention(  # transformers calls it with these arguments
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Pattern | RowsMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Attends according to transformers' attention interface.

    query, key, value: [rows, heads, tokens, width], with fewer key and value heads if they are
    shared. The result is [rows, tokens, heads, width]. Raises ModelError for arguments that would
    be ignored.
    """
    heads = Heads(query, key, value)
    call = _Call(module, dropout, scaling, given)
    is_family_own = any(given.get(name) is not None for name in _FAMILY_OWN)
    if isinstance(attention_mask, RowsMask):
        return _rows_attention(call, heads, attention_mask.seen), None
    if isinstance(attention_mask, Pattern):
        _refuse_what_cannot_be_split(call, heads)
        if is_family_own:
            attend = functools.partial(_family_attention, call)
            return _by_document(attend, heads, attention_mask), None
        return _fused_by_pattern(call, heads, attention_mask), None
    if is_family_own:
        return _family_attention(call, heads, attention_mask), None
    return _fused_attention(call, heads, attention_mask), None


def _fused_by_pattern(call: _Call, heads: Heads, pattern: Pattern) -> torch.Tensor:
    """Attends according to a pattern, in the fastest available way."""
    if not call.dropout and _varlen_runs(heads, pattern):
        return _varlen_attention(heads, pattern, call.scaling)
    # A segment without a mask gets causal attention, whatever the module's own `is_causal` is.
    causal = replace(call, others=call.others | {"is_causal": True})
    attend = functools.partial(_fused_attention, causal)
    if _masked_at_once(heads.query, pattern.documents):
        dense = pattern.documents.mask(pattern.window, pattern.chunk, heads.query.dtype)
        return attend(heads, dense)
    return _by_document(attend, heads, pattern)


def _refuse_what_cannot_be_split(call: _Call, heads: Heads) -> None:
    strange = [
        name
        for name, value in call.others.items()
        if isinstance(value, torch.Tensor) and name not in _HARMLESS_TENSORS
    ]
    if strange or heads.key.shape[2] != heads.query.shape[2]:
        what = strange[0] if strange else "keys of other tokens"
        raise ModelError(
            f"{type(call.module).__name__} gives its attention {what}, which cannot be split into "
            "documents; set data.packing to false."
        )


def _masked_at_once(query: torch.Tensor, documents: Documents) -> bool:
    """Returns whether one call with a mask takes less time than a call for each document."""
    rows, _, tokens, _ = query.shape
    if query.is_cuda:  # calls are slow on a GPU; the planner counts the mask
        return query.dtype == torch.float32 and rows * tokens**2 <= MASK_ELEMENTS
    return query.numel() * tokens <= _MASKED_AT_ONCE * sum(map(len, documents.lengths))


# ---------------------------------------------------------------------- rows of a cache


def _rows_attention(call: _Call, heads: Heads, seen: torch.Tensor) -> torch.Tensor:
    """Attends with one new token of each row to what it sees in the cache.

    Shared keys and values are not repeated: a step is as fast as the cache is read. `seen` is a
    mask [rows, 1, 1, positions].
    """
    if any(call.others.get(name) is not None for name in _FAMILY_OWN):
        return _family_attention(call, heads, seen)
    if call.others.get("position_bias") is not None:
        raise ModelError("A bias by position cannot be given to rows of a cache.")
    query, key, value = heads
    kernels: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if query.is_cuda and not torch.are_deterministic_algorithms_enabled():
        # Only cuDNN's kernel takes a mask and shared keys; torch prefers others by default.
        kernels = sdpa_kernel(KERNELS, set_priority=True)
    with kernels:
        out = torch_functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=seen,
            scale=call.scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    return out.transpose(1, 2).contiguous()


# ---------------------------------------------------------------------- torch's fused attention


def _fused_attention(call: _Call, heads: Heads, dense: torch.Tensor | None) -> torch.Tensor:
    """Calls torch's attention in the same way as transformers.

    On a GPU, cuDNN's kernels come first: they are up to twice as fast as torch's flash kernels, but
    do not always sum in the same order. So they are excluded when algorithms must be deterministic.
    """
    query, key, _ = heads
    keys_are_shared = (
        key.shape[1] < query.shape[1]
        and key.shape[2] == query.shape[2] > 1
        and call.others.get("position_bias") is None
    )
    if keys_are_shared and query.is_cuda and query.dtype == torch.float32:
        asked = call.others.get("is_causal")
        if asked is None:
            asked = getattr(call.module, "is_causal", True)
        is_causal = dense is None and asked
        return group_by_group(heads, dense, is_causal, call.dropout, call.scaling)

    def attend() -> torch.Tensor:
        library = transformers().integrations.sdpa_attention
        options = {"dropout": call.dropout, "scaling": call.scaling, **call.others}
        return library.sdpa_attention_forward(call.module, *heads, dense, **options)[0]

    if not query.is_cuda or torch.are_deterministic_algorithms_enabled():
        return attend()
    with sdpa_kernel(KERNELS, set_priority=True):
        return attend()


def group_by_group(
    heads: Heads,
    dense: torch.Tensor | None,
    is_causal: bool,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Attends with shared keys and values, and returns [rows, tokens, heads, width].

    In float32 no fused GPU kernel lets queries share keys and values. Otherwise, torch would keep a
    weight for each pair of tokens, or repeated keys and values would take memory. So the queries
    that share a key are split over several calls: the first call has the first query of each group,
    the next call the second, and so on. `dense` is a mask [rows, 1, tokens, tokens].
    """
    query, key, value = heads
    turns = query.shape[1] // key.shape[1]
    parts = [
        torch_functional.scaled_dot_product_attention(
            query[:, turn::turns],
            key,
            value,
            attn_mask=dense,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scaling,
        )
        for turn in range(turns)
    ]
    return torch.stack(parts, 2).flatten(1, 2).transpose(1, 2)


def _by_document(attend: _Attend, heads: Heads, pattern: Pattern) -> torch.Tensor:
    """Attends to each document separately, and joins the results in the order of the rows."""
    rows: dict[int | None, list[torch.Tensor]] = {}
    windows: dict[int, torch.Tensor] = {}
    for row, start, end in pattern.documents.segments(pattern.chunk):
        length = end - start
        dense = None
        if pattern.window is not None and length > pattern.window:
            if length not in windows:
                windows[length] = _window_mask(length, pattern.window, heads.query.device)
            dense = windows[length]
        segment = Heads(*(tensor[row, :, start:end] for tensor in heads))
        rows.setdefault(row.start, []).append(attend(segment, dense))
    return _joined([_joined(parts, 1) for parts in rows.values()], 0)


def _joined(parts: list[torch.Tensor], dimension: int) -> torch.Tensor:
    # A single part is returned unchanged, because `cat` would copy it.
    return parts[0] if len(parts) == 1 else torch.cat(parts, dimension)


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Returns bool[1, 1, length, length]: true for the newest `window` tokens of each token."""
    at = torch.arange(length, device=device)
    back = at[:, None] - at[None, :]
    return ((back >= 0) & (back < window))[None, None]


# ---------------------------------------------------------------------- a family's own attention


def _family_attention(call: _Call, heads: Heads, dense: torch.Tensor | None) -> torch.Tensor:
    """Calls the eager function of the family's own file, which requires a mask of numbers."""
    query, key, _ = heads
    family = sys.modules[type(call.module).__module__]
    eager = getattr(family, "eager_attention_forward", None)
    if eager is None:
        raise ModelError(
            f"{type(call.module).__name__} asks for soft caps or sinks in its attention and has no "
            "function for them; choose another model."
        )
    if dense is None:
        tokens, seen = query.shape[2], key.shape[2]
        past = torch.ones(tokens, seen, dtype=torch.bool, device=query.device).tril(seen - tokens)
        dense = past[None, None]
    if dense.dtype == torch.bool:
        blank = torch.zeros(dense.shape, dtype=query.dtype, device=query.device)
        dense = blank.masked_fill_(~dense, torch.finfo(query.dtype).min)
    options = {"dropout": call.dropout, "scaling": call.scaling, **call.others}
    return eager(call.module, *heads, dense, **options)[0]


# ---------------------------------------------------------------------- the variable-length kernel


class _Kernel(NamedTuple):
    """Torch's variable-length attention, with the names of its arguments in this version."""

    attend: Callable[..., Any]
    arguments: frozenset[str]


@functools.cache
def _varlen_kernel() -> _Kernel | None:
    """Returns the kernel if torch has one. Its arguments changed between versions."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return _Kernel(varlen_attn, frozenset(inspect.signature(varlen_attn).parameters))


def _varlen_runs(heads: Heads, pattern: Pattern) -> bool:
    kernel = _varlen_kernel()
    if kernel is None or not heads.query.is_cuda:
        return False
    width = heads.query.shape[-1]
    fits = (
        heads.query.dtype in (torch.bfloat16, torch.float16)
        and heads.value.shape[-1] == width
        and width % 8 == 0
        and width <= 256
    )
    # Older versions do not support windows.
    is_causal_enough = "is_causal" in kernel.arguments and pattern.window is None
    knows = "scale" in kernel.arguments and ("window_size" in kernel.arguments or is_causal_enough)
    return fits and knows


def _varlen_attention(heads: Heads, pattern: Pattern, scaling: float | None) -> torch.Tensor:
    kernel = _varlen_kernel()
    assert kernel is not None  # `_varlen_runs` found it
    rows, query_heads, tokens, width = heads.query.shape
    options: dict[str, Any] = {"scale": scaling}
    if "window_size" in kernel.arguments:
        # The kernel counts the tokens before a query, without the query's own; -1 means all of
        # them.
        back = -1 if pattern.window is None else pattern.window - 1
        options["window_size"] = (back, 0)
    else:
        options["is_causal"] = True
    # Older versions accept fewer key and value heads without a flag.
    if heads.key.shape[1] != query_heads and "enable_gqa" in kernel.arguments:
        options["enable_gqa"] = True
    joined = [
        tensor.transpose(1, 2).reshape(rows * tokens, tensor.shape[1], width) for tensor in heads
    ]
    starts = pattern.documents.starts(pattern.chunk)
    longest = min(pattern.documents.longest, pattern.chunk or tokens)
    out = kernel.attend(*joined, starts, starts, longest, longest, **options)
    return out.view(rows, tokens, query_heads, width)
