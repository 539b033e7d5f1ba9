"""A conversation of the Talk tab is made of these: whom a person talks to, what was said, and what
was answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.talk.conversation import Message

CURRENT = "current"
"""A choice of these weights means those that a paused run has now."""


@dataclass(frozen=True)
class Choice:
    """A choice names weights of a run, or a model in a folder, to talk to."""

    run_id: str = ""
    """This is empty where a folder is chosen."""
    weights: str = "newest"
    """The weights of a run are "current" (while it is paused), "newest", "step-N" or "export"."""
    folder: str = ""
    """This is empty where a run is chosen."""


@dataclass
class Answer:
    """One side answers a message."""

    weights: str
    """The answer comes from these weights, in words."""
    text: str = ""
    state: str = "waiting"
    """An answer is waiting, writing, done, stopped or failed."""
    problem: str = ""
    """It failed for this reason."""
    tokens: int = 0
    draws: int = 0
    seconds: float = 0.0
    """The drawing of `draws` tokens took this long. The first token is not counted, since it waits
    for the whole conversation to be read.
    """

    def write(self, text: str, tokens: int) -> None:
        """Sets the answer so far, which has `tokens` tokens."""
        self.text = text
        self.tokens = tokens

    def count_draw(self, seconds: float, is_last: bool) -> None:
        """Counts a draw of `seconds`; the last one draws the answer's end instead of a token."""
        if self.state == "writing":
            self.draws += 1
            self.seconds += seconds
        self.state = "done" if is_last else "writing"

    def fail(self, problem: str) -> None:
        """Ends the answer, which `problem` made impossible."""
        self.state = "failed"
        self.problem = problem

    def stop(self) -> None:
        """Ends the answer as it stands; one that is over stays as it is."""
        if self.state in ("waiting", "writing"):
            self.state = "stopped"

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer as pages show it."""
        rate = f"{self.draws / self.seconds:,.1f} tokens/s" if self.seconds > 0 else ""
        return {
            "weights": self.weights,
            "text": self.text,
            "state": self.state,
            "problem": self.problem,
            "tokens": self.tokens,
            "rate": rate,
        }


@dataclass
class Turn:
    """A person says something, and one or two sides answer it."""

    message: str
    answers: dict[str, Answer] = field(default_factory=dict)
    """The answers stand by side: "base" and "tuned"."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the turn as pages show it."""
        answers = {side: answer.to_dict() for side, answer in self.answers.items()}
        return {"message": self.message, "answers": answers}


def history(turns: Sequence[Turn], turn: Turn, side: str, system: str) -> list[Message]:
    """Returns the conversation up to the message of `turn` as one side knows it.

    What a side was not asked, it has not heard. `turn` may stand among `turns`.
    """
    messages: list[Message] = []
    if system.strip():
        messages.append({"role": "system", "content": system})
    for earlier in turns:
        answer = earlier.answers.get(side)
        if earlier is turn or answer is None or not answer.text:
            continue
        messages.append({"role": "user", "content": earlier.message})
        messages.append({"role": "assistant", "content": answer.text})
    messages.append({"role": "user", "content": turn.message})
    return messages
