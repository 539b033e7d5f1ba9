"""What each column holds, and rows as examples.

- `map_columns` is given what all rows of a source hold (`survey.py`). It finds the format that fits
  their columns, or the columns for the format in the settings.
- It returns a `ColumnMap`, which reads every row as an example.
The formats themselves are in the files `of_*.py`, and in one list in `all_formats.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from engine.config.data_settings import DataColumns, Reading
from engine.config.settings import AUTO
from engine.data.formats.all_formats import FORMATS
from engine.data.formats.detect import MAIN_PARTS, as_registered, fitting_formats
from engine.data.formats.example import Conversation, Example, Labeled, Pair
from engine.data.formats.labels import is_desirable, label_of
from engine.data.formats.of_preferences import PREFERENCE, REFERENCES, beside_messages
from engine.data.formats.of_trees import FLAT, is_flat
from engine.data.formats.refused import (
    WITH_ANSWERS,
    answer_flags,
    classes,
    refuse_marked,
    refuse_row,
    refuse_weights,
)
from engine.data.formats.roles import own_roles
from engine.data.formats.row_parts import Parts
from engine.data.formats.survey import Survey, survey_of
from engine.data.formats.turns import TurnSettings
from engine.data.formats.unknown_flags import flags_error, refuse_unknown_flags
from engine.data.formats.values import listed, without_nulls
from engine.data.sources.json_files import Row
from engine.data.sources.open_source import Source
from engine.errors import DataError

_MEANING = {
    "messages": "the turns of the conversation",
    "prompt": "the prompt",
    "input": "added to the prompt",
    "history": "the earlier turns",
    "completion": "the answer",
    "chosen": "the answer",
    "rejected": "never trained: the answer that was not chosen",
    "system": "the system turn",
    "tools": "the tools that the chat template is told of",
    "text": "the text, every token trained",
    "model_a": "a conversation, trained if it won",
    "model_b": "a conversation, trained if it won",
    "winner": "says which conversation won",
    "tree": "the tree of turns",
    "segments": "the text in pieces, each trained or not",
    "input_ids": "the tokens",
    "labels": "says which tokens are trained",
    "mask": "says which tokens are trained",
    "attention_mask": "says which tokens are padding",
    "position_ids": "says whether a row holds several texts",
}


@dataclass(frozen=True)
class ColumnMap:
    """Reads rows as examples of one format, and knows which column holds which part."""

    format: str
    detected: bool
    """Whether the format was found from the columns; false when the user chose it."""
    columns: dict[str, str]
    """Name of the column of each part of an example (messages, prompt, completion, ...)."""
    unused: list[str] = field(default_factory=list)
    known: tuple[str, ...] = ()
    """All columns, used or not. A row with another one is refused."""
    notes: tuple[str, ...] = ()
    """Sentences on how rows are read."""
    classes: tuple[str, ...] = ()
    """Columns that hold classes, so that 0 and 1 in them are no marks for good and bad answers."""
    pairs: bool = False
    """Both answers of a row are read, the chosen and the rejected one."""
    label: str | None = None
    """Column with the label of a good or bad answer; None where none is read."""
    answer_flags: tuple[str, ...] = ()
    """Columns with flags of which answers of a row are trained."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """The role of each name in `data.roles`."""
    unused_flags: tuple[str, ...] = ()
    """Keys that do not concern training (`data.unused_flags`)."""
    possible_flags: tuple[str, ...] = ()
    """Keys that may be flags: rows that have one are refused."""
    between: str | None = None
    """Text between an instruction and its input, where another program names one."""
    figures: tuple[str, ...] = ()
    """Keys (`KeySurvey.figures`) that are 0 or 1 in some rows and something else in others."""

    def meaning(self) -> dict[str, str]:
        """Returns a description of how each column is used."""
        meanings = _MEANING | dict(FORMATS[self.format].meanings)
        if self.pairs:
            meanings |= {"chosen": "the better answer", "rejected": "the worse answer"}
        by_column = {column: meanings[part] for part, column in self.columns.items()}
        by_column |= dict.fromkeys(self.answer_flags, "says which answers are trained")
        return by_column | ({self.label: "says whether the answer is good"} if self.label else {})

    def known_columns(self) -> frozenset[str]:
        """Returns all columns, used or not."""
        return frozenset(self.known)

    def example(self, row: Row, where: str) -> Example | None:
        """Returns the row as an example, or None if the row is empty. `where` names the row in
        errors. Raises DataError when a column is missing or holds the wrong type, or says that the
        row must not be trained, and BrokenText for text that is not valid Unicode.
        """
        made = FORMATS[self.format]
        self.refuse_flags(row, where)
        left_out = {*self.classes, *self.unused_flags, self.label}
        unread = {column: row[column] for column in row if column not in left_out}
        refuse_row(unread, self.columns.values(), self.format, where)
        read = made.read_pair if self.pairs and made.read_pair is not None else made.read
        settings = TurnSettings(self.roles, self._known_flags)
        whole = {column: without_nulls(value) for column, value in row.items()}
        example = read(Parts(whole, self.columns, where, made.needs, settings, self.between))
        if self.label is not None and isinstance(example, Conversation | Pair):
            example = Labeled(example, is_desirable(row, self.label, where))
        refuse_weights(example, where)
        return example

    def refuse_flags(self, row: Row, where: str) -> None:
        """Raises UnknownFlags if the row, which `where` names, has a key that may be a flag and
        that no person has confirmed.
        """
        refuse_unknown_flags(
            row,
            self.columns,
            self._used,
            self._known_flags,
            self._figures,
            self.possible_flags,
            where,
        )

    def refuse_possible_flags(self, first: Iterable[tuple[Row, str]], name: str) -> None:
        """Raises UnknownFlags if any row of the source `name` has such a key: with its place if it
        is one of the `first` rows, each with its place.
        """
        if not self.possible_flags:
            return
        for row, where in first:
            self.refuse_flags(row, where)
        raise flags_error(self.possible_flags, f"the rows of {name}")

    @cached_property
    def _used(self) -> frozenset[str]:
        label = [self.label] if self.label is not None else []
        return frozenset([*self.columns.values(), *label])

    @cached_property
    def _known_flags(self) -> frozenset[str]:
        return frozenset(self.unused_flags)

    @cached_property
    def _figures(self) -> frozenset[str]:
        return frozenset(self.figures)


# ---------------------------------------------------------------------- which column is which


def map_columns(
    wanted: str,
    rows: Survey | Iterable[Row],
    source: Source,
    columns: DataColumns,
    reads: Reading = "examples",
    *,
    roles: Sequence[str] = (),
    unused_flags: Sequence[str] = (),
) -> ColumnMap:
    """Finds the columns of format `wanted` or, for `auto`, the format that fits the columns. `rows`
    are the rows of the source, or what they hold, and `columns` are the columns that the user
    named. Neither the format nor its columns depend on the order of the rows. `reads` says what
    rows become; `roles` and `unused_flags` are those of the settings. Raises DataError when the
    wanted format, or any format for `auto`, does not fit, for a named column that does not exist,
    for rows that must not be trained as they stand, and for rows of one answer, or without a mark,
    where `reads` wants that.
    """
    pairs = reads == "pairs"
    survey = survey_of(rows)
    names = survey.names
    named = columns.named()
    if wanted == AUTO and not named and is_flat(names):
        raise DataError(
            f"A row of {source.name} is a single turn of a tree ({', '.join(sorted(FLAT))}); use "
            "the file of whole trees instead (ready.trees), in which a row has a prompt with its "
            "replies."
        )
    format_wanted, registered = as_registered(wanted, source, names, named)
    if pairs and not registered and format_wanted in (AUTO, PREFERENCE.name):
        registered = beside_messages(names)
        format_wanted = PREFERENCE.name if registered else format_wanted
    fitting = fitting_formats(format_wanted, survey, registered)
    if not fitting and registered != named:
        raise _not_as_registered(registered, names, source)
    if not fitting and pairs and not named:
        raise _no_pairs("no known format", names, source)
    if not fitting:
        raise _no_format(wanted, names, named, source)
    name, found = fitting[0]
    made = FORMATS[name]
    if reads == "labels" and made.read_pair is not None:
        raise _no_marks(names, source)
    if reads == "labels" and not made.has_answers:
        raise _no_answers(name, names, source)
    label = label_of(names, found, source.name) if reads == "labels" else None
    marks = survey.marks()
    if name in WITH_ANSWERS and label is None:
        refuse_marked(marks, found.values(), source.name)
    if pairs and made.read_pair is None:
        raise _no_pairs(name, names, source)
    used = {*found.values(), *([label] if label is not None else [])}
    flags = answer_flags(survey.flags(), {*used, *unused_flags}, name)
    unused = [column for column in names if column not in used and column not in flags]
    note = (made.pair_note if pairs else made.note).format_map(found)
    if pairs and all(column in names for column in REFERENCES):
        unused = [column for column in unused if column not in REFERENCES]
        note += f" The columns {listed(REFERENCES)} are the reference that DPO compares with."
    is_detected = wanted == AUTO and not named
    notes = (note,) if note else ()
    possible = survey.keys.possible(found, used)
    return ColumnMap(
        name,
        is_detected,
        found,
        unused,
        tuple(names),
        notes,
        classes(marks),
        pairs,
        label,
        flags,
        own_roles(roles),
        tuple(unused_flags),
        tuple(flag for flag in possible if flag not in unused_flags),
        source.between,
        tuple(survey.keys.figures()),
    )


def _no_pairs(name: str, names: dict[str, Any], source: Source) -> DataError:
    """Returns the error for rows that have one answer where pairs are learned from."""
    return DataError(
        f"{source.name} has no pairs of answers: its columns {listed(names)} are read as {name}; "
        "give rows with the columns prompt, chosen and rejected, or set train.objective to "
        "sft."
    )


def _no_answers(name: str, names: dict[str, Any], source: Source) -> DataError:
    """Returns the error for rows without answers where marks of answers are learned from."""
    return DataError(
        f"{source.name} has no prompts with answers, which marks are for: its columns "
        f"{listed(names)} are read as {name}; give rows with the columns prompt, completion and "
        "label, or set train.objective to sft."
    )


def _no_marks(names: dict[str, Any], source: Source) -> DataError:
    """Returns the error for rows of pairs where marks of answers are learned from."""
    return DataError(
        f"{source.name} has pairs of answers ({listed(names)}), and marks are for one answer; set "
        "train.objective to dpo, or give each answer a row of its own with the columns "
        "prompt, completion and label."
    )


def _not_as_registered(
    registered: dict[str, str], names: dict[str, Any], source: Source
) -> DataError:
    """Returns the error for rows that lack a column of their entry in a registry."""
    missing = listed(column for column in registered.values() if column not in names)
    return DataError(
        f"The entry of {source.name} in the registry takes the column {missing}, but the rows "
        f"have the columns {listed(names)}; name one of these in the entry's columns."
    )


def _no_format(
    wanted: str, names: dict[str, Any], named: dict[str, str], source: Source
) -> DataError:
    """Returns the error that names why no format fits."""
    there = listed(names)
    for part, column in named.items():
        if column not in names:
            return DataError(
                f"data.columns.{part} is {column}, but {source.name} has the columns {there}; name "
                "one of these."
            )
    if named:
        return DataError(
            f"In data.columns, only {' and '.join(named)} {'are' if len(named) > 1 else 'is'} "
            f"named, and {source.name} ({there}) has no column with a usual name for the rest; set "
            f"data.columns.{_first_missing_part(named)} too."
        )
    if wanted == AUTO:
        return DataError(
            f"The columns of {source.name} ({there}) fit no known format; name them in "
            "data.columns, or rename them to messages, conversations, instruction and output, "
            "prompt and completion, or text."
        )
    return DataError(
        f"data.format is {wanted}, which needs {FORMATS[wanted].needs}, but {source.name} has the "
        f"columns {there}; rename them or set data.format to auto."
    )


def _first_missing_part(named: dict[str, str]) -> str:
    """Returns a main part that is not named, but that some format needs together with the named
    parts.
    """
    for part in MAIN_PARTS:
        needing = [made.parts for made in FORMATS.values() if part in made.required]
        if part not in named and any(set(named) <= parts for parts in needing):
            return part
    raise AssertionError(f"no format has {', '.join(named)}; `check_columns` refuses that")
