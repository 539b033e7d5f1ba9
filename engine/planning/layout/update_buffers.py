"""An update buffer holds a chunk of every plane of a unit, while the device updates it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from engine.config.optimizers import BLOCK, OPTIMIZERS, Optimizer
from engine.planning.layout.layout import PLANE_ITEM_BYTES, planes_of
from engine.planning.layout.optimizer_states import StateCounts

SMALL_CHUNK = 1 << 25
"""Approximate limit on the elements of a small chunk, whose copy to the device takes some
milliseconds.
"""


@dataclass(frozen=True)
class UpdateBuffer:
    """Sizes of the update buffers of one model."""

    numel: int
    """Most elements of a chunk."""
    planes: tuple[tuple[str, int], ...]
    """Bytes of each plane in a buffer, by name. The planes follow each other."""

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.planes)

    @property
    def without_gradients(self) -> UpdateBuffer:
        """The buffer of a plan that keeps gradients on the GPU: they are read where they wait."""
        planes = tuple(each for each in self.planes if each[0] != "grad")
        return replace(self, planes=planes)

    @classmethod
    def of(
        cls,
        dtype: str,
        optimizer: Optimizer,
        units: Collection[StateCounts],
        largest: int,
        chunks: int = 1,
    ) -> UpdateBuffer:
        """Returns the buffer that holds any chunk of `units`. largest: the number of elements of
        the largest block, which is cut into `chunks` equal chunks.
        """
        numel = -(-largest // chunks)
        # No chunk ends within a block of codes, whether there are any or not.
        grain = BLOCK if chunks > 1 else OPTIMIZERS[optimizer].grain or 1
        numel = -(-numel // grain) * grain
        sizes = {plane: numel * each for plane, each in PLANE_ITEM_BYTES[dtype].items()}
        for counts in units:
            for state, nbytes in counts.most_bytes(optimizer, numel).items():
                sizes[state] = max(sizes.get(state, 0), _aligned(nbytes))
        return cls(numel, tuple((plane, sizes[plane]) for plane in planes_of(dtype, optimizer)))


def small_chunks(largest: int) -> int:
    """Returns how many small chunks a block of `largest` elements is cut into."""
    return max(1, -(-largest // SMALL_CHUNK))


def _aligned(size: int) -> int:
    """Returns `size` rounded up, so that the plane after it begins at an address that kernels can
    read any number from.
    """
    return -(-size // 16) * 16
