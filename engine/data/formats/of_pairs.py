"""Formats of questions and answers, with what may stand before them."""

from __future__ import annotations

from engine.data.formats.example import Example, Pair
from engine.data.formats.format import SYSTEM, TOOLS, Format, is_text, is_text_or_turns
from engine.data.formats.row_parts import Parts
from engine.data.formats.turns import Turn, conversation, with_system

PROMPT = ("prompt", "question", "query", "input")
COMPLETION = ("completion", "response", "answer", "output")
BETWEEN = "\n\n"


def joined_prompt(parts: Parts) -> str:
    """Returns the user's turn, with what is added to it."""
    prompt = parts.text("prompt")
    extra = parts.optional_text("input")
    if parts.between is not None:
        return parts.between.join(text for text in (prompt, extra) if text)
    if not extra.strip():
        return prompt
    return f"{prompt}{BETWEEN}{extra}" if prompt.strip() else extra


def _read_alpaca(parts: Parts) -> Example | None:
    return _pair(parts, BETWEEN)


def _read_prompt_completion(parts: Parts) -> Example | None:
    values = (parts.value("prompt"), parts.value("completion"))
    if any(isinstance(value, list | tuple | dict) for value in values):
        return _of_turns(parts)
    return _pair(parts, "")


def _pair(parts: Parts, separator: str) -> Example | None:
    """Returns a question and its answer or, with earlier turns or tools, a conversation."""
    prompt = joined_prompt(parts)
    completion = parts.text("completion")
    system = parts.system()
    history = parts.history()
    tools = parts.tools()
    if not completion.strip():
        return None
    if not history and not tools:
        return Pair(prompt, completion, system, separator)
    asked = Turn({"role": "user", "content": prompt})
    answer = Turn({"role": "assistant", "content": completion})
    return conversation(with_system(system, [*history, asked, answer]), tools=tools)


def _of_turns(parts: Parts) -> Example | None:
    """Reads a row whose prompt or completion is a list of turns. The prompt is only context."""
    prompt = [*parts.history(), *parts.turns_or_text("prompt", "user")]
    before = with_system(parts.system(), prompt)
    after = parts.turns_or_text("completion", "assistant")
    return conversation(before + after, len(before), parts.tools()) if after else None


ALPACA = Format(
    name="alpaca",
    required={"prompt": ("instruction",), "completion": ("output", "response")},
    optional={
        "input": ("input", "context"),
        "system": SYSTEM,
        "history": ("history",),
        "tools": TOOLS,
    },
    read=_read_alpaca,
    looks_like=lambda first: is_text(first["prompt"]),
    needs="columns instruction and output",
)
PROMPT_COMPLETION = Format(
    name="prompt_completion",
    required={"prompt": PROMPT, "completion": COMPLETION},
    optional={"system": SYSTEM, "history": ("history",), "tools": TOOLS},
    read=_read_prompt_completion,
    looks_like=lambda first: is_text_or_turns(first["prompt"]),
    needs="columns prompt and completion",
    weak=frozenset({"query", "input", "output"}),
)
