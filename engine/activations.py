"""What autograd keeps of a block, counted on the meta device: no weights, no arithmetic, any size of model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from engine.attention import Documents, Pattern
from engine.layout import DOCUMENTS, Activations
from engine.model import StreamedModel, Unit
from engine.skeleton import BlockArguments, tensors_in

_LENGTHS = (32, 64, 96)


def count_activations(model: StreamedModel) -> list[tuple[Activations, Activations]] | None:
    """For each block, what is kept without and with a dense mask: a packed row's, or a window's where attention goes
    document by document. None where a block's code cannot run on the meta device because it looks at values."""
    alike = [_shapes(unit) for unit in model.blocks]
    try:
        plain, masked = _by_shapes(model, alike, masked=False), _by_shapes(model, alike, masked=True)
    except Exception:  # whatever a family's code raises for want of values: the caller has an estimate for that
        return None
    return [(plain[shapes], masked[shapes]) for shapes in alike]


def _shapes(unit: Unit) -> tuple:
    return tuple((spec.name, spec.shape) for spec in unit.layout.parameters)


def _by_shapes(model: StreamedModel, alike: list[tuple], masked: bool) -> dict[tuple, Activations]:
    first = {shapes: position for position, shapes in reversed(list(enumerate(alike)))}
    counts: dict[tuple, list[int]] = {shapes: [] for shapes in first}
    windows = masked and model.skeleton.model.config.get_text_config()._attn_implementation == DOCUMENTS
    for length in _LENGTHS:
        ids = torch.zeros(1, length, dtype=torch.long)
        positions = torch.arange(length).remainder(length // 2).unsqueeze(0) if masked and not windows else None
        with torch.no_grad():
            captured = model.skeleton.capture(ids, positions)
        for shapes, position in first.items():
            given = captured.arguments[position]
            if windows and given.kwargs.get("attention_mask") is None:
                given.kwargs["attention_mask"] = Pattern(Documents.whole_rows(1, length, torch.from_numpy), length // 2)
            counts[shapes].append(_kept_bytes(model, model.blocks[position], given, captured.hidden))
    return {shapes: _fit(*kept) for shapes, kept in counts.items()}


def _fit(short: int, middle: int, long: int) -> Activations:
    """The parabola through three counts at equal distances; its constant (what norms keep of their weights) is small."""
    a, b, _ = _LENGTHS
    step = b - a
    per_pair = (long - 2 * middle + short) / (2 * step * step)
    return Activations((middle - short) / step - per_pair * (a + b), per_pair)


def _kept_bytes(model: StreamedModel, unit: Unit, arguments: BlockArguments, hidden: torch.Tensor) -> int:
    config = getattr(unit.block, "config", None) or model.config
    block = copy.deepcopy(unit.block, {id(config): config}).to("meta")
    block.__dict__.pop("forward", None)
    block.train()
    given = BlockArguments(_on_meta(arguments.args), _on_meta(arguments.kwargs), arguments.hidden_keyword)
    own = {_storage(t) for t in [*block.parameters(), *block.buffers(),
                                 *(t for _, t in tensors_in(given.args) + tensors_in(given.kwargs))]}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in own:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), _FusedAttention():
        out = given.call(block, hidden.to("meta").requires_grad_())
    del out  # the graph kept every storage, and so its address, until here
    return sum(kept.values())


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
    """On the meta device torch would pick the attention that keeps all weights; CPU and GPU pick one that does not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key, value, *rest = args
            mask = rest[0] if rest else kwargs.get("attn_mask")
            return _KeepsInputs.apply(query, key, value, mask)
        return func(*args, **kwargs)


class _KeepsInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, mask):
        rows, heads, tokens, _ = query.shape
        out = query.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        # A boolean mask is turned into numbers, and those are kept.
        extra = [] if mask is None else [mask.to(query.dtype)]
        ctx.save_for_backward(query, key, value, out, log_sums, *extra)
        return out
