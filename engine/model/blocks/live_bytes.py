"""The bytes of the tensors that exist at once, on any device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.blocks.pytree_paths import tensors_of
from engine.model.blocks.tiled_module import is_tiling

MOST_OPERATIONS = 5_000
"""Number of operations after which counting ends. A block that loops over the tokens of a row has
more.
"""


class LiveBytes(TorchDispatchMode):
    """A context that counts every storage that is made in it, until it is freed. What exists before
    is not counted. Raises RuntimeError after `MOST_OPERATIONS`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outside = 0
        """Largest number of bytes that existed at once while no module ran in sequence chunks."""
        self.inside = 0
        """Largest number of bytes that existed at once while one did."""
        self.now = 0
        """Number of bytes that exist."""
        self._operations = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._operations += 1
        if self._operations > MOST_OPERATIONS:
            raise RuntimeError(f"more than {MOST_OPERATIONS:,} operations")
        out = func(*args, **(kwargs or {}))
        given = {_address(tensor) for tensor in tensors_of([list(args), kwargs or {}])}
        for tensor in tensors_of([out]):
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address not in given and address not in self._live:
                self._live[address] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, address)
        if is_tiling():
            self.inside = max(self.inside, self.now)
        else:
            self.outside = max(self.outside, self.now)
        return out

    def _freed(self, address: int) -> None:
        self.now -= self._live.pop(address)


def _address(tensor: torch.Tensor) -> int:
    """Returns the address of the storage of a tensor of any shape."""
    return tensor.untyped_storage()._cdata
