"""Muon orthogonalizes the updates of parameters of two dimensions in blocks, which must each be the
matrix of a linear map. Parameters with other meanings may have two dimensions, too: one row a head
or an expert, or the weights of all experts one below the other.
"""

from __future__ import annotations

from torch import nn

from engine.config.optimizers import is_matrix_of_block
from engine.model.build.library import family_of
from engine.model.build.units import StreamedModel
from engine.model.lora.lora_layer import Factor
from engine.planning.layout.optimizer_states import unit_kind

_ROUTERS = ("TopKRouter", "TopkRouter", "HashRouter")
"""Names of classes end so whose `weight` [experts, features] is that of a linear map."""


def non_linear_matrix(model: StreamedModel) -> str:
    """Returns the full name of a trained parameter of a block that has two dimensions and is
    neither the weight of a linear layer nor a factor of the adapter of one, "" if there is none.
    """
    linear = (nn.Linear, family_of(model.config.model_type).transposed)
    for unit in model.blocks:
        assert unit.block is not None  # every block has a module
        for spec, _ in unit.layout.trained:
            is_matrix = is_matrix_of_block(spec.shape, unit_kind(unit.name))
            if is_matrix and not _is_linear(unit.block, spec.name, linear):
                return spec.full_name
    return ""


def _is_linear(block: nn.Module, name: str, linear: tuple[type[nn.Module], ...]) -> bool:
    """Returns whether a parameter of a block is the weight of a linear map."""
    place, _, attribute = name.rpartition(".")
    module = block.get_submodule(place)
    if attribute != "weight":
        return False
    if isinstance(module, Factor):  # those of stacked experts are in another kind of module
        module = block.get_submodule(place.rpartition(".")[0])
    return isinstance(module, linear) or type(module).__name__.endswith(_ROUTERS)
