"""`DevicePlanes` holds the planes of units that live on the device. Host code reads and writes them
by their bytes, as it does those in RAM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
import torch

from engine.errors import LostPlanesError, first_line
from engine.runtime.host.ram_planes import Key, Wanted


class PlaneDevice(Protocol):
    """Part of a backend that planes on its device need."""

    device: torch.device

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `tensor` on the host, in the same shape. No op may be changing the
        tensor.
        """


class DevicePlanes:
    """Owns flat tensors on one device, by unit and plane."""

    def __init__(self, device: PlaneDevice):
        self._device = device
        self.tensors: dict[Key, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all planes together."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def allocate(self, wanted: Mapping[Key, Wanted]) -> None:
        """Allocates zeroed planes. Raises torch.OutOfMemoryError where the device is full; then
        none is allocated.
        """
        try:
            for key, plane in wanted.items():
                dtype = _dtype_of(plane)
                numel = plane.nbytes // dtype.itemsize
                self.tensors[key] = torch.zeros(numel, dtype=dtype, device=self._device.device)
        except BaseException:
            self.release([key for key in wanted if key in self.tensors])
            raise

    def read(self, key: Key, begin: int, end: int) -> np.ndarray:
        """Returns a copy of the bytes between two places of a plane, uint8 [bytes]. Raises
        LostPlanesError where the device is lost.
        """
        return self.on_host(self.tensors[key].view(torch.uint8)[begin:end]).numpy()

    def write(self, key: Key, begin: int, content: np.ndarray) -> None:
        """Writes `content`, uint8 [bytes], from the byte `begin` of a plane on."""
        part = self.tensors[key].view(torch.uint8)[begin : begin + content.size]
        part.copy_(torch.from_numpy(content))

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the host of `tensor`, a part of a plane, in the same shape. Raises
        LostPlanesError where the device is lost.
        """
        try:
            return self._device.download(tensor)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise LostPlanesError(
                "Weights and moments that lived on the GPU cannot be read any more "
                f"({first_line(error)}); what was saved before counts."
            ) from error

    def release(self, keys: Iterable[Key]) -> None:
        """Lets go of planes. Their memory is freed with the last tensor that shares it."""
        for key in keys:
            del self.tensors[key]


def _dtype_of(plane: Wanted) -> torch.dtype:
    if plane.kind is np.uint16:  # numpy has no bf16
        return torch.bfloat16
    return torch.from_numpy(np.empty(0, plane.kind)).dtype
