"""What attention returned in a block's forward is returned again while the block is recomputed.

For its backward, torch's fused attention needs queries, keys and values, its output and its
log-sums. A recompute makes the first three anew. The other two are kept in a room on the device,
from which they are sent to the host, so the kernel does not run again: backward has the bits of
forward, and takes the time of one more attention less.

Both classes work below autograd, where the kernels are called: autograd records the call as it
always does, and gets the same tensors as results, wherever they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.tiles.attention_room import aligned


class _Kernel(NamedTuple):
    """A `_Kernel` returns an output and log-sums first, and then what is small. These arguments of
    it have the given places.
    """

    dropout: int | None
    asked: int | None = None
    """It returns log-sums only if this argument is true, as it is where autograd records."""


KERNELS: Mapping[str, _Kernel] = {
    "aten::_scaled_dot_product_flash_attention": _Kernel(3),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Kernel(3),
    "aten::_scaled_dot_product_efficient_attention": _Kernel(5, 4),
    "aten::_scaled_dot_product_cudnn_attention": _Kernel(5, 4),
    "torch_attn::_varlen_attn": _Kernel(None),
}
"""The results of these kernels are kept. With dropout they are not: a recompute would draw fewer
random numbers than the forward has drawn.
"""


class _Piece(NamedTuple):
    """A tensor of this form begins at the byte `start` of a room."""

    start: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    def of(self, room: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, of its shape, in a `room`, uint8 [bytes]."""
        nbytes = self.shape.numel() * self.dtype.itemsize
        flat = room[self.start : self.start + nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class KeptCall:
    """A `KeptCall` is a call of a kernel whose results are kept."""

    kernel: Any
    pieces: Sequence[_Piece]
    """They hold the output and the log-sums."""
    others: Sequence[Any]
    """These are the other results: small tensors, numbers, or nothing."""


KeptCalls = Sequence[KeptCall | None]
"""These are the calls of kernels in a block, in order; None where the results are not kept."""


class KeepsAttention(TorchDispatchMode):
    """While it is active, a `KeepsAttention` copies what kernels return into `room`, uint8
    [bytes].
    """

    def __init__(self, room: torch.Tensor):
        super().__init__()
        self._room = room
        self._used = 0
        self.calls: list[KeptCall | None] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, kernel = kwargs or {}, KERNELS.get(func.name())
        if kernel is None:
            return func(*args, **kwargs)
        if kernel.asked is not None:
            args = (*args[: kernel.asked], True, *args[kernel.asked + 1 :])
        out = func(*args, **kwargs)
        draws = kernel.dropout is not None and _dropout(kernel.dropout, args, kwargs) > 0
        self.calls.append(None if draws else self._kept(func, out))
        return out

    def _kept(self, func: Any, out: Sequence[Any]) -> KeptCall | None:
        """Copies output and log-sums into the room; returns None where that is not possible."""
        pieces, stop = [], self._used
        for tensor in out[:2]:
            start = stop
            stop = start + aligned(tensor.numel() * tensor.element_size())
            pieces.append(_Piece(start, tensor.dtype, tensor.shape, tensor.stride()))
        if stop > len(self._room) or not all(map(_is_dense, out[:2])):
            return None
        for piece, tensor in zip(pieces, out[:2], strict=True):
            piece.of(self._room).copy_(tensor)
        self._used = stop
        return KeptCall(func, pieces, out[2:])


class ReturnsAttention(TorchDispatchMode):
    """While it is active, a `ReturnsAttention` returns the results of `calls`, whose tensors are in
    `room`, uint8 [bytes], in place of running kernels.
    """

    def __init__(self, room: torch.Tensor, calls: KeptCalls):
        super().__init__()
        self._room = room
        self._calls = iter(calls)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() in KERNELS:
            call = next(self._calls, None)
            if call is not None and call.kernel is func:
                return (*(piece.of(self._room) for piece in call.pieces), *call.others)
        return func(*args, **(kwargs or {}))


def _dropout(place: int, args: tuple, kwargs: Mapping[str, Any]) -> float:
    """Returns how likely a kernel drops a weight."""
    return args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tells whether the elements of `tensor`, of any shape, fill a part of memory without gaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0
