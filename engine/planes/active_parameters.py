"""How many parameters of a model a token passes through is counted here, in forward and in backward.
No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from engine.planes.layout import ParameterSpec, UnitLayout


def active_parameters(config: Any, layouts: Sequence[UnitLayout]) -> int:
    """Counts the parameters that one token passes through. `config` is that of the model.

    Expert stacks (one row per expert, with three dimensions, or biases of such stacks) count only
    for the experts that a token uses; all other parameters count fully.
    """
    return _active(config, (spec for layout in layouts for spec in layout.parameters))


def work_parameters(config: Any, layouts: Sequence[UnitLayout]) -> int:
    """Returns a third of the parameters that a token passes through in three ways: in forward, in
    backward to the inputs of units, down to the first unit with a parameter that is trained, and in
    backward to the parameters that are trained.
    """
    first = next(at for at, layout in enumerate(layouts) if layout.trained)
    forward, inputs = (active_parameters(config, each) for each in (layouts, layouts[first:]))
    trained = _active(config, (spec for layout in layouts for spec, _ in layout.trained))
    return (forward + inputs + trained) // 3


def _active(config: Any, specs: Iterable[ParameterSpec]) -> int:
    experts, chosen = routed_experts(config.get_text_config())
    total = 0
    for spec in specs:
        is_stacked = len(spec.shape) == 3 or re.search(r"(^|\.)experts\.\w*bias$", spec.name)
        if experts and is_stacked and spec.shape[0] == experts:
            total += spec.numel * chosen // experts
        else:
            total += spec.numel
    return total


def routed_experts(text_config: Any) -> tuple[int, int]:
    """Returns the number of experts in a block, and the number to which a token is routed.

    Both are 0 for a dense model.
    """
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = getattr(text_config, name, None)
        if experts:
            chosen = getattr(text_config, "num_experts_per_tok", None)
            chosen = chosen or getattr(text_config, "top_k_experts", None)
            return experts, chosen or experts
    return 0, 0
