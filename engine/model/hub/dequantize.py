"""Quantized weights are dequantized one by one, when the model takes them.

- fp8: each block of a weight has a scale. A value is its fp8 number times that scale, in fp32.
- MXFP4: 32 values in a row share a power of two, and each has 4 bits. A value is the number that
  the bits stand for times that power, which bf16 holds exactly.

The results are those of transformers (`tests/engine/model/hub/test_dequantized.py`), and fill the
masters as weights in fp32 and bf16 do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ModelError
from engine.planning.shape.quantized_weights import Method, Quantized

_SCALE = "_scale_inv"
"""Ending of the names of the scales of a weight in fp8."""
_BLOCKS, _SCALES = "_blocks", "_scales"
"""Endings of the two names under which a weight is stored in MXFP4."""
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CHUNK = 1 << 22
"""Number of values that are dequantized at once, beside the result."""
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers for the low three bits of a value in MXFP4; the fourth is the sign."""
_BIAS = 127
"""Difference between the byte of a scale and its exponent."""


@dataclass(frozen=True)
class QuantizedTensor(ABC):
    """A weight that is made of several tensors that are stored."""

    name: str
    parts: tuple[Any, ...]
    """Slices of safetensors, or tensors of a mapped file."""

    @abstractmethod
    def decoded(self, views: list[torch.Tensor]) -> torch.Tensor:
        """Returns the weight in its own shape, in a floating-point type that holds its values.
        views: the parts, each in its own shape. Raises ModelError for parts of another kind.
        """


@dataclass(frozen=True)
class _Fp8(QuantizedTensor):
    block: tuple[int, int] | None

    def decoded(self, views: list[torch.Tensor]) -> torch.Tensor:
        numbers, scales = views
        rows, columns = numbers.shape[-2:]
        tall, wide = self.block or (rows, columns)
        grid = (-(-rows // tall), -(-columns // wide))
        if numbers.dtype not in _FP8:
            raise _refused(self.name, f"is stored as {_named(numbers.dtype)}")
        if scales.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise _refused(self.name, f"has scales in {_named(scales.dtype)}")
        if scales.numel() != numbers[..., 0, 0].numel() * grid[0] * grid[1]:
            raise _refused(self.name, f"has scales of the shape {tuple(scales.shape)}")
        result = torch.empty(numbers.shape, dtype=torch.float32)
        flat = result.view(-1, rows, columns), numbers.reshape(-1, rows, columns)
        scales = scales.float().reshape(-1, *grid)
        for made, stored, factors in zip(*flat, scales, strict=True):
            for number, of_blocks in enumerate(factors):
                under = slice(number * tall, (number + 1) * tall)
                made[under] = stored[under]
                # The last blocks of a weight may be smaller than the others.
                made[under] *= of_blocks.repeat_interleave(wide)[:columns]
        return result


class _Mxfp4(QuantizedTensor):
    def decoded(self, views: list[torch.Tensor]) -> torch.Tensor:
        pairs, scales = views
        if pairs.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise _refused(self.name, f"is stored as {_named(pairs.dtype)}")
        if pairs.ndim != 4 or pairs.shape[:-1] != scales.shape:
            raise _refused(self.name, f"has scales of the shape {tuple(scales.shape)}")
        experts, rows, groups, size = pairs.shape
        result = torch.empty(experts, rows, groups * size * 2, dtype=torch.bfloat16)
        numbers = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)]).bfloat16()
        # A byte holds two values, the first of them in its low bits.
        low, high = torch.arange(256) & 15, torch.arange(256) >> 4
        table = torch.stack([numbers[low], numbers[high]], 1)
        at_once = max(1, _CHUNK // (groups * size * 2))
        for made, stored, exponents in zip(result, pairs, scales, strict=True):
            for top in range(0, rows, at_once):
                under = slice(top, top + at_once)
                values = table[stored[under].int()].view(-1, groups, size * 2)
                powers = exponents[under].int().sub(_BIAS).unsqueeze(-1)
                made[under] = torch.ldexp(values, powers).flatten(1)
        # In the model, experts are multiplied from the other side.
        return result.transpose(1, 2)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refused(name: str, what: str) -> ModelError:
    return ModelError(
        f"model.source: {name} {what}, which does not belong to the quantization_config of this "
        "model; get the files again, or give the unquantized model."
    )


def with_quantized(stored: Mapping[str, Any], how: Quantized) -> dict[str, Any]:
    """Returns the tensors of a checkpoint by name, with `QuantizedTensor` ones in place of those
    that are quantized and of their scales. `stored` are slices of safetensors, or tensors of mapped
    files.
    """
    found = dict(stored)
    if how.method is Method.FP8:
        for name in stored:
            if name + _SCALE in stored:
                scales = found.pop(name + _SCALE)
                found[name] = _Fp8(name, (found[name], scales), how.block)
        return found
    for blocks in stored:
        name = blocks.removesuffix(_BLOCKS)
        if name != blocks and name + _SCALES in stored:
            scales = found.pop(name + _SCALES)
            found[name] = _Mxfp4(name, (found.pop(blocks), scales))
    return found
