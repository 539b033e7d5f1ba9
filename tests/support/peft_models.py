"""Models of PEFT that begin with the weights of a streamed model, adapters included."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from engine.config.adapters import Adapters
from engine.model.build.units import StreamedModel
from tests.support.tiny import Streamed

ADAPTERS = Adapters(rank=4, alpha=6.0)
PREFIX = "base_model.model."


def adapted_layers(model: StreamedModel) -> list[str]:
    """The full names of the layers that have an adapter."""
    end = ".lora_A.weight"
    specs = [spec for layout in model.layouts for spec in layout.parameters]
    names = [spec.full_name for spec in specs if not spec.experts]
    return [name.removesuffix(end) for name in names if name.endswith(end)]


def in_peft(plain: torch.nn.Module, model: StreamedModel, adapters: Adapters) -> PeftModel:
    """The plain model with the same adapters, none of them zero."""
    config = LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha,
        lora_dropout=adapters.dropout,
        use_rslora=adapters.rslora,
        target_modules=adapted_layers(model),
        target_parameters=list(adapters.target_parameters) or None,
        modules_to_save=list(adapters.save_modules) or None,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = get_peft_model(plain, config)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return found


def trained_of(peft: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that PEFT trains, by the names that a streamed model gives them."""
    found = {}
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad:
            plain = name.removeprefix(PREFIX)
            found[plain.replace(".default", "").replace(".modules_to_save", "")] = parameter
    return found


def take_adapters(run: Streamed, peft: Any) -> None:
    """Makes the streamed adapters equal to those of PEFT."""
    trained = trained_of(peft)
    for unit in run.model.units:
        for spec in unit.layout.parameters:
            if spec.adapter:
                run.host_states.write(unit.name, spec.name, trained[spec.full_name])
