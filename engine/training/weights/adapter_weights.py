"""First weights of adapters, random or from a folder that PEFT or an export has written, and
adapters merged into the weights of their layers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.config.adapters import TARGET_PARAMETERS
from engine.errors import ModelError
from engine.model.build.units import StreamedModel, Unit
from engine.model.lora.lora_layer import merged_weight
from engine.model.lora.parametrized import merged_stack, stack_adapters
from engine.model.lora.peft_folder import WEIGHTS, PeftFolder, peft_key
from engine.model.lora.targets import is_named
from engine.planning.layout.adapter_layout import FACTORS
from engine.planning.layout.layout import ParameterSpec
from engine.runtime.host.host_states import HostStates


def initialize_adapters(model: StreamedModel, states: HostStates, seed: int) -> None:
    """Writes the weights with which PEFT begins: `lora_A` is uniform within a bound that depends on
    the features of its layer, and `lora_B` is zero, so that an adapter adds nothing at first. Each
    depends on the seed and its own name alone. Does nothing for a model without adapters.
    """
    for unit, spec in _adapters(model):
        values = torch.zeros(spec.shape)
        if spec.name.endswith(".lora_A.weight"):
            digest = hashlib.sha256(f"{seed} {spec.full_name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            bound = 1.0 / math.sqrt(spec.shape[1])
            values.uniform_(-bound, bound, generator=generator)
        states.parameters.write(unit.name, spec.name, values)


def _adapters(model: StreamedModel) -> Iterator[tuple[Unit, ParameterSpec]]:
    for unit in model.units:
        for spec in unit.layout.parameters:
            if spec.adapter:
                yield unit, spec


def load_adapters(folder: PeftFolder, model: StreamedModel, states: HostStates) -> None:
    """Loads the adapters in `folder`, and the modules that were trained as a whole beside them.
    Raises ModelError where they are not those of this model and these settings.
    """
    wanted = {
        peft_key(spec.full_name): (unit.name, spec)
        for unit in model.units
        for spec in unit.layout.parameters
        if not spec.frozen
    }
    _compare_stacks(folder, model)
    file = folder.path / WEIGHTS
    try:
        with safe_open(file, framework="pt") as content:
            there = set(content.keys())
            _compare(file, there, set(wanted))
            for key, (unit, spec) in wanted.items():
                found = content.get_tensor(key)
                if tuple(found.shape) != spec.shape:
                    raise ModelError(
                        f"model.start_from: {key} of {file} has the shape {tuple(found.shape)}, "
                        f"and this model needs {spec.shape}; the adapter is of another base model."
                    )
                states.parameters.write(unit, spec.name, found)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model.start_from: {file} cannot be read ({error}).") from None


def _compare_stacks(folder: PeftFolder, model: StreamedModel) -> None:
    """Raises ModelError where adapters of stacked experts belong to other parameters: their names
    show in which order PEFT took these, and not which they are.
    """
    there = folder.settings.get("target_parameters") or []
    own = stacks_of(model)
    fitting = [(name, target) for name in own for target in there if is_named(name, target)]
    if {name for name, _ in fitting} != set(own) or {name for _, name in fitting} != set(there):
        text = json.dumps(sorted(there))
        raise ModelError(
            f"model.start_from: target_parameters of the adapter in {folder.path} is {text}, and "
            f"other stacked experts are trained here; set {TARGET_PARAMETERS} to {text}."
        )


def stacks_of(model: StreamedModel) -> list[str]:
    """Returns the full names of the parameters that have adapters of their own."""
    found = []
    for unit in model.blocks:
        assert unit.block is not None  # every block has a module
        own = stack_adapters(unit.block)
        found += [spec.full_name for spec in unit.layout.parameters if spec.name in own]
    return found


def _compare(file: Path, there: set[str], wanted: set[str]) -> None:
    """Raises ModelError where a file has other adapters than are trained."""
    lacking, more = sorted(wanted - there), sorted(there - wanted)
    if lacking:
        raise ModelError(
            f"model.start_from: {file} lacks {lacking[0]}; it is of another base model, or of "
            "other layers: set train.lora_targets to those of its adapter_config.json."
        )
    if more:
        raise ModelError(
            f"model.start_from: {file} has {more[0]}, which is not trained here; it is of another "
            "base model, or of other layers: set train.lora_targets to those of its "
            "adapter_config.json."
        )


def merged(states: HostStates, unit: Unit, spec: ParameterSpec) -> torch.Tensor | None:
    """Returns a parameter with its adapter merged, in fp32 and in its own shape; None where neither
    its layer nor the parameter itself has one. The sum is computed in fp32, from the masters.
    """
    stacks = {} if unit.block is None else stack_adapters(unit.block)
    if spec.name in stacks:
        module, place = stacks[spec.name]
        factors = [states.parameters.master(unit.name, f"{place}{each}.weight") for each in FACTORS]
        weight = states.parameters.master(unit.name, spec.name)
        name = spec.name.rpartition(".")[2]
        return merged_stack(module, name, weight, (factors[0], factors[1]))
    owner, _, attribute = spec.name.rpartition(".")
    name = f"{owner}.lora_A.weight"
    if attribute != "weight" or not any(each.name == name for each in unit.layout.parameters):
        return None
    assert unit.block is not None  # adapters are in blocks
    factors = [states.parameters.master(unit.name, f"{owner}.{each}.weight") for each in FACTORS]
    layer = unit.block.get_submodule(owner)
    return merged_weight(
        layer, states.parameters.master(unit.name, spec.name), (factors[0], factors[1])
    )
