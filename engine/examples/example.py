"""A row of a data set is one of five things: a conversation, a question with its answer, a text,
segments of text, or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""A turn has the form that chat templates expect: `role`, `content` and optional keys such as
`tool_calls`.
"""


@dataclass(frozen=True)
class Conversation:
    """A conversation holds turns in the form that chat templates expect."""

    messages: list[Message]
    context: int = 0
    """The first messages, so many, are the prompt: their answers are not trained on, unless all
    text is.
    """
    untrained: frozenset[int] = frozenset()
    """The answers at these places (from 0) are never trained on, because the row says so."""
    tools: list[Any] | None = None
    """The chat template receives these JSON schemas of the functions that the model may call."""

    @property
    def asked(self) -> str:
        """Returns the content of the message before the last answer, or an empty text if there is
        none.
        """
        for place in range(len(self.messages) - 1, 0, -1):
            if self.messages[place]["role"] == "assistant":
                return str(self.messages[place - 1].get("content", ""))
        return ""


@dataclass(frozen=True)
class Pair:
    """A pair is a question and its answer. The `separator` is put between them only if there is no
    chat template.
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
    """A text is a document for continued pre-training. Every token is trained, and it has no
    question.
    """

    text: str

    @property
    def asked(self) -> str:
        return ""


@dataclass(frozen=True)
class Segments:
    """Segments are pieces of a text that is complete as it stands: no chat template and no begin or
    end token is added, and special tokens in it are tokens.
    """

    parts: tuple[tuple[str, bool], ...]
    """Each piece is a text, and whether it is trained."""

    @property
    def asked(self) -> str:
        return ""


@dataclass(frozen=True)
class Tokens:
    """A row of tokens was made by another program, for the tokenizer of the same model."""

    ids: list[int]
    trained: list[bool]
    """One value belongs to each token."""

    @property
    def asked(self) -> str:
        return ""


Example = Conversation | Pair | Text | Segments | Tokens
