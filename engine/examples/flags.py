"""A turn may say whether it is trained: `weight` of OpenAI, `train` of axolotl, `loss_weight` of
LLaMA-Factory. Such keys are read here and never reach a chat template.
"""

from __future__ import annotations

from typing import Any

from engine.errors import DataError
from engine.examples.values import is_blank, shown

_FLAGS = ("weight", "loss_weight", "train", "training")
_DETAILS = ("train_detail", "training_detail")


def take_flags(keys: dict[str, Any], is_answer: bool, place: str) -> bool:
    """Removes from the keys of a turn those that say whether it is trained, and returns what they
    say: true if there are none. Raises DataError for what cannot be done: a part of a turn, half a
    weight, or a question that is trained.
    """
    for key in _DETAILS:
        if not is_blank(keys.pop(key, None)):
            raise DataError(
                f"The {key} of {place} trains a part of the turn, but only whole answers are "
                "trained; divide the turn, or give the row as segments of {label, text}."
            )
    said = {key: keys.pop(key) for key in _FLAGS if key in keys}
    values = {key: _is_trained(value, key, place) for key, value in said.items()}
    if len(set(values.values())) > 1:
        raise DataError(
            f"The keys {' and '.join(values)} of {place} say different things; keep one of them."
        )
    for key, is_trained in values.items():
        if is_trained and not is_answer:
            raise DataError(
                f"The {key} of {place} asks to train a turn that is not an answer, but only "
                "answers are trained; set it to 0, or give the row as segments of {label, text}."
            )
    return all(values.values())


def _is_trained(value: Any, key: str, place: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise DataError(
        f"The {key} of {place} is {shown(value)}; an answer is trained or not, so write 1 or 0."
    )
