"""These functions count the bytes that autograd keeps for the backward pass of a block.

A copy of the block runs on the meta device, where tensors have shapes but no contents. This needs
no weights and no arithmetic, so it works for models of any size:

- The block runs on rows of three lengths. Autograd's hooks receive each tensor that it would keep,
  and each storage counts once. Parameters, buffers and arguments do not count.
- A parabola through the three counts gives the bytes per token and per pair of tokens.
- A compiled block keeps less, because cheap operators are recomputed. To find what it keeps, each
  storage is traced back to the results from which it can be recomputed: those of matrix products
  and of attention, and the block's input.
- Blocks with the same parameter shapes are counted once. Where parts of a model are trained, they
  must have the same frozen parameters, too: autograd keeps nothing for the gradient of these. A
  block without a backward is counted as if it had one, since its forward takes as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.blocks.block_inputs import BlockArguments, tensors_in
from engine.model.blocks.pytree_paths import Place
from engine.model.build.attention_documents import Documents, Pattern
from engine.model.build.specimens import Specimens, arguments_on_meta, on_meta
from engine.model.build.units import TORCH_DTYPES, StreamedModel, Unit
from engine.planning.shape.activation_sizes import DOCUMENTS, Activations

_LENGTHS = (32, 64, 96)
"""The row lengths for the three counts, in tokens, at equal distances."""

_PRODUCTS = (
    "mm",
    "addmm",
    "adapted_linear",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "convolution",
    "rsqrt",
    "topk",
    "sort",
)
"""A compiled block keeps the results of these operators: matrix products, and operators with small
results. All others are recomputed.
"""


@dataclass(frozen=True)
class Counted:
    """What autograd keeps for one block."""

    plain: Activations
    """What is kept when the block runs without a mask."""
    masked: Activations
    """What is kept when the block has a dense mask: that of a packed row, or that of a window if
    attention goes document by document.
    """
    compiled: Activations
    """What is kept when the block is compiled and runs without a mask."""


def count_activations(model: StreamedModel) -> list[Counted] | None:
    """Returns the counts of each block.

    Returns None if a block's code cannot run on the meta device because it reads values.
    """
    shapes_of_blocks = [block_shapes(model, unit) for unit in model.blocks]
    try:
        plain = _by_shapes(model, shapes_of_blocks, masked=False)
        masked = _by_shapes(model, shapes_of_blocks, masked=True)
    except Exception:  # noqa: BLE001  without values, a family's code may raise anything
        return None
    return [
        Counted(plain[shapes].as_it_is, masked[shapes].as_it_is, plain[shapes].compiled)
        for shapes in shapes_of_blocks
    ]


def argument_numel(model: StreamedModel) -> int:
    """Counts the elements per token that blocks receive in addition to their hidden state, and that
    all rows share unless they are packed.

    Rotary embeddings are an example. Every distinct float tensor with one entry per token counts.
    """
    return _given_numel(model, rows=1) - _computed_numel(model)


def handed_numel(model: StreamedModel) -> int:
    """Returns the elements per token of each row that stay on the device because blocks pass them
    on to later blocks, or the embed unit computes them for blocks, and those of their gradients.
    """
    return _computed_numel(model) + _cross_layer(model)


def _computed_numel(model: StreamedModel) -> int:
    """Counts the elements per token that blocks receive, and that differ from row to row."""
    if model.cross_layer_flow is None:
        return 0
    return _given_numel(model, rows=2) - _given_numel(model, rows=1)


def _given_numel(model: StreamedModel, rows: int) -> int:
    """Returns the elements per token that blocks receive with this number of rows of equal
    positions.
    """
    tokens = 13  # no other dimension has this size
    with torch.no_grad():
        captured = model.skeleton.capture(
            torch.zeros(rows, tokens, dtype=torch.long), torch.arange(tokens).unsqueeze(0)
        )
    given: dict[int, torch.Tensor] = {}
    for arguments in captured.arguments:
        for _, tensor in tensors_in([arguments.args, arguments.kwargs]):
            if tensor.is_floating_point() and tensor.shape.count(tokens) == 1:
                given[_storage(tensor)] = tensor
    given.pop(_storage(captured.hidden), None)
    if model.cross_layer_flow is None:
        return sum(tensor.numel() for tensor in given.values()) // tokens
    # Inputs that are trained are parts of one tensor, of which only one part is in `given`.
    own = [tensor.untyped_storage().nbytes() // tensor.dtype.itemsize for tensor in given.values()]
    return sum(own) // tokens


def _cross_layer(model: StreamedModel) -> int:
    """Returns the elements per token that stay on the device because blocks pass them on to later
    blocks, and those of gradients of what blocks are given. Returns 0 if a block's code cannot run
    on the meta device.
    """
    if model.cross_layer_flow is None:
        return 0
    shapes_of_blocks = [block_shapes(model, unit) for unit in model.blocks]
    try:
        short, long = (
            _cross_layer_bytes(model, shapes_of_blocks, length) for length in _LENGTHS[:2]
        )
    except Exception:  # noqa: BLE001  without values, a family's code may raise anything
        return 0
    return (long - short) // (_LENGTHS[1] - _LENGTHS[0]) // TORCH_DTYPES[model.dtype].itemsize


def _cross_layer_bytes(
    model: StreamedModel, shapes_of_blocks: list[BlockShapes], length: int
) -> int:
    specimens = Specimens(model, shapes_of_blocks)
    with torch.no_grad(), FusedAttention(_Origins()):
        captured = model.skeleton.capture(torch.zeros(1, length, dtype=torch.long), None)
        hidden = captured.hidden.to("meta")
        for position in first_of(shapes_of_blocks).values():
            block = on_meta(model, model.blocks[position])
            given = arguments_on_meta(captured.arguments[position])
            specimens.run(position, given, block, hidden)
    return specimens.cross_layer_bytes(captured.arguments)


BlockShapes = tuple[
    bool, tuple[tuple[str, tuple[int, ...], bool], ...], tuple[tuple[Place, ...], ...]
]
"""Whether the input of a block has a gradient, then the names and shapes of its parameters and
whether they are frozen, and then the cross-layer values that it takes and passes on.
"""


@dataclass(frozen=True)
class _Both:
    """The bytes kept for a block, uncompiled and compiled."""

    as_it_is: Activations
    compiled: Activations


def block_shapes(model: StreamedModel, unit: Unit) -> BlockShapes:
    """Returns what must be equal for two blocks to be counted once."""
    layouts = model.layouts
    place = layouts.index(unit.layout)
    is_below = not any(layout.trained for layout in layouts[: place + 1])
    parameters = tuple(
        (spec.name, spec.shape, spec.frozen and not is_below) for spec in unit.layout.parameters
    )
    cross_layer: tuple[tuple[Place, ...], ...] = ()
    if model.cross_layer_flow is not None:
        own = model.cross_layer_flow.blocks[place - 1]  # the embed unit comes before the blocks
        cross_layer = tuple(take.place for take in own.cross_layer_inputs), own.cross_layer_outputs
    return is_below or any(layout.trained for layout in layouts[:place]), parameters, cross_layer


def first_of(shapes_of_blocks: list[BlockShapes]) -> dict[BlockShapes, int]:
    """Returns the position of the first block of each kind of shapes, in order."""
    first: dict[BlockShapes, int] = {}
    for position, shapes in enumerate(shapes_of_blocks):
        first.setdefault(shapes, position)
    return first


def _by_shapes(
    model: StreamedModel, shapes_of_blocks: list[BlockShapes], masked: bool
) -> dict[BlockShapes, _Both]:
    """Counts one block for each set of shapes."""
    first = first_of(shapes_of_blocks)
    config = model.skeleton.model.config.get_text_config()
    has_windows = masked and config._attn_implementation == DOCUMENTS
    as_it_is: dict[BlockShapes, list[int]] = {shapes: [] for shapes in first}
    compiled: dict[BlockShapes, list[int]] = {shapes: [] for shapes in first}
    for length in _LENGTHS:
        ids = torch.zeros(1, length, dtype=torch.long)
        positions = None
        if masked and not has_windows:
            # With two documents in a row, the library makes a dense mask.
            positions = torch.arange(length).remainder(length // 2).unsqueeze(0)
        with torch.no_grad():
            captured = model.skeleton.capture(ids, positions)
        specimens = Specimens(model, shapes_of_blocks)
        for shapes, position in first.items():
            given = captured.arguments[position]
            if has_windows and given.kwargs.get("attention_mask") is None:
                row = Documents.whole_rows(1, length, torch.from_numpy)
                given.kwargs["attention_mask"] = Pattern(row, length // 2)
            counts = _kept_bytes(specimens, model, position, (given, captured.hidden), shapes)
            as_it_is[shapes].append(counts[0])
            compiled[shapes].append(counts[1])
    return {shapes: _Both(_fit(*as_it_is[shapes]), _fit(*compiled[shapes])) for shapes in first}


def _fit(short: int, middle: int, long: int) -> Activations:
    """Returns the parabola through the counts at the three lengths.

    Its constant term, what norms keep of their weights, is small and is left out.
    """
    first, second, _ = _LENGTHS
    step = second - first
    per_pair = (long - 2 * middle + short) / (2 * step * step)
    return Activations((middle - short) / step - per_pair * (first + second), per_pair)


def _kept_bytes(
    specimens: Specimens,
    model: StreamedModel,
    position: int,
    entering: tuple[BlockArguments, torch.Tensor],
    shapes: BlockShapes,
) -> tuple[int, int]:
    """Returns the bytes that autograd keeps for the block at `position`, uncompiled and compiled.

    entering: the block's arguments and its input [batch, tokens, width]. shapes: those of the
    block.
    """
    block = on_meta(model, model.blocks[position])
    parameters = dict(block.named_parameters())
    has_input_gradient, own_shapes, _ = shapes
    for name, _, is_frozen in own_shapes:
        parameters[name].requires_grad_(not is_frozen)
    given = arguments_on_meta(entering[0])
    of_arguments = [tensor for _, tensor in tensors_in([given.args, given.kwargs])]
    of_arguments += specimens.cross_layer_inputs_of(position)
    own = {_storage(tensor) for tensor in [*block.parameters(), *block.buffers(), *of_arguments]}
    kept: dict[int, int] = {}
    origins = _Origins()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in own:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    hidden = entering[1].to("meta").requires_grad_(has_input_gradient)
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        FusedAttention(origins),
        origins,
    ):
        out = specimens.run(position, given, block, hidden)
    origins.keep(hidden)
    # With a family's own attention, everything kept is counted, since recomputation is not certain.
    compiled = origins.of(kept, own) if origins.fused else sum(kept.values())
    del out  # until here the graph kept every storage alive, and so its address unique
    return sum(kept.values()), compiled


class _Origins(TorchDispatchMode):
    """While it is active, an instance records from which storages each storage was computed.

    It also records anchors: the storages that a compiled block would keep.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fused = False
        """Whether torch's own attention has run."""
        self._anchors: dict[int, int] = {}
        self._sources: dict[int, set[int]] = {}
        self._alive: list[torch.Tensor] = []

    def note_fused(self) -> None:
        self.fused = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_storage(tensor) for _, tensor in tensors_in([args, kwargs or {}])}
        for _, tensor in tensors_in([out]):
            # If the tensor were freed, another one could get its address.
            self._alive.append(tensor)
            storage = _storage(tensor)
            self._sources.setdefault(storage, set()).update(given - {storage})
            if func._overloadpacket.__name__ in _PRODUCTS:
                self.keep(tensor)
        return out

    def keep(self, *tensors: torch.Tensor) -> None:
        """Makes anchors of `tensors`, of any shape."""
        for tensor in tensors:
            self._anchors[_storage(tensor)] = tensor.untyped_storage().nbytes()

    def of(self, kept: dict[int, int], own: set[int]) -> int:
        """Returns the bytes of the anchors from which the storages in `kept` can be recomputed.

        Tracing back from a storage ends at the first anchor, or at a storage in `own`.
        """
        seen = set(own)
        waiting = list(kept)
        found = 0
        while waiting:
            storage = waiting.pop()
            if storage in seen:
                continue
            seen.add(storage)
            if storage in self._anchors:
                found += self._anchors[storage]
            else:
                waiting.extend(self._sources.get(storage, ()))
        return found


