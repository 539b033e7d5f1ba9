"""Outputs of attention in a block's forward, which are returned again while the block is
recomputed.

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

from engine.planning.shape.saved_attention_sizes import aligned

KERNELS: Mapping[str, int | None] = {
    "aten::_scaled_dot_product_flash_attention": None,
    "aten::_scaled_dot_product_flash_attention_for_cpu": None,
    "aten::_scaled_dot_product_efficient_attention": 4,
    "aten::_scaled_dot_product_cudnn_attention": 4,
    "torch_attn::_varlen_attn": None,
}
"""Kernels whose results are kept. Each returns an output and log-sums first, and then small ones.
Some return log-sums only if the argument at this place is true, as it is where autograd records.
"""


class _Region(NamedTuple):
    """A tensor of this form that begins at the byte `start` of a room."""

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
class SavedCall:
    """A call of a kernel whose results are kept."""

    kernel: Any
    regions: Sequence[_Region]
    """Regions of the output and the log-sums."""
    others: Sequence[Any]
    """The other results: small tensors, numbers, or nothing."""
    random_state: torch.Tensor | None
    """The call left the generator of random numbers in this state, uint8 [bytes]; None if it drew
    none. Dropout behind it must draw the same numbers again.
    """


SavedCalls = Sequence[SavedCall | None]
"""The calls of kernels in a block, in order; None where the results are not kept."""


class SavesAttention(TorchDispatchMode):
    """A copy of what kernels returned while it was active, in `room`, uint8 [bytes]."""

    def __init__(self, room: torch.Tensor):
        super().__init__()
        self._room = room
        self._used = 0
        self.calls: list[SavedCall | None] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.name()
        if name not in KERNELS:
            return func(*args, **kwargs)
        asked = KERNELS[name]
        if asked is not None:
            args = (*args[:asked], True, *args[asked + 1 :])
        generator = _generator(args[0].device)
        before = generator.get_state()
        out = func(*args, **kwargs)
        after = generator.get_state()
        state = None if torch.equal(before, after) else after
        self.calls.append(self._kept(func, out, state))
        return out

    def _kept(
        self, func: Any, out: Sequence[Any], random_state: torch.Tensor | None
    ) -> SavedCall | None:
        """Copies output and log-sums into the room; returns None where that is not possible.
        `random_state` is that of `SavedCall`.
        """
        regions, stop = [], self._used
        for tensor in out[:2]:
            start = stop
            stop = start + aligned(tensor.numel() * tensor.element_size())
            regions.append(_Region(start, tensor.dtype, tensor.shape, tensor.stride()))
        if stop > len(self._room) or not all(map(_is_dense, out[:2])):
            return None
        for region, tensor in zip(regions, out[:2], strict=True):
            region.of(self._room).copy_(tensor)
        self._used = stop
        return SavedCall(func, regions, out[2:], random_state)


class ReplaysAttention(TorchDispatchMode):
    """A context that returns the results of `calls`, whose tensors are in `room`, uint8 [bytes], in
    place of running kernels.
    """

    def __init__(self, room: torch.Tensor, calls: SavedCalls):
        super().__init__()
        self._room = room
        self._calls = iter(calls)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() in KERNELS:
            call = next(self._calls, None)
            if call is not None and call.kernel is func:
                if call.random_state is not None:
                    _generator(args[0].device).set_state(call.random_state)
                return (*(region.of(self._room) for region in call.regions), *call.others)
        return func(*args, **(kwargs or {}))


def _generator(device: torch.device) -> torch.Generator:
    """Returns the generator that a device's kernels draw from. Its state is on the host."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements of `tensor`, of any shape, are dense in memory."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0
