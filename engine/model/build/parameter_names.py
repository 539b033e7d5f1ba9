"""A `ParameterNames` knows a module's parameters by name, and which of them AdamW decays."""

from __future__ import annotations

import torch
from torch import nn

from engine.model.build.library import transformers
from engine.planning.layout.layout import ParameterSpec


class ParameterNames:
    """Knows the names of the parameters of a module that computes in `dtype`."""

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        self.dtype = dtype
        self.of: dict[int, list[str]] = {}
        """All names of each parameter, by the parameter's id, the owning name first."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.of.setdefault(id(parameter), []).append(name)
        # Transformers' rule: no weight decay for a LayerNorm, nor for parameters with the name of a
        # bias or a norm.
        spared = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
        find = transformers().trainer_pt_utils.get_parameter_names
        self._decayed = set(find(module, [nn.LayerNorm], spared))

    def spec(self, name: str, full_name: str, parameter: torch.Tensor) -> ParameterSpec:
        """Returns the specification of a parameter, of any shape, with the name `name` in its
        unit.
        """
        # `empty_model` gives fp32 to the parameters that transformers keeps in it.
        keep_in_fp32 = parameter.dtype == torch.float32 and self.dtype != torch.float32
        decays = full_name in self._decayed
        return ParameterSpec(name, full_name, tuple(parameter.shape), decays, keep_in_fp32)
