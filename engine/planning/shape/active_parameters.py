"""The parameters of a model that a token passes through are counted here, in forward and in
backward, and the FLOPs that this takes. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from engine.planning.layout.layout import ParameterSpec, UnitLayout


def active_parameters(
    config: Any, layouts: Sequence[UnitLayout], again: Iterable[ParameterSpec] = ()
) -> int:
    """Counts the parameters that one token passes through. `config` is that of the model. again: a
    token passes through these once more, since several blocks share them.

    Expert stacks (one row per expert, with three dimensions, or biases of such stacks) count only
    for the experts that a token uses; all other parameters count fully.
    """
    specs = [spec for layout in layouts for spec in layout.parameters]
    return _active(config, [*specs, *again])


def work_parameters(config: Any, layouts: Sequence[UnitLayout], tied: bool) -> int:
    """Returns a third of the parameters that a token passes through in three ways: in forward, in
    backward to the inputs of units, down to the first unit with a parameter that is trained, and in
    backward to the parameters that are trained. A tied head is the table of the embedding.
    """
    first = next(at for at, layout in enumerate(layouts) if layout.trained)
    above = [*layouts[:1], *layouts[first:]] if tied and first else layouts[first:]
    forward, inputs = (active_parameters(config, each) for each in (layouts, above))
    trained = _active(config, (spec for layout in layouts for spec, _ in layout.trained))
    return (forward + inputs + trained) // 3


def _active(config: Any, specs: Iterable[ParameterSpec]) -> int:
    experts, chosen = routed_experts(config.get_text_config())
    total = 0
    for spec in specs:
        is_stacked = len(spec.shape) == 3 or re.search(r"(^|\.)experts\.\w*bias$", spec.name)
        if experts and (spec.experts or (is_stacked and spec.shape[0] == experts)):
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


# ---------------------------------------------------------------------- FLOPs

_WHOLE = "6 x parameters that a token passes through x tokens"
_PARTS = (
    "2 x (parameters that a token passes through in forward + those down to the first trained one "
    "+ those that are trained) x tokens"
)


def planned_flops_formula(is_whole: bool) -> str:
    """Returns the formula that is shown with a planned step. is_whole: the whole model is
    trained.
    """
    return f"{_WHOLE if is_whole else _PARTS} of full rows; recompute not counted"


def measured_flops_formula(is_whole: bool) -> str:
    """Returns the formula that is shown with the measured rate of a step."""
    return f"{_WHOLE if is_whole else _PARTS} (padding and recompute not counted) / seconds"


def parameter_flops(active_parameters: int, tokens: int) -> int:
    """Returns the FLOPs of forward and backward on `tokens` tokens, by the formula shown. Where
    parts are trained, these are the parameters of a model that takes as many FLOPs.
    """
    return 6 * active_parameters * tokens
