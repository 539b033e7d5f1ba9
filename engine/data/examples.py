"""A row can say one of three things: a conversation, a question with its answer, or a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""A turn as chat templates take it, with `role`, `content` and perhaps `tool_calls` and others."""


@dataclass(frozen=True)
class Conversation:
    """Turns as chat templates take them. The first `context` messages are never trained on."""

    messages: list[Message]
    context: int = 0
    tools: list[Any] | None = None
    """These are the JSON schemas of the functions that may be called, for the chat template."""

    @property
    def asked(self) -> str:
        """Before the last answer, this was said last; it is empty where nothing was."""
        for place in range(len(self.messages) - 1, 0, -1):
            if self.messages[place]["role"] == "assistant":
                return str(self.messages[place - 1].get("content", ""))
        return ""


@dataclass(frozen=True)
class Pair:
    """A pair is a question and its answer. The `separator` stands between them only where there is
    no chat template.
    """

    prompt: str
    completion: str
    system: str = ""
    separator: str = ""

    @property
    def asked(self) -> str:
        return self.prompt

    def conversation(self) -> Conversation:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return Conversation(
            [
                *system,
                {"role": "user", "content": self.prompt},
                {"role": "assistant", "content": self.completion},
            ]
        )


@dataclass(frozen=True)
class Text:
    """A text is a document for continued pre-training. Every token is trained, and nothing is
    asked.
    """

    text: str

    @property
    def asked(self) -> str:
        return ""


Example = Conversation | Pair | Text
