"""Flags of a row for training: how much a turn counts, or which of its answers are trained.

- OpenAI, Mistral and LLaMA-Factory write weights; ms-swift, axolotl and others write that a turn is
  trained; torchtune and others that it is not. Such keys are read here and never reach a template.
- A list beside the turns has one for each of them, or for each answer.
- `unknown_flags.py` has the keys that may be flags and are in none of these tables.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engine.data.formats.roles import plain_name
from engine.data.formats.values import is_blank, legible, parsed_list, shown, type_text
from engine.errors import DataError

WEIGHTS = ("weight", "loss_weight", "loss_scale")
"""Keys of a number by which the losses of an answer are multiplied."""
ROW_WEIGHTS = (*WEIGHTS, "sample_weight")
"""Columns with the same for a whole row."""
TRAINED = (
    *("train", "training", "trainable", "is_trainable", "train_on_turn", "train_turn"),
    *("loss", "loss_mask", "compute_loss", "calculate_loss", "use_loss"),
)
"""True for an answer that is trained."""
MASKED = ("masked", "is_masked")
"""True for a turn that is not trained; torchtune trains any turn with false."""
UNTRAINED = (
    *MASKED,
    *("mask_loss", "no_loss", "skip_loss", "ignore_loss"),
    *("skip", "skip_training", "no_train", "do_not_train", "dont_train", "untrained"),
    *("ignore", "ignored", "exclude", "excluded", "exclude_from_training", "exclude_from_loss"),
)
"""True for an answer that is not trained."""
DETAILS = ("train_detail", "training_detail", "reasoning_training_detail")
"""Parts of a turn by their characters, as axolotl has them."""
LISTS = (
    *("loss_masks", "loss_weights", "loss_scales", "weights"),
    *("train_mask", "training_mask", "turn_mask", "turn_masks", "answer_mask"),
)
"""Names of lists beside the turns of a row. Such a list, or one with the name of a weight or a
flag, has a number for each turn or for each answer.
"""
LAST_ALONE = (
    *("mask_history", "train_on_last", "train_on_last_turn", "train_last_turn"),
    *("last_turn_only", "only_last_turn", "train_last_only"),
)
"""True for a row of which the last answer alone is trained."""
ANSWER_FLAGS = frozenset((*WEIGHTS, *TRAINED, *UNTRAINED, *LISTS, *LAST_ALONE))
"""Columns that may select which answers of their rows are trained."""
KNOWN = frozenset((*WEIGHTS, *TRAINED, *UNTRAINED, *DETAILS))
"""Keys of turns and of parts that are read."""
_LEAST, _MOST = 1e-6, 1e6
"""Weights other than 0 have these bounds, so that any sum of them keeps its digits in fp32."""


def take_weight(keys: dict[str, Any], is_answer: bool, place: str) -> float | None:
    """Removes from the keys of a turn those of how much it counts in training, and returns
    what they mean: 0 if it is not trained, 1 if it is, a weight, or None if there are none. Raises
    DataError for what cannot be done: a part of a turn, a weight that is no number from 0 up, keys
    that contradict each other, or a question that is trained.
    """
    plain = {key: plain_name(key) for key in keys}
    for key, name in plain.items():
        if name in DETAILS and not is_blank(keys.pop(key)):
            raise DataError(
                f"The {key} of {place} trains a part of the turn, but only whole answers are "
                "trained; divide the turn, or give the row as segments of {label, text}."
            )
    by_key = {
        key: _weight(keys.pop(key), key, place)
        for names in (WEIGHTS, TRAINED, UNTRAINED)
        for key, name in plain.items()
        if name in names
    }
    weights = {value for key, value in by_key.items() if plain[key] in WEIGHTS}
    switches = {value for key, value in by_key.items() if plain[key] not in WEIGHTS}
    are_equal = len(weights) <= 1 and len(switches) <= 1
    if not are_equal or (weights and switches and bool(*weights) != bool(*switches)):
        raise DataError(
            f"The keys {' and '.join(by_key)} of {place} say different things; keep one of them."
        )
    for key, weight in by_key.items():
        asks = plain[key] not in UNTRAINED or plain[key] in MASKED
        if weight and asks and not is_answer:
            wanted = "true" if plain[key] in MASKED else "0"
            raise DataError(
                f"The {key} of {place} asks to train a turn that is not an answer, but only "
                f"answers are trained; set it to {wanted}, or give the row as segments of "
                "{label, text}."
            )
    return next(iter(weights or switches), None)


def _weight(value: Any, key: str, place: str) -> float:
    """Returns the weight that one key means."""
    name = plain_name(key)
    if isinstance(value, bool | int | float):
        if value in (0, 1):
            return float(not value) if name in UNTRAINED else float(value)
        if name not in (*TRAINED, *UNTRAINED) and _LEAST <= value <= _MOST:
            return float(value)
    if name in TRAINED or name in UNTRAINED:
        raise DataError(
            f"The {key} of {place} is {shown(value)}; an answer is trained or not, so write 1 or 0."
        )
    raise DataError(
        f"The {key} of {place} is {shown(value)}; write 0 for an answer that is not trained, 1 for "
        "one that counts like any other, or a number from 0.000001 to 1,000,000 by which its "
        "losses are multiplied."
    )


# ---------------------------------------------------------------------- columns beside the turns


def marks_answers(column: str, value: Any) -> bool:
    """Returns whether a column beside the turns has which answers of its row are trained."""
    name = plain_name(column)
    if name in LAST_ALONE:
        return isinstance(value, bool | int | float) and bool(value)
    return name in ANSWER_FLAGS and isinstance(parsed_list(value), list | tuple)


def row_weights(
    row: dict[str, Any], unused: Collection[str], is_answer: list[bool], where: str
) -> list[float | None]:
    """Returns the weight of each turn in the columns of its row, or None where they have none. Turn
    i is an answer if `is_answer[i]`. Raises DataError for a list that has neither a number for each
    turn nor one for each answer, and for columns that contradict each other.
    """
    found: list[float | None] = [None] * len(is_answer)
    answers = [place for place, is_one in enumerate(is_answer) if is_one]
    source = ""
    for column, value in row.items():
        if not isinstance(column, str) or column in unused or not marks_answers(column, value):
            continue
        place = f"the column {legible(column)} in {where}"
        if plain_name(column) in LAST_ALONE:
            weights = {answer: float(answer == answers[-1]) for answer in answers}
        else:
            weights = _by_turn(parsed_list(value), column, is_answer, answers, place)
        if source and any(found[turn] != weight for turn, weight in weights.items()):
            raise DataError(
                f"The columns {source} and {legible(column)} in {where} say different things of "
                "what is trained; keep one of them."
            )
        source = legible(column)
        for turn, weight in weights.items():
            found[turn] = weight
    return found


def _by_turn(
    values: list[Any], column: str, is_answer: list[bool], answers: list[int], place: str
) -> dict[int, float]:
    """Returns the weight of each answer, by the number of its turn, from a list of numbers."""
    if len(values) not in (len(is_answer), len(answers)):
        raise DataError(
            f"{_begin(place)} has {len(values):,} numbers for {len(is_answer):,} turns, of which "
            f"{len(answers):,} are answers; write one for each turn, or one for each answer."
        )
    of_all = len(values) == len(is_answer)
    turns = range(len(is_answer)) if of_all else answers
    found = {}
    for turn, value in zip(turns, values):
        if value is None:
            raise DataError(f"{_begin(place)} has {type_text(value)} among its numbers; write 0.")
        weight = _weight(value, column, f"{place} for turn {turn + 1}")
        if is_answer[turn]:
            found[turn] = weight
        elif weight and plain_name(column) not in UNTRAINED:
            raise DataError(
                f"{_begin(place)} asks to train turn {turn + 1}, which is not an answer, but only "
                "answers are trained; set it to 0, or give the row as segments of {label, text}."
            )
    return found


def _begin(place: str) -> str:
    return place[0].upper() + place[1:]
