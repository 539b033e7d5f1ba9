"""A format: the columns by which rows of a kind are known, and how a row becomes an example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.data.formats.example import Example, Preference
from engine.data.formats.row_parts import Parts
from engine.data.formats.turns import has_turns

Names = tuple[str, ...]
"""The usual names of a column, the likeliest first. Capital letters do not matter."""

TURNS: Names = ("messages", "conversations", "conversation", "chat", "items")
"""Names of columns that hold the turns of a conversation."""
SYSTEM: Names = (
    *("system", "system_prompt", "systemprompt", "system_message", "systemmessage"),
    *("system_instruction", "systeminstruction"),
)
TOOLS: Names = ("tools", "functions")


@dataclass(frozen=True)
class Format:
    """One format. All of them are in `all_formats.py`; a new one is one more of these."""

    name: str
    required: Mapping[str, Names]
    """Parts that a row must have."""
    read: Callable[[Parts], Example | None]
    """Returns a row as an example, or None if the row is empty."""
    looks_like: Callable[[Mapping[str, Any]], bool]
    """Whether values of the required parts are what this format has."""
    needs: str
    """What rows of this format need, as text."""
    optional: Mapping[str, Names] = field(default_factory=dict)
    """Parts that a row may have."""
    weak: frozenset[str] = frozenset()
    """Names that are too common: they count only where the values look like this format."""
    meanings: Mapping[str, str] = field(default_factory=dict)
    """What a part is used for, where it differs from other formats."""
    note: str = ""
    """Note for the user. {part} stands for the column of that part."""
    read_pair: Callable[[Parts], Preference | None] | None = None
    """Returns both answers of a row, or None if the row is empty. None for a format without
    pairs.
    """
    pair_note: str = ""
    """Note for the user where both answers are read, in place of `note`."""
    has_answers: bool = True
    """Rows are questions with answers, which a column may mark as good or bad."""
    is_fixed: bool = False
    """Its columns cannot be chosen by a person: each has one name."""

    @property
    def parts(self) -> set[str]:
        """An example of this format can have these parts."""
        return {*self.required, *self.optional}


def is_text(value: Any) -> bool:
    """Returns whether a value may belong to a column of text."""
    return value is None or isinstance(value, str)


def is_text_or_turns(value: Any) -> bool:
    """Returns whether a value may belong to a column of text or of turns."""
    return is_text(value) or has_turns(value)
