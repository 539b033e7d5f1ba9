"""A turn may say how much it counts in training: `weight` of OpenAI, `loss_weight` of
LLaMA-Factory, `train` of axolotl. Such keys are read here and never reach a chat template.
"""

from __future__ import annotations

from typing import Any

from engine.errors import DataError
from engine.examples.values import is_blank, shown

_SWITCHES = ("train", "training")
_WEIGHTS = ("weight", "loss_weight")
_DETAILS = ("train_detail", "training_detail")
_LEAST, _MOST = 1e-6, 1e6
"""Weights other than 0 have these bounds, so that any sum of them keeps its digits in fp32."""


def take_weight(keys: dict[str, Any], is_answer: bool, place: str) -> float:
    """Removes from the keys of a turn those that say how much it counts in training, and returns
    what they say: 0 if it is not trained, and 1 if there are none. Raises DataError for what cannot
    be done: a part of a turn, a weight that is no number from 0 up, or a question that is trained.
    """
    for key in _DETAILS:
        if not is_blank(keys.pop(key, None)):
            raise DataError(
                f"The {key} of {place} trains a part of the turn, but only whole answers are "
                "trained; divide the turn, or give the row as segments of {label, text}."
            )
    said = {key: keys.pop(key) for key in (*_WEIGHTS, *_SWITCHES) if key in keys}
    values = {key: _weight(value, key, place) for key, value in said.items()}
    if len(set(values.values())) > 1:
        raise DataError(
            f"The keys {' and '.join(values)} of {place} say different things; keep one of them."
        )
    for key, weight in values.items():
        if weight and not is_answer:
            raise DataError(
                f"The {key} of {place} asks to train a turn that is not an answer, but only "
                "answers are trained; set it to 0, or give the row as segments of {label, text}."
            )
    return next(iter(values.values()), 1.0)


def _weight(value: Any, key: str, place: str) -> float:
    if isinstance(value, bool | int | float):
        if value in (0, 1):
            return float(value)
        if key in _WEIGHTS and _LEAST <= value <= _MOST:
            return float(value)
    if key in _SWITCHES:
        raise DataError(
            f"The {key} of {place} is {shown(value)}; an answer is trained or not, so write 1 or 0."
        )
    raise DataError(
        f"The {key} of {place} is {shown(value)}; write 0 for an answer that is not trained, 1 for "
        "one that counts like any other, or a number from 0.000001 to 1,000,000 by which its "
        "losses are multiplied."
    )
