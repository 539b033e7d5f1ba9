"""What autograd keeps of a block, counted on the meta device: no weights, no arithmetic, any size
of model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.attention import Documents, Pattern
from engine.model.layout import DOCUMENTS, Activations
from engine.model.skeleton import BlockArguments, tensors_in
from engine.model.units import StreamedModel, Unit

_LENGTHS = (32, 64, 96)


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "rsqrt", "topk", "sort")
"""Operators whose results a compiled block keeps: matrix products, and what is small; all others
are computed again.
"""


@dataclass(frozen=True)
class Counted:
    """What is kept of a block without and with a dense mask (a packed row's, or a window's where
    attention goes document by document), and of a compiled block without one.
    """

    plain: Activations
    masked: Activations
    compiled: Activations


def count_activations(model: StreamedModel) -> list[Counted] | None:
    """For each block. None where a block's code cannot run on the meta device because it looks at
    values.
    """
    alike = [_shapes(unit) for unit in model.blocks]
    try:
        plain, masked = (
            _by_shapes(model, alike, masked=False),
            _by_shapes(model, alike, masked=True),
        )
    except (
        Exception
    ):  # whatever a family's code raises for want of values: the caller has an estimate for that
        return None
    return [Counted(plain[shapes][0], masked[shapes][0], plain[shapes][1]) for shapes in alike]


def argument_numel(model: StreamedModel) -> int:
    """Elements per token of what blocks are given beside their hidden state, such as rotary
    embeddings: each distinct tensor of floats with one entry for a token.
    """
    tokens = 13  # no other dimension has this size
    with torch.no_grad():
        captured = model.skeleton.capture(
            torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens).unsqueeze(0)
        )
    given = {
        _storage(tensor): tensor
        for _, tensor in tensors_in([[a.args, a.kwargs] for a in captured.arguments])
        if tensor.is_floating_point() and tensor.shape.count(tokens) == 1
    }
    given.pop(_storage(captured.hidden), None)
    return sum(tensor.numel() for tensor in given.values()) // tokens


def _shapes(unit: Unit) -> tuple:
    return tuple((spec.name, spec.shape) for spec in unit.layout.parameters)


def _by_shapes(
    model: StreamedModel, alike: list[tuple], masked: bool
) -> dict[tuple, tuple[Activations, Activations]]:
    """As it is and compiled."""
    first = {shapes: position for position, shapes in reversed(list(enumerate(alike)))}
    counts: dict[tuple, list[tuple[int, int]]] = {shapes: [] for shapes in first}
    windows = (
        masked and model.skeleton.model.config.get_text_config()._attn_implementation == DOCUMENTS
    )
    for length in _LENGTHS:
        ids = torch.zeros(1, length, dtype=torch.long)
        positions = (
            torch.arange(length).remainder(length // 2).unsqueeze(0)
            if masked and not windows
            else None
        )
        with torch.no_grad():
            captured = model.skeleton.capture(ids, positions)
        for shapes, position in first.items():
            given = captured.arguments[position]
            if windows and given.kwargs.get("attention_mask") is None:
                given.kwargs["attention_mask"] = Pattern(
                    Documents.whole_rows(1, length, torch.from_numpy), length // 2
                )
            counts[shapes].append(
                _kept_bytes(model, model.blocks[position], given, captured.hidden)
            )
    return {
        shapes: (_fit(*(k[0] for k in kept)), _fit(*(k[1] for k in kept)))
        for shapes, kept in counts.items()
    }


def _fit(short: int, middle: int, long: int) -> Activations:
    """The parabola through three counts at equal distances; its constant (what norms keep of their
    weights) is small.
    """
    a, b, _ = _LENGTHS
    step = b - a
    per_pair = (long - 2 * middle + short) / (2 * step * step)
    return Activations((middle - short) / step - per_pair * (a + b), per_pair)


def _kept_bytes(
    model: StreamedModel, unit: Unit, arguments: BlockArguments, hidden: torch.Tensor
) -> tuple[int, int]:
    """Bytes that autograd keeps of a block as it is, and of one that is compiled: from what
    autograd would keep, back through everything that is cheap to the results of matrix products, to
    what attention keeps and to the input.
    """
    config = getattr(unit.block, "config", None) or model.config
    block = copy.deepcopy(unit.block, {id(config): config}).to("meta")
    block.__dict__.pop("forward", None)
    block.train()
    given = BlockArguments(
        _on_meta(arguments.args), _on_meta(arguments.kwargs), arguments.hidden_keyword
    )
    own = {
        _storage(t)
        for t in [
            *block.parameters(),
            *block.buffers(),
            *(t for _, t in tensors_in(given.args) + tensors_in(given.kwargs)),
        ]
    }
    kept: dict[int, int] = {}
    origins = _Origins()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in own:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    entering = hidden.to("meta").requires_grad_()
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        _FusedAttention(origins),
        origins,
    ):
        out = given.call(block, entering)
    origins.keep(entering)
    # A family's own attention runs as it is: what it keeps is not known to be recomputed.
    compiled = origins.of(kept, own) if origins.fused else sum(kept.values())
    del out  # the graph kept every storage, and so its address, until here
    return sum(kept.values()), compiled


class _Origins(TorchDispatchMode):
    """Remembers what each storage was computed from, and which hold what a compiled block would
    keep (`anchors`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.anchors: dict[int, int] = {}
        self.fused = False
        """Torch's own attention ran."""
        self._sources: dict[int, set[int]] = {}
        self._alive: list[torch.Tensor] = []

    def note_fused(self) -> None:
        self.fused = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {_storage(t) for _, t in tensors_in([args, kwargs or {}])}
        for _, tensor in tensors_in([out]):
            self._alive.append(tensor)  # so that no address is used twice
            storage = _storage(tensor)
            self._sources.setdefault(storage, set()).update(given - {storage})
            if func._overloadpacket.__name__ in _PRODUCTS:
                self.keep(tensor)
        return out

    def keep(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self.anchors[_storage(tensor)] = tensor.untyped_storage().nbytes()

    def of(self, kept: dict[int, int], own: set[int]) -> int:
        """Bytes of the anchors that `kept` is computed from."""
        seen, found, waiting = set(own), 0, list(kept)
        while waiting:
            storage = waiting.pop()
            if storage in seen:
                continue
            seen.add(storage)
            if storage in self.anchors:
                found += self.anchors[storage]
            else:
                waiting.extend(self._sources.get(storage, ()))
        return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {key: _on_meta(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_on_meta(inner) for inner in value)
    return value


class _FusedAttention(TorchFunctionMode):
    """On the meta device torch would pick the attention that keeps all weights; CPU and GPU pick
    one that does not.
    """

    def __init__(self, origins: _Origins):
        super().__init__()
        self._origins = origins

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key, value, *rest = args
            mask = rest[0] if rest else kwargs.get("attn_mask")
            out = _KeepsInputs.apply(query, key, value, mask, self._origins)
            self._origins.keep(query, key, value, out)
            self._origins.note_fused()
            return out
        return func(*args, **kwargs)


class _KeepsInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, mask, origins):
        rows, heads, tokens, _ = query.shape
        out = query.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        origins.keep(log_sums)
        # A boolean mask is turned into numbers, and those are kept.
        extra = [] if mask is None else [mask.to(query.dtype)]
        ctx.save_for_backward(query, key, value, out, log_sums, *extra)
        return out
