"""A text is tokenized piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A `Piece` of a text has the characters around it, so that its tokens are those that it has in
    the text.
    """

    before: str
    text: str
    after: str

    @property
    def with_context(self) -> str:
        return self.before + self.text + self.after
