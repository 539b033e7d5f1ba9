"""How a task wants its answers, and when an answer is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import DataError
from engine.runtime.sampling.drawing import Drawing

DEFAULT_TOKENS = 256
"""Tokens of an answer at most, where its task does not set it."""
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names by which tasks give the length of an answer; the first of them counts."""
_BYTES_TOO_MANY = 4
"""Bytes by which the first token of a text that ends an answer may begin before it."""


@dataclass(frozen=True)
class WantedAnswers:
    """What a task sets for the answers to its questions."""

    until: tuple[str, ...]
    """Texts before the first of which an answer ends."""
    max_new_tokens: int
    drawing: Drawing

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> WantedAnswers:
        """Reads a task's generation settings, as lm-evaluation-harness names them.

        Raises DataError for a way of drawing that the engine does not have.
        """
        until = settings.get("until") or []
        texts = [until] if isinstance(until, str) else until
        lengths = [settings[name] for name in LENGTH_NAMES if settings.get(name) is not None]
        temperature = float(settings.get("temperature") or 0.0)
        is_drawn = bool(settings.get("do_sample", temperature > 0)) and temperature > 0
        if (settings.get("num_beams") or 1) > 1:
            raise DataError(
                "A task wants answers searched with num_beams, which the streaming engine does "
                "not have; leave the task out."
            )
        drawing = Drawing()
        if is_drawn:
            drawing = Drawing(
                temperature,
                float(settings.get("top_p") or 1.0),
                int(settings.get("top_k") or 0),
                float(settings.get("min_p") or 0.0),
            )
        return cls(
            tuple(filter(None, texts)),
            int(lengths[0]) if lengths else DEFAULT_TOKENS,
            drawing,
        )

    def is_over(self, decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], bool]:
        """Returns a function that returns whether new tokens hold a text that ends the answer.

        `decode` returns the text of tokens, special ones included. Only the last tokens are
        decoded, since it is called after each token.
        """
        longest = max((len(text.encode()) for text in self.until), default=0) + _BYTES_TOO_MANY

        def holds(tokens: Sequence[int]) -> bool:
            if not self.until:
                return False
            written = decode(tokens[-longest:])
            return any(text in written for text in self.until)

        return holds

    def cut(self, answer: str) -> str:
        """Returns an answer up to the first text that ends it."""
        for text in self.until:
            answer = answer.partition(text)[0]
        return answer
