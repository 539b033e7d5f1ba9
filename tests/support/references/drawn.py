"""Invented conversations of every kind, drawn from a seed: the same ones in every run."""

from __future__ import annotations

import random
from typing import Any

from engine.data.formats.example import Conversation
from tests.support.references.family import Family, Refused

_FRAGMENTS = [
    *("hello", " hello", "an answer", "why", "1 + 2 = 3", "42", "So,", "the end"),
    *(" ", "\n", "\n\n", "   ", "\t", "\r\n", "\x85", "\u2028", "\u3000", "\x1c"),
    *("<|im_", "end|>", "<", "|>", "▁", "[INST", "INST]", "</", "s>", "<0x0A>", "<｜"),
    *("e\u0301", "\u0301", "日本", "👩‍👩‍👧", "\u200b", "\ufeff", "\x00", "ﬁ", "Å", "ä", "שלום"),
    *("{{ 1 }}", "{% raw %}", '"', "\\", "&amp;", "```json\n{}\n```", "User:", "Assistant: "),
]
_TYPED = (
    *("<|im_start|>", "<|im_end|>", "<|eot_id|>", "</s>", "<s>", "[/INST]", "<end_of_turn>"),
    *("<think>", "</think>", "<tool_call>", "</tool_response>", "<|endoftext|>", "<|user|>"),
)
_ROLES = ("user", "assistant", "system", "tool", "developer")


class Draw:
    """Draws conversations for a family."""

    def __init__(self, family: Family, seed: int):
        self.family = family
        self.random = random.Random(f"{family.name} {seed}")
        self._typed = (*family.special, *family.added, *_TYPED)
        self._number = 0
        self._systems = 0.4 if _takes_a_system(family) else 0.02
        self._calls = 0.2 if family.calls else 0.02

    def conversation(self) -> Conversation:
        """Draws the next conversation."""
        kind = self.random.random()
        uses_tools = kind > 1 - self._calls
        if kind < 0.06:
            roles = self.random.choices(_ROLES, k=self.random.randint(1, 7))
            messages = [self._message(role) for role in roles]
        else:
            messages = self._asked_and_answered(uses_tools=uses_tools)
        if self._seldom(self._systems) and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._text()}, *messages]
        tools = [self._tool() for _ in range(self.random.randint(1, 2))]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        out = {i for i in answers if self.random.random() < 0.3} if self._seldom(0.15) else set()
        return Conversation(
            messages,
            untrained=frozenset(out),
            tools=tools if self._seldom(0.6 if uses_tools else 0.05) else None,
        )

    def _seldom(self, share: float) -> bool:
        return self.random.random() < share

    def _asked_and_answered(self, uses_tools: bool) -> list[dict[str, Any]]:
        messages = []
        for _ in range(self.random.choice((1, 1, 2, 2, 3, 4))):
            messages.append(self._message("user"))
            if uses_tools and self._seldom(0.7):
                messages += self._called()
            messages.append(self._message("assistant"))
            if self._seldom(0.04):
                messages.insert(-1, self._message("developer"))
        if self._seldom(0.1):
            messages.append(self._message("user"))
        return messages

    def _called(self) -> list[dict[str, Any]]:
        """Draws an answer that calls functions, and what they return."""
        calls = []
        for _ in range(self.random.choice((1, 1, 2))):
            arguments = {self._name(): self._value() for _ in range(self.random.randint(0, 2))}
            function = {"name": self._name(), "arguments": arguments}
            calls.append({"type": "function", "id": self._identity(), "function": function})
        content = self._text() if self._seldom(0.15) else ""
        asked = {"role": "assistant", "content": content, "tool_calls": calls}
        found = [
            {"role": "tool", "content": self._text(), "tool_call_id": call["id"]} for call in calls
        ]
        return [asked, *found]

    def _message(self, role: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": role, "content": self._text()}
        if role == "assistant" and self._seldom(0.4 if self.family.name == "qwen3" else 0.02):
            self._reason(message)
        return message

    def _reason(self, message: dict[str, Any]) -> None:
        if self._seldom(0.5):
            message["reasoning_content"] = self._text()
        else:
            message["content"] = f"<think>\n{self._text()}\n</think>\n\n{message['content']}"

    def _tool(self) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {
                "name": self._name(),
                "description": self._text(),
                "parameters": {"type": "object", "properties": {self._name(): {"type": "string"}}},
            },
        }

    def _name(self) -> str:
        self._number += 1
        return f"{self.random.choice(('add', 'look_up', 'show'))}_{self._number}"

    def _identity(self) -> str:
        return "".join(self.random.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=9))

    def _value(self) -> Any:
        return self.random.choice(
            [None, True, 3, -1.5, self._text(), [self._text(), 2], {self._name(): self._text()}]
        )

    def _text(self) -> str:
        """Draws a text. Few are empty or white space; most have a word of their own, so that it can
        be told whether a template has left them out.
        """
        kind = self.random.random()
        if kind < 0.06:
            return ""
        if kind < 0.10:
            return self.random.choice((" ", "\n", " \n\n ", "\t"))
        self._number += 1
        parts = [self._fragment() for _ in range(self.random.choice((0, 1, 1, 2, 3, 6)))]
        if kind < 0.95:
            parts.insert(self.random.randint(0, len(parts)), f"word{self._number}")
        if kind > 0.985:
            parts *= 150
        return "".join(parts)

    def _fragment(self) -> str:
        if self._seldom(0.12):
            return self.random.choice(self._typed)
        if self._seldom(0.1):
            return chr(self.random.choice((0x20, 0xA1, 0x400, 0x3040, 0x1F600)) + 7)
        return self.random.choice(_FRAGMENTS)


def _takes_a_system(family: Family) -> bool:
    turns = [{"role": role, "content": "a"} for role in ("system", "user")]
    try:
        return bool(family.page(turns, None))
    except Refused:
        return False


def drawn(family: Family, count: int, seed: int = 7) -> list[Conversation]:
    """Returns `count` conversations for a family."""
    draw = Draw(family, seed)
    return [draw.conversation() for _ in range(count)]
