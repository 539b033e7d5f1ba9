"""Folders of models whose weights are as `torch.save` writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def pickle_weights(folder: Path, files: int = 1) -> dict[str, torch.Tensor]:
    """Replaces the safetensors in `folder` by so many files of torch.save, and returns what they
    hold.
    """
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    write_pickled(folder, weights, files)
    return weights


def write_pickled(folder: Path, weights: dict[str, torch.Tensor], files: int = 1) -> None:
    """Writes the weights into so many files of torch.save, the only ones in `folder` then."""
    for file in folder.glob("pytorch_model*"):
        file.unlink()
    if files == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return
    names = sorted(weights)
    places = {}
    for number in range(files):
        file = f"pytorch_model-{number + 1:05d}-of-{files:05d}.bin"
        held = names[number::files]
        torch.save({name: weights[name] for name in held}, folder / file)
        places |= dict.fromkeys(held, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
