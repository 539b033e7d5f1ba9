"""Folders of models whose weights are quantized, in the files' form of their publishers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_MOST = 448.0
"""The largest number of float8_e4m3fn."""


def quantize_to_fp8(
    folder: Path, block: tuple[int, int] | None = (16, 16)
) -> dict[str, torch.Tensor]:
    """Quantizes the matrices in the blocks of the model in `folder`, as DeepSeek V3 is published:
    so many rows and columns share a scale, or all where `block` is None. Returns what it wrote.
    """
    stored = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_linear = tensor.ndim == 2 and name.endswith("_proj.weight")
        stored |= fp8_of(name, tensor.float(), block) if is_linear else {name: tensor}
    how: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    write_quantized(folder, stored, how | {"weight_block_size": block})
    return stored


def fp8_of(
    name: str, weight: torch.Tensor, block: tuple[int, int] | None
) -> dict[str, torch.Tensor]:
    """Returns a weight [rows, columns] in fp8 and its scales, one for each block."""
    rows, columns = weight.shape
    tall, wide = block or (rows, columns)
    grid = -(-rows // tall), -(-columns // wide)
    scales = torch.empty(grid)
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for down in range(grid[0]):
        for right in range(grid[1]):
            here = (
                slice(down * tall, (down + 1) * tall),
                slice(right * wide, (right + 1) * wide),
            )
            scales[down, right] = weight[here].abs().max() / _MOST
            numbers[here] = (weight[here] / scales[down, right]).to(torch.float8_e4m3fn)
    return {name: numbers, f"{name}_scale_inv": scales if block else scales.view(())}


def quantize_to_mxfp4(folder: Path, seed: int = 5) -> dict[str, torch.Tensor]:
    """Puts random weights in MXFP4 in place of the experts of the gpt_oss in `folder`, and returns
    what it wrote.
    """
    generator = torch.Generator().manual_seed(seed)
    stored = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        experts, features, rows = tensor.shape
        groups = (experts, rows, features // 32)
        stored[f"{name}_blocks"] = torch.randint(
            256, (*groups, 16), generator=generator, dtype=torch.uint8
        )
        stored[f"{name}_scales"] = torch.randint(
            112, 126, groups, generator=generator, dtype=torch.uint8
        )
    write_quantized(folder, stored, {"quant_method": "mxfp4", "modules_to_not_convert": []})
    return stored


def write_quantized(folder: Path, stored: dict[str, torch.Tensor], how: dict[str, Any]) -> None:
    """Writes the tensors, and into the configuration how they are quantized."""
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | {"quantization_config": how}), encoding="utf-8")
