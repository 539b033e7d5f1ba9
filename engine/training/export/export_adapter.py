"""The export of a run with adapters as an adapter alone, in the files that PEFT writes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from engine import safe_files
from engine.config.adapters import Adapters
from engine.model.build.units import TORCH_DTYPES, StreamedModel
from engine.model.lora.peft_folder import (
    CONFIG,
    WEIGHTS,
    Base,
    peft_key,
    peft_settings,
    target_modules,
)
from engine.model.lora.targets import is_named
from engine.paths import resolve_source
from engine.planning.layout.adapter_layout import FACTORS
from engine.runtime.host.host_states import HostStates
from engine.training.weights.adapter_weights import stacks_of


def save_adapter(
    model: StreamedModel, states: HostStates, adapters: Adapters, written: tuple[str, str, Path]
) -> None:
    """Writes the adapter of a model. written: the base model, the dtype of the weights and the
    folder, which is created.
    """
    source, dtype, folder = written
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Tensor] = {}
    for unit in model.units:
        for spec in unit.layout.parameters:
            if not spec.frozen:
                values = (
                    states.parameters.weight if dtype == model.dtype else states.parameters.master
                )
                found = values(unit.name, spec.name).to(TORCH_DTYPES[dtype])
                weights[peft_key(spec.full_name)] = found.contiguous()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    whole = dict(model.skeleton.model.named_modules())
    linear = {
        spec.full_name
        for unit in model.units
        for spec in unit.layout.parameters
        if not spec.experts
    }
    adapted = [name for name in whole if f"{name}.lora_A.weight" in linear]
    others = [name for name in whole if name.rpartition(".")[2] not in FACTORS]
    path = resolve_source(source)
    base = Base(
        source if path is None else str(path),
        target_modules(adapted, others),
        _target_parameters(model, adapters),
        # PEFT would take the end of a name for other modules too, such as norm for input_layernorm.
        _saved(others, adapters),
        bool(adapted) and not any(isinstance(whole[name], nn.Linear) for name in adapted),
    )
    text = json.dumps(peft_settings(adapters, base), indent=2, sort_keys=True)
    safe_files.write_whole(folder / CONFIG, text + "\n", folder, durable=False)


def _target_parameters(model: StreamedModel, adapters: Adapters) -> list[str]:
    """Returns what PEFT calls the stacked experts by, since it knows no patterns."""
    given = adapters.target_parameters
    return stacks_of(model) if any("*" in name for name in given) else list(given)


def _saved(modules: list[str], adapters: Adapters) -> list[str]:
    """Returns the full names of the modules that are trained as a whole."""
    ends = adapters.save_modules
    return [name for name in modules if any(map(partial(is_named, name), ends))]