def _storage(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage, which views of it share."""
    return tensor.untyped_storage()._cdata


class FusedAttention(TorchFunctionMode):
    """A context in which torch's attention keeps only what its fused kernels keep.

    On the meta device torch would choose the attention that keeps all attention weights; on CPU and
    GPU it chooses one that does not.
    """

    def __init__(self, origins: _Origins | None = None):
        super().__init__()
        self._origins = _Origins() if origins is None else origins

    @property
    def has_run(self) -> bool:
        """Whether torch's own attention has run."""
        return self._origins.fused

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch_functional.scaled_dot_product_attention:
            query, key, value, *rest = args
            mask = rest[0] if rest else kwargs.get("attn_mask")
            out = _KeepsInputs.apply(query, key, value, mask, self._origins)
            self._origins.keep(query, key, value, out)
            self._origins.note_fused()
            return out
        return func(*args, **kwargs)


class _KeepsInputs(torch.autograd.Function):
    """Computes no attention, and keeps what fused kernels keep: inputs, output and sums."""

    @staticmethod
    def forward(  # a Function takes its tensors one by one
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        origins: _Origins,
    ) -> torch.Tensor:
        """Returns an output [rows, heads, tokens, width] without computed values."""
        rows, heads, tokens, _ = query.shape
        # In the output of fused kernels, tokens come before heads.
        out = query.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        origins.keep(log_sums)
        # A boolean mask is converted to numbers, which are kept.
        extra = [] if mask is None else [mask.to(query.dtype)]
        ctx.save_for_backward(query, key, value, out, log_sums, *extra)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Returns gradients without computed values, and makes what kernels work in: an fp32 sum
        for the gradient of the queries and, where queries share keys, gradients of the keys and
        values of each query. `gradient` [rows, heads, tokens, width] is that of the output.
        """
        query, key, value = ctx.saved_tensors[:3]
        work = [torch.empty_like(query, dtype=torch.float32)]
        if key.shape[1] < query.shape[1]:
            work += [gradient.new_empty(query.shape) for _ in range(2)]
        found = [torch.empty_like(each) for each in (query, key, value)]
        del work
        return *found, None, None
