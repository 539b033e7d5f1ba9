"""A row of a data set as one of seven things: a conversation, a question with its answer, a text,
segments of text, tokens, a question with a chosen and a rejected answer, or an answer with a mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""A turn in the form that chat templates expect: `role`, `content` and optional keys such as
`tool_calls`.
"""


class Arguments(dict[str, Any]):
    """Arguments of a call that a row gave as JSON text, which some templates write unchanged."""

    def __init__(self, values: Mapping[str, Any], text: str):
        super().__init__(values)
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return Arguments, (dict(self), self.text)


@dataclass(frozen=True)
class Conversation:
    """Turns in the form that chat templates expect."""

    messages: list[Message]
    context: int = 0
    """Number of first messages that are the prompt: their answers are not trained on, unless all
    text is.
    """
    untrained: frozenset[int] = frozenset()
    """Places (from 0) of answers that are never trained on, by the row's own flags."""
    tools: list[Any] | None = None
    """JSON schemas of the functions that the model may call, for the chat template."""
    weights: Mapping[int, float] = field(default_factory=dict)
    """Factors of the losses of the answers at these places, from the row; 1 for other answers."""

    @property
    def asked(self) -> str:
        """The content of the message before the last answer, or an empty text if there is none."""
        for place in range(len(self.messages) - 1, 0, -1):
            if self.messages[place]["role"] == "assistant":
                return str(self.messages[place - 1].get("content", ""))
        return ""


@dataclass(frozen=True)
class Pair:
    """A question and its answer. The `separator` is put between them only if there is no chat
    template.
    """

    prompt: str
    completion: str
    system: str = ""
    separator: str = ""

    @property
    def asked(self) -> str:
        return self.prompt

    def conversation(self) -> Conversation:
        """Returns the pair as turns, of which those before the answer are the prompt."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompt = [*system, {"role": "user", "content": self.prompt}]
        answer = {"role": "assistant", "content": self.completion}
        return Conversation([*prompt, answer], context=len(prompt))


@dataclass(frozen=True)
class Text:
    """A document for continued pre-training. Every token is trained, and it has no question. It may
    be a passage of a longer text, which continues before and behind it.
    """

    text: str
    before: str = ""
    """Characters before a passage. A text that begins here has none."""
    after: str = ""
    """Characters behind a passage. A text that ends here has none."""

    @property
    def asked(self) -> str:
        return ""


@dataclass(frozen=True)
class Segments:
    """Segments of a text that is complete as it stands: no chat template and no begin or end token
    is added, and special tokens in it are tokens.
    """

    parts: tuple[tuple[str, bool], ...]
    """Text of each segment, and whether it is trained."""

    @property
    def asked(self) -> str:
        return ""


@dataclass(frozen=True)
class Tokens:
    """Row of tokens made by another program, for the tokenizer of the same model."""

    ids: list[int]
    loss_mask: list[bool]
    """Whether each token is trained."""

    @property
    def asked(self) -> str:
        return ""


@dataclass(frozen=True)
class Preference:
    """A question with two answers, of which one was chosen. Both conversations begin with the same
    messages, their `context`.
    """

    chosen: Conversation | Pair
    rejected: Conversation | Pair | None
    """Rejected answer, or None where the row has none."""
    reference: tuple[float, float] | None = None
    """Reference log-probabilities of the chosen and the rejected answer; None where the row does
    not have them.
    """

    @property
    def asked(self) -> str:
        return self.chosen.asked


@dataclass(frozen=True)
class Labeled:
    """A question with an answer that its row marks as good or bad."""

    answer: Conversation | Pair
    is_desirable: bool

    @property
    def asked(self) -> str:
        return self.answer.asked


Single = Conversation | Pair | Text | Segments | Tokens
Example = Single | Preference | Labeled
