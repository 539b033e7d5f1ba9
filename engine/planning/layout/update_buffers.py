"""An update buffer holds a chunk of every plane of a unit, while the device updates it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from engine.config.settings import Optimizer
from engine.planning.layout.layout import PLANE_ITEM_BYTES
from engine.planning.layout.moments import BLOCK, FP32_MOMENTS, MOMENTS, MomentCounts

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

    has_fp32_moments: bool = True

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
        units: Collection[MomentCounts],
        largest: int,
        chunks: int = 1,
    ) -> UpdateBuffer:
        """Returns the buffer that holds any chunk of `units`. largest: the number of elements of
        the largest block, which is cut into `chunks` equal chunks.
        """
        numel = -(-largest // chunks)
        if chunks > 1 or optimizer == "adamw_8bit":  # no chunk ends within a block of codes
            numel = -(-numel // BLOCK) * BLOCK
        moment = max(counts.most_bytes(optimizer, numel) for counts in units)
        sizes = {plane: item * numel for plane, item in PLANE_ITEM_BYTES[dtype].items()}
        sizes |= dict.fromkeys(MOMENTS, _aligned(moment))
        return cls(numel, tuple(sizes.items()), has_fp32_moments=optimizer == FP32_MOMENTS)


def small_chunks(largest: int) -> int:
    """Returns how many small chunks a block of `largest` elements is cut into."""
    return max(1, -(-largest // SMALL_CHUNK))


def _aligned(size: int) -> int:
    """Returns `size` rounded up, so that the plane after it begins at an address that kernels can
    read any number from.
    """
    return -(-size // 16) * 16
