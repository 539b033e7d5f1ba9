"""A `Chat` is what a chat template is given, and a `Refusal` what it may answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.examples.example import Message


@dataclass(frozen=True)
class Chat:
    """A chat has messages, and the tools that the template receives."""

    messages: list[Message]
    tools: list[Any] | None = None

    def until(self, end: int) -> Chat:
        """Returns the chat of the messages before place `end`."""
        return Chat(self.messages[:end], self.tools)


@dataclass(frozen=True)
class Refusal:
    """A template refused a chat with these words."""

    words: str
