"""The parts of one row, from the columns that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from engine.data.formats.calls import read_tools
from engine.data.formats.content import read_system
from engine.data.formats.flags import row_weights
from engine.data.formats.turns import Turn, TurnSettings, as_turns, read_turns
from engine.data.formats.values import is_blank, parsed_list, type_text, valid_text
from engine.data.sources.json_files import Row
from engine.data.sources.not_trained import WITHOUT, medium
from engine.errors import DataError


@dataclass(frozen=True)
class Parts:
    """Reads the parts of a row. Raises DataError, with the place of the row, for a part that is
    missing or of another type, and BrokenText for text that is not valid Unicode.
    """

    row: Row
    columns: dict[str, str]
    """The column of each part."""
    where: str
    """The place of the row, as an error names it."""
    needs: str
    """What rows of this format need, as text."""
    settings: TurnSettings = field(default_factory=TurnSettings)
    """Settings of roles and flags."""
    between: str | None = None
    """Text between an instruction and its input, where another program names one."""

    def place(self, part: str) -> str:
        """Returns the place of a part, as an error names it."""
        return f"{self.columns[part]} in {self.where}"

    def value(self, part: str) -> Any:
        """Returns the value of a part that a row must have."""
        column = self.columns[part]
        if column not in self.row:
            raise DataError(
                f"The column {column} is missing in {self.where}; add it or remove that row."
            )
        return self.row[column]

    def optional(self, part: str) -> Any:
        """Returns the value of a part that a row may have, or None."""
        return self.row.get(self.columns[part]) if part in self.columns else None

    def text(self, part: str) -> str:
        """Returns a part that a row must have as text."""
        return self._as_text(part, self.value(part))

    def optional_text(self, part: str) -> str:
        """Returns a part that a row may have as text."""
        return self._as_text(part, self.optional(part))

    def system(self) -> str:
        """Returns the text of the system turn that stands beside the turns, which may be a list of
        parts.
        """
        value = self.optional("system")
        if isinstance(value, list | tuple | dict):
            return read_system(value, f"the column {self.place('system')}")
        return self._as_text("system", value)

    def _as_text(self, part: str, value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            return valid_text(value)
        column = self.columns[part]
        found = medium(value)
        if found:
            raise DataError(f"The column {column} in {self.where} holds {found}, {WITHOUT}.")
        raise DataError(
            f"The column {column} in {self.where} is {type_text(value)}, not text; write it "
            "as text."
        )

    def turns(self, part: str) -> list[Turn]:
        """Returns a part that a row must have as turns. Those of a conversation have the weights in
        other columns of the row.
        """
        value = self.value(part)
        if is_blank(value):
            return []
        turns = as_turns(value)
        if turns is None:
            raise DataError(
                f"The column {self.columns[part]} in {self.where} is {type_text(value)}, not a "
                f"list of turns; write {self.needs}."
            )
        found = read_turns(turns, self.place(part), self.settings)
        return self.weighted(found, len(turns)) if part == "messages" else found

    def weighted(self, turns: list[Turn], count: int) -> list[Turn]:
        """Returns the turns, which come from `count` turns of the row, with the weights in other
        columns of the row.
        """
        is_answer = [False] * count
        for turn in turns:
            for number in turn.numbers if turn.message["role"] == "assistant" else ():
                is_answer[number] = True
        others = {name: self.row[name] for name in self.row if name not in self.columns.values()}
        weights = row_weights(others, self.settings.unused, is_answer, self.where)
        if not any(weight is not None for weight in weights):
            return turns
        return [self._weighted(turn, weights) for turn in turns]

    def _weighted(self, turn: Turn, weights: list[float | None]) -> Turn:
        given = {weights[number] for number in turn.numbers} - {None}
        if turn.message["role"] != "assistant" or not given:
            return turn
        if len(given) > 1 or (turn.has_weight and turn.weight not in given):
            raise DataError(
                f"Turn {turn.numbers[0] + 1} in {self.where} and a column beside the turns say "
                "different things of what is trained; keep one of them."
            )
        return replace(turn, weight=given.pop() or 0.0, has_weight=True)

    def turns_or_text(self, part: str, role: str) -> list[Turn]:
        """Returns a part as turns; a text is one turn of `role`, and a blank text is none."""
        if isinstance(self.value(part), list | tuple | dict):
            return self.turns(part)
        text = self.text(part)
        return [Turn({"role": role, "content": text})] if text.strip() else []

    def history(self) -> list[Turn]:
        """Returns the earlier questions and answers of a row, from [[question, answer], ...]."""
        value = parsed_list(self.optional("history"))
        if is_blank(value):
            return []
        pairs = value if isinstance(value, list | tuple) else [value]
        found = []
        for pair in pairs:
            if not isinstance(pair, list | tuple) or [type(text) for text in pair] != [str, str]:
                raise DataError(
                    f"The column {self.columns['history']} in {self.where} is not a list of pairs "
                    "of texts; write the earlier turns as [[prompt, answer], ...]."
                )
            question, answer = (valid_text(text) for text in pair)
            found.append(Turn({"role": "user", "content": question}))
            found.append(Turn({"role": "assistant", "content": answer}))
        return found

    def tools(self) -> list[Any] | None:
        """Returns the tools for the chat template."""
        if "tools" not in self.columns:
            return None
        return read_tools(self.optional("tools"), f"The column {self.place('tools')}")
