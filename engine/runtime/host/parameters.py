"""Weights of host states as tensors, parameter by parameter: who loads, initializes or exports a
model needs no planes.

The fp32 master of a weight is split into its two planes when it is written, and joined when it is
read. The split rounds ties away from zero: the remainder is then -32,768, which int16 holds.
`engine.runtime.optimizer.host_kernels` says what becomes of NaNs and the largest values.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from engine.errors import ModelError
from engine.planning.layout.layout import ParameterSpec, UnitLayout
from engine.runtime.host.device_planes import DevicePlanes
from engine.runtime.host.placement import PlanePlacement
from engine.runtime.optimizer.fp32_chunks import fp32_chunks
from engine.runtime.optimizer.host_kernels import kernel
from engine.runtime.optimizer.host_threads import Workers, ranges


class Parameters:
    """Reads and writes the weight planes that `placement` has, each parameter by the name of its
    unit and its own name in the unit. `workers` split and join masters.
    """

    def __init__(
        self,
        layouts: Mapping[str, UnitLayout],
        dtype: str,
        placement: PlanePlacement,
        workers: Workers,
    ):
        self._layouts = layouts
        self._dtype = dtype
        self._placement = placement
        self._workers = workers
        self._places: dict[tuple[str, str], tuple[int, ParameterSpec]] = {}
        for unit, layout in layouts.items():
            for spec, offset in zip(layout.parameters, layout.offsets):
                self._places[unit, spec.name] = (offset, spec)

    def weight(self, unit: str, name: str) -> torch.Tensor:
        """Returns a parameter's weight_high in the parameter's own shape, in host memory: a view of
        the plane, or a copy if it is not whole in this node's RAM.
        """
        view, place = self.view(unit, name), self._placement.of(unit, "weight_high")
        if isinstance(place, DevicePlanes):
            return place.on_host(view)
        if self._placement.is_in_ram(unit, "weight_high"):
            return view
        begin = int(view.storage_offset()) * view.itemsize
        end = begin + view.numel() * view.itemsize
        content = place.read((unit, "weight_high"), begin, end)
        return torch.from_numpy(content).view(view.dtype).view(view.shape)

    def view(self, unit: str, name: str) -> torch.Tensor:
        """Returns a parameter's weight_high in the parameter's own shape, sharing memory."""
        offset, spec = self._places[unit, name]
        plane = self._placement.tensors()[unit, "weight_high"]
        return plane[offset : offset + spec.numel].view(spec.shape)

    def write(
        self, unit: str, name: str, tensor: torch.Tensor, buffer: torch.Tensor | None = None
    ) -> None:
        """Sets a parameter from a float tensor of its shape, on any device. Who writes many tensors
        gives them one `buffer` for chunks (`engine.runtime.optimizer.fp32_chunks`).

        Values of fp32 are kept exactly in both modes, except for the two kinds that
        `engine.runtime.optimizer.host_kernels` names; fp64 is rounded to fp32. A NaN or an infinity
        is also one in weight_high, where a sum over the plane reveals it. Raises ModelError for a
        wrong shape or type: not float, or in 8 bits without scales.
        """
        offset, spec = self._places[unit, name]
        if tuple(tensor.shape) != spec.shape:
            raise ModelError(
                f"{spec.full_name} has the shape {tuple(tensor.shape)} in the weights but "
                f"{spec.shape} in the model; use the configuration that belongs to these weights."
            )
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ModelError(
                f"{spec.full_name} is stored as {str(tensor.dtype).removeprefix('torch.')}, which "
                "is no floating-point type of 16 bits or more; use weights that are not quantized."
            )
        source = tensor.detach()
        if self._is_high_only(unit, offset):
            self._put_high(unit, offset, source, buffer)
        elif not self._placement.is_in_ram(unit, "weight_high"):
            self._put_split(unit, offset, source, buffer)
        elif self._dtype == "float32":
            self.view(unit, name).copy_(source)
        elif source.dtype == torch.bfloat16:
            # A bf16 value needs no rounding, so its remainder in weight_low is 0.
            self.view(unit, name).copy_(source)
            low = self._placement.tensors()[unit, "weight_low"]
            low[offset : offset + spec.numel].zero_()
        else:
            for chunk in fp32_chunks(source, buffer):
                self._split(unit, chunk.numpy(), offset)
                offset += chunk.numel()

    def _is_high_only(self, unit: str, offset: int) -> bool:
        """Returns whether the element `offset` of a unit is in the plane weight_high alone."""
        return offset >= self._layouts[unit].numel

    def _put_high(
        self, unit: str, offset: int, source: torch.Tensor, buffer: torch.Tensor | None
    ) -> None:
        """Sets weights that are not trained, from an element on. Torch rounds ties to even."""
        dtype = torch.bfloat16 if self._dtype == "bfloat16" else torch.float32
        for chunk in fp32_chunks(source, buffer):
            content = chunk.to(dtype).view(torch.uint8).numpy()
            self._put(unit, "weight_high", offset * dtype.itemsize, content)
            offset += chunk.numel()

    def _put_split(
        self, unit: str, offset: int, source: torch.Tensor, buffer: torch.Tensor | None
    ) -> None:
        """Sets the weights of a unit that lives on the device, or is on several nodes, from element
        `offset` on.
        """
        for chunk in fp32_chunks(source, buffer):
            values = chunk.numpy()
            if self._dtype == "float32":
                self._put(unit, "weight_high", 4 * offset, values.view(np.uint8))
            else:
                high, low = np.empty(values.size, np.uint16), np.empty(values.size, np.int16)
                self._split_into(values, high, low)
                self._put(unit, "weight_high", 2 * offset, high.view(np.uint8))
                self._put(unit, "weight_low", 2 * offset, low.view(np.uint8))
            offset += values.size

    def _split(self, unit: str, values: np.ndarray, offset: int) -> None:
        """Splits fp32 `values` [n] into the weight planes of `unit`, from element `offset` on."""
        here = slice(offset, offset + values.size)
        arrays = self._placement.ram.arrays
        high, low = arrays[unit, "weight_high"], arrays[unit, "weight_low"]
        self._split_into(values, high[here], low[here])

    def _split_into(self, values: np.ndarray, high: np.ndarray, low: np.ndarray) -> None:
        split = kernel("split")

        def split_range(start: int, stop: int) -> None:
            split(values[start:stop], high[start:stop], low[start:stop])

        self._workers.run(split_range, ranges(0, values.size))

    def master(self, unit: str, name: str) -> torch.Tensor:
        """Returns a copy of a parameter's fp32 master in the parameter's own shape. That of a
        parameter that is not trained is its value in weight_high.
        """
        offset, spec = self._places[unit, name]
        if self._dtype == "float32" or self._is_high_only(unit, offset):
            return self.weight(unit, name).to(torch.float32, copy=True)
        result = torch.empty(spec.shape, dtype=torch.float32)
        begin, end = 2 * offset, 2 * (offset + spec.numel)
        high = self._content(unit, "weight_high", begin, end).view(np.uint16)
        low = self._content(unit, "weight_low", begin, end).view(np.int16)
        target = result.view(-1).numpy()
        join = kernel("join")

        def join_range(start: int, stop: int) -> None:
            join(high[start:stop], low[start:stop], target[start:stop])

        self._workers.run(join_range, ranges(0, spec.numel))
        return result

    def _content(self, unit: str, plane: str, begin: int, end: int) -> np.ndarray:
        return self._placement.of(unit, plane).read((unit, plane), begin, end)

    def _put(self, unit: str, plane: str, begin: int, content: np.ndarray) -> None:
        self._placement.of(unit, plane).write((unit, plane), begin, content)
