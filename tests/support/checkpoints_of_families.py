"""Tiny checkpoints of any family, as transformers writes them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine.config.settings import ModelConfig
from engine.model.build.build import build_model
from engine.model.build.library import no_progress_bars
from engine.model.build.units import StreamedModel
from tests.support.families import tiny_family_config
from tests.support.tiny import plain_model


def kept_in_fp32(model: StreamedModel) -> set[str]:
    """Returns the full names of the parameters that stay in fp32 in a bf16 model."""
    return {
        spec.full_name
        for layout in model.layouts
        for spec in layout.parameters
        if spec.keep_in_fp32
    }


def bf16_model(source: object, config, attention: str = "auto") -> StreamedModel:
    """Returns the streamed model of a configuration, which computes in bf16."""
    chosen = ModelConfig(source=str(source), dtype="bfloat16", attention=attention)
    return build_model(config, chosen)


def save_family(
    folder: Path, family: str, stored: torch.dtype = torch.float32, bias: float = 0.0
) -> Path:
    """Saves a tiny random model of the family in the dtype `stored`, and returns its folder.

    The persistent buffers, such as the bias by which a router's choices are corrected, are random
    around `bias`. Weights are of full precision.
    """
    plain = plain_model(tiny_family_config(family)).eval()
    saved = plain.state_dict()
    with torch.no_grad():
        for name, buffer in plain.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.copy_(bias + 0.2 * torch.randn_like(buffer))
    with no_progress_bars():
        plain.to(stored).save_pretrained(folder)
    return folder


def round_to_bf16(folder: Path, kept: set[str]) -> torch.nn.Module:
    """Rounds the weights in `folder` to bf16, but for those that stay in fp32 (`kept`, by full
    name). Returns what plain transformers reads from it in fp32.

    They are then the same numbers for us and for transformers, which rounds the ties of other
    weights in another way.
    """
    plain = load_plain(folder, torch.float32)
    with torch.no_grad(), no_progress_bars():
        for name, parameter in plain.named_parameters():
            if name not in kept:
                parameter.copy_(parameter.bfloat16())
        plain.save_pretrained(folder)
    return plain


def load_plain(folder: Path, dtype: torch.dtype, **how) -> torch.nn.Module:
    """Returns what plain transformers reads from a folder, in `dtype`."""
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how)
    return model.eval()
