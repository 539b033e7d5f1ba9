"""What a client asks for: the bodies of `/v1/chat/completions` and `/v1/completions`.

Fields that would change the answer and that are not supported are refused; all others that are not
known are ignored. This module does not import torch.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from engine.tools.chat.conversation import Message
from engine.tools.serve.request_fields import Fields, RequestFault, list_of, quoted

MOST_CHOICES = 8
MOST_ROWS = 64
"""Answers that one request may ask for: its prompts times its choices."""
MOST_STOPS, LONGEST_STOP = 4, 256
MOST_TOP = 20
MOST_TOKENS = 1 << 17
USUAL_CHAT_TOKENS, USUAL_TOKENS = 4096, 16
"""Longest answer where the request names none. The model's longest row also bounds it."""
HOTTEST = 5.0
_SEEDS = 1 << 32
_LARGEST = (1 << 63) - 1

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "echo": (False,),
    "suffix": ("",),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": (),
    "json_schema": (),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields of OpenAI, vLLM and llama.cpp that would change the answer, with values that do not."""


@dataclass(frozen=True)
class AnswerRequest:
    """A request whose fields were checked. It is a chat if it has messages."""

    model: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    choices: int
    stops: tuple[str, ...]
    is_stream: bool
    has_usage: bool
    """Whether a stream ends with its usage."""
    top_logprobs: int | None
    """Number of the likeliest tokens to name beside each token; None for no log-probabilities."""
    messages: list[Message] = field(default_factory=list)
    prompts: list[str | list[int]] = field(default_factory=list)

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def rows(self) -> int:
        """Number of answers that are asked for."""
        return self.choices * max(1, len(self.prompts))


def chat_request(body: dict[str, Any]) -> AnswerRequest:
    """Returns what the body of a chat asks for. Raises RequestFault."""
    fields = Fields(body)
    has_logprobs = fields.switch("logprobs")
    top = fields.whole("top_logprobs", 0, 0, MOST_TOP)
    if top and not has_logprobs:
        raise RequestFault("top_logprobs needs logprobs: true.", "top_logprobs")
    longest = fields.whole("max_tokens", USUAL_CHAT_TOKENS, 1, MOST_TOKENS)
    longest = fields.whole("max_completion_tokens", longest, 1, MOST_TOKENS)
    return AnswerRequest(
        **_common(fields),
        max_tokens=longest,
        top_logprobs=top if has_logprobs else None,
        messages=_messages(fields.get("messages")),
    )


def completion_request(body: dict[str, Any]) -> AnswerRequest:
    """Returns what the body of a completion asks for. Raises RequestFault."""
    fields = Fields(body)
    top = None
    # true and false are OpenAI's form for a chat; some clients send false here.
    if fields.get("logprobs") not in (None, False):
        top = fields.whole("logprobs", 0, 0, MOST_TOP)
    request = AnswerRequest(
        **_common(fields),
        max_tokens=fields.whole("max_tokens", USUAL_TOKENS, 1, MOST_TOKENS),
        top_logprobs=top,
        prompts=_prompts(fields.get("prompt")),
    )
    if request.rows > MOST_ROWS:
        raise RequestFault(
            f"prompt: {request.rows} answers are asked for, and {MOST_ROWS} are the most of one "
            "request; divide it.",
            "prompt",
        )
    return request


def _common(fields: Fields) -> dict[str, Any]:
    """Returns the fields that both forms have."""
    for name, neutral in _NEUTRAL.items():
        fields.refuse_unless_neutral(name, neutral)
    model = fields.text("model")
    choices = fields.whole("n", 1, 1, MOST_CHOICES)
    fields.refuse_unless_neutral("best_of", (1, choices))
    is_stream = fields.switch("stream")
    seed = fields.get("seed")
    if seed is None:
        seed = secrets.randbelow(_SEEDS)
    return {
        "model": model,
        "temperature": fields.number("temperature", 1.0, 0.0, HOTTEST),
        "top_p": fields.number("top_p", 1.0, 0.0, 1.0, is_open=True),
        "top_k": max(0, fields.whole("top_k", 0, -1, MOST_TOKENS)),  # vLLM's -1 is all, too
        "min_p": fields.number("min_p", 0.0, 0.0, 1.0),
        "seed": Fields({"seed": seed}).whole("seed", 0, -_LARGEST, _LARGEST) % _SEEDS,
        "choices": choices,
        "stops": _stops(fields.get("stop")),
        "is_stream": is_stream,
        "has_usage": _has_usage(fields.get("stream_options"), is_stream),
    }


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if stops is None or stops == []:
        return ()
    if not list_of(stops, str) or len(stops) > MOST_STOPS:
        raise RequestFault(
            f"stop: {quoted(value)} is not a text or a list of up to {MOST_STOPS} texts.", "stop"
        )
    if not all(0 < len(stop) <= LONGEST_STOP for stop in stops):
        raise RequestFault(f"stop: each text has 1 to {LONGEST_STOP} characters.", "stop")
    return tuple(stops)


def _has_usage(options: Any, is_stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict) or not is_stream:
        raise RequestFault(
            "stream_options: these are settings of an answer with stream: true.", "stream_options"
        )
    return Fields(options).switch("include_usage")


# ---------------------------------------------------------------------- prompts


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise RequestFault("messages is missing; it is a list of messages.", "messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(value)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise RequestFault(f"{where}: {quoted(message)} is not a message.", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestFault(
            f"{where}.role: {quoted(role)} is not system, developer, user or assistant.", where
        )
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise RequestFault(f"{where}.{name}: this is not supported here; leave it out.", where)
    return {"role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    """Returns the text of a message, which may come in parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestFault(f"{where}: {quoted(content)} is not a text or a list of parts.", where)
    texts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise RequestFault(f"{where}: only parts of text are supported here.", where)
        texts.append(part["text"])
    return "".join(texts)


def _prompts(value: Any) -> list[str | list[int]]:
    """Returns the prompts: one or several, each as a text or as token ids."""
    if isinstance(value, str):
        return [value]
    if list_of(value, int):
        return [value]
    if list_of(value, str):
        return list(value)
    if list_of(value, list) and all(list_of(each, int) for each in value):
        return list(value)
    raise RequestFault(
        "prompt is missing; it is a text, a list of texts, or a list of token ids.", "prompt"
    )
