"""Rows that must not be trained as they stand, by their columns, whatever their format.

A column of images, a mark for good and bad answers, or a weight asks a trainer for something. If it
is not done, the row is refused by the name of the column.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.data.formats import flags
from engine.data.formats.example import Example, Labeled, Pair, Preference
from engine.data.formats.roles import plain_name
from engine.data.formats.values import is_blank, legible, parsed_json, shown
from engine.data.sources.json_files import Row
from engine.data.sources.not_trained import MARKS, MEDIA_COLUMNS, WITHOUT, medium
from engine.errors import DataError

_MARK = "kto_tag"
_OR_KTO = "or learn from the marks with train.objective kto"
LABEL = "label"
"""Name of a column that may mark answers, or hold classes."""
_LONGEST_CELL = 20
"""Largest number of characters of a cell of a table with a number."""
WITH_TURNS = ("messages", "sharegpt", "gemini")
"""Formats whose rows have several answers, which a column may select for training."""
WITH_ANSWERS = ("messages", "sharegpt", "gemini", "alpaca", "prompt_completion")
"""Formats whose rows have answers that a column may mark as bad."""


def refuse_row(row: Row, used: Collection[str], data_format: str, where: str) -> None:
    """Raises DataError if a column that is not used means that the row must not be trained as it
    is.
    """
    for column, value in row.items():
        if column in used or value is None or not isinstance(column, str):
            continue
        name = column.lower()
        what = MEDIA_COLUMNS.get(name) if _holds_something(value) else None
        what = what or medium(value)
        if what:
            raise DataError(f"The column {legible(column)} in {where} holds {what}, {WITHOUT}.")
        is_mark = name == _MARK or (name == LABEL and marks_desirable(value))
        if is_mark and data_format in WITH_ANSWERS:
            raise DataError(f"The column {column} in {where} {MARKS}, {_OR_KTO}.")
        if flags.marks_answers(column, value):
            if data_format in WITH_TURNS:
                continue
            raise DataError(
                f"The column {legible(column)} in {where} says which answers are trained, which is "
                "done for conversations (messages) alone; give the row as one, or remove the "
                "column."
            )
        if _is_weight(plain_name(column), _of_a_table(value)):
            raise DataError(
                f"The column {legible(column)} in {where} is {shown(value)}, but rows are trained "
                "with one weight; remove the rows that are not to be trained, and then this column."
            )


def refuse_weights(example: Example | None, where: str) -> None:
    """Raises DataError if an answer of a pair, or one with a mark, has a weight of its own: losses
    of pairs and of marked answers are not sums over tokens.
    """
    answers: list[Any] = []
    if isinstance(example, Preference):
        answers = [example.chosen, example.rejected]
    elif isinstance(example, Labeled):
        answers = [example.answer]
    for answer in answers:
        if answer is None or isinstance(answer, Pair):
            continue
        for place, weight in answer.weights.items():
            raise DataError(
                f"Turn {place + 1} in {where} has the weight {shown(weight)}, but where "
                "preferences are learned, all answers count alike; remove the weight, or set "
                "train.objective to sft."
            )


def refuse_marked(marks: Mapping[str, set[bool]], used: Collection[str], name: str) -> None:
    """Raises DataError if a column of the source `name` marks answers as good or bad with 1 and 0.
    `marks` has of the columns named label whether their values are marks (`Survey.marks`).
    """
    for column, found in marks.items():
        if column not in used and found == {True}:
            raise DataError(f"The column {column} of {name} {MARKS}, {_OR_KTO}.")


def classes(marks: Mapping[str, set[bool]]) -> tuple[str, ...]:
    """Returns the columns named label that hold something other than marks."""
    return tuple(column for column, found in marks.items() if False in found)


def answer_flags(
    flags_found: Collection[str], left_out: Collection[str], data_format: str
) -> tuple[str, ...]:
    """Returns the columns that select which answers of a row are trained, of the columns
    `flags_found` (`Survey.flags`) without those that are `left_out`.
    """
    if data_format not in WITH_TURNS:
        return ()
    return tuple(column for column in flags_found if column not in left_out)


def marks_desirable(value: Any) -> bool:
    """Returns whether a value is a mark of an answer: 1 or 0, true or false, also as text."""
    value = _of_a_table(value)
    return isinstance(value, bool | int | float) and value in (0, 1)


def _of_a_table(value: Any) -> Any:
    """Returns the number, or true or false, that a cell of a table holds as text."""
    if not isinstance(value, str) or len(value) > _LONGEST_CELL:
        return value
    found = parsed_json(value.strip().lower())
    return found if isinstance(found, bool | int | float) else value


def _holds_something(value: Any) -> bool:
    is_none = isinstance(value, bool | int | float) and not value
    return not is_blank(value) and not is_none


def _is_weight(name: str, value: Any) -> bool:
    """Whether a column means that its row is not trained like any other."""
    if name in (*flags.TRAINED, *flags.UNTRAINED) and isinstance(value, bool):
        return value is (name in flags.UNTRAINED)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in flags.TRAINED:  # other numbers are figures, such as the loss of an evaluation
        return is_number and value == 0
    if name in flags.UNTRAINED:
        return is_number and value == 1
    return name in flags.ROW_WEIGHTS and is_number and value != 1
