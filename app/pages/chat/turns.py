"""A conversation of Chat: the messages and the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.tools.chat.conversation import Message


@dataclass
class Answer:
    """One side's reply to a message."""

    weights: str
    """Name on the page of the weights that answer."""
    text: str = ""
    state: str = "waiting"
    """Waiting, writing, done, stopped or failed."""
    problem: str = ""
    """Why the answer failed."""
    tokens: int = 0
    draws: int = 0
    seconds: float = 0.0
    """Seconds in which `draws` tokens were drawn. The first token is not counted, since before it
    the model must read the whole conversation.
    """

    def write(self, text: str, tokens: int) -> None:
        """Replaces the text of the answer so far, which has `tokens` tokens."""
        self.text = text
        self.tokens = tokens

    def count_draw(self, seconds: float, is_last: bool) -> None:
        """Counts a draw that took `seconds`; the last one draws the end of the answer instead of a
        token.
        """
        if self.state == "writing":
            self.draws += 1
            self.seconds += seconds
        self.state = "done" if is_last else "writing"

    def fail(self, problem: str) -> None:
        """Ends the answer as failed because of `problem`."""
        self.state = "failed"
        self.problem = problem

    def stop(self) -> None:
        """Ends the answer and keeps its text so far; an answer that is over is not changed."""
        if self.state in ("waiting", "writing"):
            self.state = "stopped"

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer in the form that pages receive."""
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
    """One message of a person with the answers of one or two sides."""

    message: str
    answers: dict[str, Answer] = field(default_factory=dict)
    """Answers by side: "base" and "tuned"."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the turn in the form that pages receive."""
        answers = {side: answer.to_dict() for side, answer in self.answers.items()}
        return {"message": self.message, "answers": answers}


def history(turns: Sequence[Turn], turn: Turn, side: str, system: str) -> list[Message]:
    """Returns the conversation up to the message of `turn` as one side knows it.

    Turns that a side was not asked are left out. `turn` may be one of `turns`.
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
