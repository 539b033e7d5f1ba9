"""The answers to one request as they grow, and their forms in OpenAI's API."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.tools.serve.answer_request import AnswerRequest
from engine.tools.serve.answer_text import AnswerText
from engine.tools.serve.token_texts import TokenTexts

IMPOSSIBLE = -9999.0
"""OpenAI's value for the log-probability of a token that is as good as impossible."""


class Token(Protocol):
    """Members of a `SampledToken` that answers use."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    finish: str | None


@dataclass(frozen=True)
class Gain:
    """What an answer has gained: text, and the tokens that begin in it or before."""

    text: str
    tokens: Sequence[Token]
    starts: Sequence[int]
    """Where each of the tokens begins in the whole text."""
    finish: str | None


class Answer:
    """One answer. Its tokens are taken until it is over, which may be before its last token."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self._text = AnswerText(tokenizer, stops)
        self._tokens: list[Token] = []
        self._given = 0
        self.is_over = False
        self.count = 0
        """Number of tokens, the end token left out."""

    def take(self, drawn: Token) -> Gain:
        """Takes the next token; returns what it adds."""
        if drawn.finish == "stop":  # an end token, which is no part of the answer
            return self._gain(self._text.end("stop"))
        self._tokens.append(drawn)
        self.count += 1
        piece = self._text.add(drawn.token)
        if piece.finish is None and drawn.finish is not None:
            end = self._text.end(drawn.finish)
            end.text = piece.text + end.text
            piece = end
        return self._gain(piece)

    def _gain(self, piece: Any) -> Gain:
        first, self._given = self._given, max(self._given, piece.tokens)
        self.is_over = piece.finish is not None
        return Gain(
            piece.text,
            self._tokens[first : self._given],
            self._text.starts(first, self._given),
            piece.finish,
        )


class Reply:
    """The forms in which the answers to `request` are sent back."""

    def __init__(self, request: AnswerRequest, tokenizer: Any, prompt_tokens: int):
        self._request = request
        self._texts = TokenTexts(tokenizer)
        self._prompt_tokens = prompt_tokens
        kind = "chat.completion" if request.is_chat else "text_completion"
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": request.model,
        }
        self.answers = [Answer(tokenizer, request.stops) for _ in range(request.rows)]

    def whole(self, gains: list[list[Gain]]) -> dict[str, Any]:
        """Returns the body of an answer that is sent at once, from what each has gained."""
        choices = [self._choice(place, each) for place, each in enumerate(gains)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks with which a stream begins."""
        if not self._request.is_chat:
            return []
        opening = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": place, "delta": opening, "logprobs": None, "finish_reason": None})
            for place in range(len(self.answers))
        ]

    def chunk(self, place: int, gain: Gain) -> dict[str, Any] | None:
        """Returns the chunk of a stream for what answer `place` has gained, or None for nothing."""
        if not gain.text and not gain.tokens and gain.finish is None:
            return None
        choice: dict[str, Any] = {"index": place}
        if self._request.is_chat:
            choice["delta"] = {"content": gain.text} if gain.text else {}
        else:
            choice["text"] = gain.text
        choice["logprobs"] = self._logprobs([gain])
        choice["finish_reason"] = gain.finish
        return self._chunk(choice)

    def last_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks with which a stream ends, behind those of its answers."""
        if not self._request.has_usage:
            return []
        return [{**self._chunk(), "usage": self._usage()}]

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._request.is_chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": list(choices)}
        return {**chunk, "usage": None} if self._request.has_usage else chunk

    def _choice(self, place: int, gains: list[Gain]) -> dict[str, Any]:
        text = "".join(gain.text for gain in gains)
        choice: dict[str, Any] = {"index": place}
        if self._request.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(gains)
        choice["finish_reason"] = gains[-1].finish
        return choice

    def _usage(self) -> dict[str, int]:
        written = sum(answer.count for answer in self.answers)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self._prompt_tokens + written,
        }

    # ------------------------------------------------------------------ log-probabilities

    def _logprobs(self, gains: list[Gain]) -> dict[str, Any] | None:
        most = self._request.top_logprobs
        if most is None:
            return None
        tokens = [token for gain in gains for token in gain.tokens]
        if self._request.is_chat:
            return {"content": [self._entry(each, most) for each in tokens], "refusal": None}
        return {
            "tokens": [self._texts.text(each.token) for each in tokens],
            "token_logprobs": [_finite(each.logprob) for each in tokens],
            "top_logprobs": [self._likeliest(each, most) for each in tokens] if most else None,
            "text_offset": [start for gain in gains for start in gain.starts],
        }

    def _likeliest(self, drawn: Token, most: int) -> dict[str, float]:
        top = drawn.top[:most]
        return {self._texts.text(token): _finite(logprob) for token, logprob in top}

    def _entry(self, drawn: Token, most: int) -> dict[str, Any]:
        top = [self._named(token, logprob) for token, logprob in drawn.top[:most]]
        return {**self._named(drawn.token, drawn.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text, its_bytes = self._texts.text(token), self._texts.bytes_of(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": its_bytes}


def _finite(logprob: float) -> float:
    """Returns a log-probability as JSON can hold it."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
