"""Attention that keeps the documents of a row apart without a tokens x tokens mask.

transformers lets a program register an attention function and the function that makes its masks.
Ours makes no mask: where a family would get one it is given a `Pattern`, the documents of each row
(known on the host, so that nothing waits for the device) and what a token may look back to inside
its document. The attention then runs document by document: torch's variable-length kernel on a GPU,
plain attention on each document's slice elsewhere (or under a mask after all, where rows are so
short that calls would take longer). What torch's fused attention does not know, soft caps and
sinks, goes to the family's own eager function, document by document too. Rows that are not packed
and see all that came before them get no pattern and take transformers' own path.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.errors import ModelError
from engine.model.layout import DOCUMENTS, MASK_ELEMENTS
from engine.model.library import transformers

KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Of torch's fused attention on a GPU, the one wanted most first."""

_HARMLESS_TENSORS = {"position_ids", "cache_position", "s_aux", "sinks"}
"""Tensors besides query, key and value that mean the same for a document as for a whole row."""
_MASKED_AT_ONCE = 2_000_000
"""Of a CPU: queries' numbers times tokens of a row, for each document, below which a mask is faster
than calls.
"""
_FAMILY_OWN = ("softcap", "s_aux", "sinks")
"""What only a family's eager function honours."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Which tokens of a micro-batch belong together. `lengths`: for each row, tokens of its
    documents, padding being one of them. `upload`: from a host array to a tensor on the device,
    without waiting for the device.
    """

    lengths: tuple[tuple[int, ...], ...]
    upload: Callable[[np.ndarray], torch.Tensor]
    _starts: dict[int | None, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    _masks: dict[tuple, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, position_ids: np.ndarray, upload: Callable[[np.ndarray], torch.Tensor]
    ) -> Documents:
        """From positions [rows, tokens] that restart with every document."""
        lengths = []
        for row in np.asarray(position_ids):
            starts = np.flatnonzero(np.append(True, np.diff(row) != 1))
            lengths.append(tuple(int(n) for n in np.diff(np.append(starts, len(row)))))
        return cls(tuple(lengths), upload)

    @classmethod
    def whole_rows(
        cls, rows: int, tokens: int, upload: Callable[[np.ndarray], torch.Tensor]
    ) -> Documents:
        """One document a row."""
        return cls(((tokens,),) * rows, upload)

    @property
    def whole(self) -> bool:
        """Every row is one document."""
        return all(len(row) == 1 for row in self.lengths)

    @property
    def longest(self) -> int:
        return max(max(row) for row in self.lengths)

    def pieces(self, chunk: int | None) -> Iterator[tuple[slice, int, int]]:
        """(rows, first token, token after the last) of every stretch that attends to itself alone:
        a document or, where attention is chunked, each `chunk` tokens of it.
        """
        apart = [(slice(k, k + 1), lengths) for k, lengths in enumerate(self.lengths)]
        rows = [(slice(None), self.lengths[0])] if self.whole else apart
        for row, lengths in rows:
            start = 0
            for length in lengths:
                step = chunk or length
                for first in range(start, start + length, step):
                    yield row, first, min(first + step, start + length)
                start += length

    def starts(self, chunk: int | None) -> torch.Tensor:
        """int32 [pieces + 1] on the device: where each piece starts when the rows lie one after
        another, and the end.
        """
        if chunk not in self._starts:
            sizes = [
                min(chunk or n, n - first)
                for row in self.lengths
                for n in row
                for first in range(0, n, chunk or n)
            ]
            self._starts[chunk] = self.upload(np.cumsum([0, *sizes], dtype=np.int32))
        return self._starts[chunk]

    def mask(self, window: int | None, chunk: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[rows, 1, tokens, tokens]: 0 where a token sees another, else -inf."""
        key = window, chunk, dtype
        if key not in self._masks:
            lengths = np.array([n for row in self.lengths for n in row])
            rows, tokens = len(self.lengths), sum(self.lengths[0])
            places = np.stack(
                [np.arange(len(lengths)), np.cumsum(lengths) - lengths]
            )  # of each document: number, start
            document, first = self.upload(
                np.repeat(places, lengths, axis=1).astype(np.int32).reshape(2, rows, tokens)
            )
            at = torch.arange(tokens, device=document.device)
            back = at[:, None] - at[None, :]
            seen = (document[:, :, None] == document[:, None, :]) & (back >= 0)
            if window is not None:
                seen &= back < window
            if chunk is not None:
                place = (
                    torch.arange(rows * tokens, device=document.device).view(rows, tokens) - first
                ) // chunk
                seen &= place[:, :, None] == place[:, None, :]
            self._masks[key] = torch.zeros(
                seen.shape, dtype=dtype, device=seen.device
            ).masked_fill_(~seen, -torch.inf)[:, None]
        return self._masks[key]


class Pattern:
    """Stands where a mask would be: causal attention inside documents, the newest `window` tokens
    or the same `chunk` only, where one is given.
    """

    # No dataclass: torch 2.11 compiles what receives a frozen one anew for each value of each
    # field, thus at every step.
    __slots__ = ("chunk", "documents", "window")

    def __init__(self, documents: Documents, window: int | None = None, chunk: int | None = None):
        self.documents, self.window, self.chunk = documents, window, chunk


class _Capture(threading.local):
    """What the masks of the forward pass that is running in this thread are made from."""

    documents: Documents | None = None
    kinds: dict[int, str] | None = None


_capture = _Capture()


def forward(
    model: nn.Module,
    input_ids: torch.Tensor,
    documents: Documents | None = None,
    kinds: dict[int, str] | None = None,
    **given: Any,
) -> Any:
    """`model`'s own forward pass on `input_ids` (int64 [rows, tokens]), with what its attention
    must know.

    documents: those of `position_ids` in `given`; without them they are read from it, which waits
    for its device. kinds: remembers from call to call what kind of local attention each size
    belongs to, since finding that out waits too. With a key-value cache nothing is packed, and the
    masks are the library's.
    """
    cached = given.pop("use_cache", False) or given.get("past_key_values") is not None
    if cached or model.config.get_text_config()._attn_implementation != DOCUMENTS:
        return model(input_ids=input_ids, use_cache=cached, **given)
    if documents is None:
        positions = given.get("position_ids")

        def upload(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(input_ids.device)

        documents = (
            Documents.whole_rows(*input_ids.shape, upload)
            if positions is None
            else Documents.of(positions.cpu().numpy(), upload)
        )
    _capture.documents, _capture.kinds = documents, {} if kinds is None else kinds
    try:
        # Given a mask of its own, the library looks for no documents, for which it would wait for
        # the device.
        return model(
            input_ids=input_ids, use_cache=False, attention_mask=torch.ones_like(input_ids), **given
        )
    finally:
        _capture.documents = _capture.kinds = None


@functools.cache
def register() -> None:
    """Make `attn_implementation=DOCUMENTS` known to transformers."""
    library = transformers()
    library.AttentionInterface.register(DOCUMENTS, attention)
    library.AttentionMaskInterface.register(DOCUMENTS, mask)


@functools.cache
def leave_uncompiled() -> None:
    """Compiled blocks call the attention as it is: its kernel is chosen as it runs, and documents
    are what the host knows.
    """
    register()
    transformers().AttentionInterface.register(DOCUMENTS, torch.compiler.disable(attention))


# ---------------------------------------------------------------------- in place of a mask


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> Pattern | torch.Tensor | None:
    """Transformers' mask interface: a Pattern, None for plain causal attention over whole rows, or
    the library's dense mask outside `forward` and for whole rows of a kind that no pattern
    describes. Raises ModelError for packed ones.
    """
    masking = transformers().masking_utils
    causal = masking.causal_mask_function
    documents = _capture.documents
    kind = "other"
    if documents is not None:
        attention_mask = None  # the one that `forward` gave: nothing is padded
        if allow_is_causal_skip and not use_vmap and mask_function is causal:
            kind = "causal"
        elif allow_is_causal_skip and not use_vmap and local_size is not None:
            if local_size not in _capture.kinds:
                _capture.kinds[local_size] = _local_kind(mask_function, local_size, device)
            kind = _capture.kinds[local_size]
        if kind != "other":
            local = local_size if kind != "causal" and local_size < documents.longest else None
            if local is None and documents.whole:
                return None
            sliding, chunked = kind == "sliding", kind == "chunked"
            return Pattern(
                documents, window=local if sliding else None, chunk=local if chunked else None
            )
        if not documents.whole:
            raise ModelError(
                "The model asks for an attention mask that cannot be split into documents; set "
                "data.packing to false."
            )
    return masking.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function or causal,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        device=device,
        **rest,
    )


def _local_kind(mask_function: Callable, size: int, device: torch.device | str) -> str:
    """`sliding`, `chunked` or `other`, told by what the tokens around the borders of a window and
    of a chunk see.
    """
    queries = torch.tensor([size - 1, size, size + 1, 2 * size + 1], device=device)[
        None, None, :, None
    ]
    keys = torch.arange(2 * size + 2, device=device)[None, None, None, :]
    first = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    seen, past = mask_function(first, first, queries, keys), keys <= queries
    if bool((seen == (past & (keys > queries - size))).all()):
        return "sliding"
    return (
        "chunked" if bool((seen == (past & (keys // size == queries // size))).all()) else "other"
    )


# ---------------------------------------------------------------------- attention


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Pattern | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface. query, key, value: [rows, heads, tokens, width], with
    fewer key and value heads where they are shared; the result is [rows, tokens, heads, width].
    Raises ModelError for what would not be honoured.
    """
    own = any(given.get(name) is not None for name in _FAMILY_OWN)
    if not own and isinstance(attention_mask, Pattern):
        given["is_causal"] = True
    attend = functools.partial(
        _family_attention if own else _fused_attention,
        module,
        dropout=dropout,
        scaling=scaling,
        **given,
    )
    if not isinstance(attention_mask, Pattern):
        return attend(query, key, value, attention_mask)[0], None
    strange = [
        name
        for name, what in given.items()
        if isinstance(what, torch.Tensor) and name not in _HARMLESS_TENSORS
    ]
    if strange or key.shape[2] != query.shape[2]:
        what = strange[0] if strange else "keys of other tokens"
        raise ModelError(
            f"{type(module).__name__} gives its attention {what}, which cannot be split into "
            "documents; set data.packing to false."
        )
    if not own and not dropout and _varlen_runs(query, value, attention_mask):
        return _varlen_attention(query, key, value, attention_mask, scaling), None
    documents = attention_mask.documents
    if not own and _masked_at_once(query, documents):
        dense = documents.mask(attention_mask.window, attention_mask.chunk, query.dtype)
        return attend(query, key, value, dense)[0], None
    return _by_document(attend, query, key, value, attention_mask), None


def _masked_at_once(query: torch.Tensor, documents: Documents) -> bool:
    """Whether one call under a mask takes less time than a call for each document."""
    rows, _, tokens, _ = query.shape
    if query.is_cuda:  # which waits for calls; the planner counts the mask
        return query.dtype == torch.float32 and rows * tokens**2 <= MASK_ELEMENTS
    return query.numel() * tokens <= _MASKED_AT_ONCE * sum(map(len, documents.lengths))


def _fused_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dense: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' own call of torch's attention. On a GPU, cuDNN's kernels come first: up to
    twice as fast as the flash kernels of torch, but they do not always sum in one order.
    """
    attend = transformers().integrations.sdpa_attention.sdpa_attention_forward
    shares = (
        key.shape[1] < query.shape[1]
        and key.shape[2] == query.shape[2] > 1
        and given.get("position_bias") is None
    )
    if shares and query.is_cuda and query.dtype == torch.float32:
        causal = given.get("is_causal")
        causal = dense is None and (
            getattr(module, "is_causal", True) if causal is None else causal
        )
        return _by_group(
            query, key, value, dense, causal, dropout=given["dropout"], scaling=given["scaling"]
        ), None
    if not query.is_cuda or torch.are_deterministic_algorithms_enabled():
        return attend(module, query, key, value, dense, **given)
    with sdpa_kernel(KERNELS, set_priority=True):
        return attend(module, query, key, value, dense, **given)


def _by_group(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dense: torch.Tensor | None,
    causal: bool,
    *,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """In float32 no fused kernel of a GPU lets queries share keys and values: torch would keep a
    weight for each pair of tokens, and repeated keys and values take memory. So the queries of each
    group go one after another.
    """
    groups = query.shape[1] // key.shape[1]
    parts = [
        F.scaled_dot_product_attention(
            query[:, first::groups],
            key,
            value,
            attn_mask=dense,
            dropout_p=dropout,
            is_causal=causal,
            scale=scaling,
        )
        for first in range(groups)
    ]
    return torch.stack(parts, 2).flatten(1, 2).transpose(1, 2)


def _by_document(
    attend: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: Pattern
) -> torch.Tensor:
    rows: dict[int | None, list[torch.Tensor]] = {}
    masks: dict[int, torch.Tensor] = {}
    for row, start, end in pattern.documents.pieces(pattern.chunk):
        length, dense = end - start, None
        if pattern.window is not None and length > pattern.window:
            if length not in masks:
                at = torch.arange(length, device=query.device)
                back = at[:, None] - at[None, :]
                masks[length] = ((back >= 0) & (back < pattern.window))[None, None]
            dense = masks[length]
        parts = (tensor[row, :, start:end] for tensor in (query, key, value))
        rows.setdefault(row.start, []).append(attend(*parts, dense)[0])
    whole = [parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in rows.values()]
    return whole[0] if len(whole) == 1 else torch.cat(whole)


def _family_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dense: torch.Tensor | None,
    *,
    dropout: float,
    scaling: float | None,
    **given: Any,
) -> tuple[torch.Tensor, Any]:
    """The eager function of the family's own file, which wants a mask of numbers."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ModelError(
            f"{type(module).__name__} asks for soft caps or sinks in its attention and has no "
            "function for them; choose another model."
        )
    if dense is None:
        tokens, seen = query.shape[2], key.shape[2]
        dense = torch.ones(tokens, seen, dtype=torch.bool, device=query.device).tril(seen - tokens)[
            None, None
        ]
    if dense.dtype == torch.bool:
        dense = torch.zeros(dense.shape, dtype=query.dtype, device=query.device).masked_fill_(
            ~dense, torch.finfo(query.dtype).min
        )
    return eager(module, query, key, value, dense, dropout=dropout, scaling=scaling, **given)


# ---------------------------------------------------------------------- the GPU's variable-length k


@functools.cache
def _varlen_kernel() -> tuple[Callable, frozenset[str]] | None:
    """Torch's variable-length attention and the names of its arguments, which moved between
    versions.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _varlen_runs(query: torch.Tensor, value: torch.Tensor, pattern: Pattern) -> bool:
    kernel, width = _varlen_kernel(), query.shape[-1]
    return (
        kernel is not None
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and value.shape[-1] == width
        and width % 8 == 0
        and width <= 256
        and "scale" in kernel[1]
        and ("window_size" in kernel[1] or ("is_causal" in kernel[1] and pattern.window is None))
    )


def _varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Pattern,
    scaling: float | None,
) -> torch.Tensor:
    varlen_attn, names = _varlen_kernel()
    rows, heads, tokens, width = query.shape
    options: dict[str, Any] = {"scale": scaling}
    if "window_size" in names:
        options["window_size"] = (-1 if pattern.window is None else pattern.window - 1, 0)
    else:
        options["is_causal"] = True
    if (
        key.shape[1] != heads and "enable_gqa" in names
    ):  # older versions take fewer keys and values without being asked
        options["enable_gqa"] = True
    joined = (
        t.transpose(1, 2).reshape(rows * tokens, t.shape[1], width) for t in (query, key, value)
    )
    starts, longest = (
        pattern.documents.starts(pattern.chunk),
        min(pattern.documents.longest, pattern.chunk or tokens),
    )
    out = varlen_attn(*joined, starts, starts, longest, longest, **options)
    return out.view(rows, tokens, heads, width)
