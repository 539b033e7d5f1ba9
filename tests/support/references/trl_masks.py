"""Conversations for chat templates, and what TRL's training templates train of each answer."""

from __future__ import annotations

import copy
import functools
import json
import os
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast
from trl.data_utils import prepare_multimodal_messages

from tests.support.references.trl_pairs import as_published, as_trained

Message = dict[str, Any]
WANT_PARTS = ("idefics3", "llava_next", "smolvlm")
"""TRL gives the templates of models with images parts; these three take nothing else."""


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def answer(content: str, **keys: Any) -> Message:
    return {"role": "assistant", "content": content, **keys}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def call(number: int, tool: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": tool, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def result(number: int, content: str) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": f"call{number:05d}"}


def tool(name: str) -> dict[str, Any]:
    city = {"type": "string", "description": "Its name"}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    described = {"name": name, "description": f"Tells of {name}.", "parameters": parameters}
    return {"type": "function", "function": described}


def inline(thought: str, content: str) -> Message:
    return answer(f"<think>\n{thought}\n</think>\n\n{content}")


_TOOLS = [tool("weather"), tool("clock")]
_OSLO = call(1, "weather", city="Oslo")
Row = tuple[list[Message], "list[Any] | None"]
COMMON: dict[str, Row] = {
    "one": ([user("What is 2+2?"), answer("Four.")], None),
    "two": ([user("What is 2+2?"), answer("Four."), user("And 3+3?"), answer("Six.")], None),
    "system": ([system("Be kind."), user("Hi"), answer("Hello there.")], None),
    "three": (
        [
            *(system("Be kind."), user("Hi"), answer("Hello."), user("Who?"), answer("Me.")),
            *(user("Why?"), answer("So.\n\nIt is.")),
        ],
        None,
    ),
    "reasoning": ([user("2+2?"), answer("Four.", reasoning_content="2 and 2 are four.")], None),
    "reasoning twice": (
        [
            *(user("2+2?"), answer("Four.", reasoning_content="2 and 2.")),
            *(user("And 3+3?"), answer("Six.", reasoning_content="3 and 3.")),
        ],
        None,
    ),
    "inline": ([user("2+2?"), inline("2 and 2 are four.", "Four.")], None),
    "tools": ([user("Rain in Oslo?"), answer("I cannot know.")], _TOOLS),
    "call": (
        [user("Rain?"), answer("", tool_calls=[_OSLO]), result(1, "rain"), answer("It rains.")],
        _TOOLS,
    ),
    "text and call": (
        [
            *(system("Be brief."), user("Rain?"), answer("I look.", tool_calls=[_OSLO])),
            *(result(1, "rain"), answer("It rains."), user("Thanks"), answer("Welcome.")),
        ],
        _TOOLS,
    ),
    "code": ([user("  Code?\n"), answer("```python\nprint('é')\n```\n")], None),
}
"""Eleven conversations as most data sets have them."""
HARD: dict[str, Row] = {
    "several calls": (
        [
            user("Rain and time?"),
            answer("", tool_calls=[_OSLO, call(2, "clock", city="Malmö")]),
            *(result(1, "rain"), result(2, "noon"), answer("Rain at noon.")),
        ],
        _TOOLS,
    ),
    "calls in turn": (
        [
            user("Rain, then time?"),
            answer("", tool_calls=[_OSLO], reasoning_content="First the rain."),
            result(1, "rain"),
            answer("", tool_calls=[call(2, "clock", city="Oslo")], reasoning_content="Now time."),
            result(2, "noon"),
            answer("Rain at noon.", reasoning_content="Both are known."),
        ],
        _TOOLS,
    ),
    "nested arguments": (
        [
            user("Set it."),
            answer("", tool_calls=[call(1, "clock", city='a "b"', at={"h": [1, 2.5, True]}, n=0)]),
            *(result(1, '{"ok": true}'), answer("Done.")),
        ],
        _TOOLS,
    ),
    "no arguments": (
        [
            user("Time?"),
            answer("", tool_calls=[call(1, "clock")]),
            result(1, "noon"),
            answer("Noon."),
        ],
        _TOOLS,
    ),
    "an empty answer": (
        [user("Hi"), answer(""), user("Are you there?"), answer("Yes."), user("Ok"), answer("Ok.")],
        None,
    ),
    "reasoning before a call": (
        [
            user("Rain?"),
            answer("Let me see.", tool_calls=[_OSLO], reasoning_content="I must look."),
            *(result(1, "rain"), answer("It rains.", reasoning_content="The tool says so.")),
        ],
        _TOOLS,
    ),
    "parts": (
        [
            user([{"type": "text", "text": "Capital of "}, {"type": "text", "text": "Chile?"}]),
            answer("Santiago"),
        ],
        None,
    ),
    "tools without calls": (
        [
            system("Be brief."),
            user("Hi"),
            answer("Hello."),
            user("Rain?"),
            answer("I do not know."),
        ],
        _TOOLS,
    ),
    "odd characters": (
        [
            user("<b>?</b>\t{{ x }}"),
            answer("  日本 👩‍👧 {% raw %}\n\n  - a\n  - b  "),
            user(""),
            answer("&amp;"),
        ],
        None,
    ),
    "inline in each turn": (
        [
            *(system("Think."), user("2+2?"), inline("2 and 2.", "Four.")),
            *(user("3+3?"), inline("3 and 3.\n\nSix.", "Six.\n\nYes.")),
            *(user("4+4?"), inline("Eight.", "Eight.")),
        ],
        None,
    ),
    "reasoning in one turn": (
        [
            *(user("Hi"), answer("Hello."), user("2+2?")),
            *(answer("Four.", reasoning_content="2 and 2."), user("Ok"), answer("Good.")),
        ],
        None,
    ),
}
"""Eleven more: several calls, calls in turn, empty answers, parts, reasoning here and there."""


@dataclass(frozen=True)
class Asked:
    """An answer in TRL's training template, and the prompt for it in the published one."""

    loss_mask: list[int]
    """What TRL trains of the answer."""
    given: int
    """So many of these tokens are in the published prompt."""
    prompt: list[int]
    """The published prompt."""
    published: list[int]
    """The published text up to and including the answer."""
    next: int
    """The first token that the published template writes of a turn behind such an answer, or -1 if
    it leaves that turn out.
    """
    text: str
    """TRL's text up to and including the answer."""


def of_trl(family: str, messages: list[Message], tools: list[Any] | None, place: int) -> Asked:
    """Returns the answer at a place. Raises what the templates raise where they refuse it."""
    ours, theirs = (_that_calls(make(family)) for make in (as_published, as_trained))
    given = _given(family, messages, loss_mask=True)
    plain = _given(family, messages, loss_mask=False)
    seen = {"tools": tools, "add_generation_prompt": False}
    through = theirs.apply_chat_template(
        given[: place + 1], return_assistant_tokens_mask=True, return_dict=True, **seen
    )
    ids, mask = through["input_ids"], through["assistant_masks"]
    end = len(mask) - mask[::-1].index(1)
    begin = end - [*mask[:end][::-1], 0].index(0)
    before = plain[:place]
    prompt = ours.apply_chat_template(before, tools=tools, add_generation_prompt=True)["input_ids"]
    published = ours.apply_chat_template(plain[: place + 1], **seen)
    behind = _behind(family, "tool_calls" in plain[place])
    # Histories may differ, so what the prompt and the answer add to the turns before are compared.
    asked = _added(ours, before, tools, ours.decode(prompt))
    text = theirs.decode(ids)
    answered = _added(theirs, given[:place], tools, text)
    shared = os.path.commonprefix([asked, answered])  # noqa: RUF071  characters are what is wanted
    limit = len(text) - len(answered) + len(shared)
    count = 0
    while begin + count < end and len(theirs.decode(ids[: begin + count + 1])) <= limit:
        count += 1
    if not count:  # the template rewrites the turns before, as gpt-oss drops their reasoning
        ends = range(1, end - begin)
        whole = ours.decode(prompt)
        count = max((n for n in ends if whole.endswith(theirs.decode(ids[begin:][:n]))), default=0)
    return Asked(ids[begin:end], count, prompt, published["input_ids"], behind, text)


@functools.cache
def _behind(family: str, calls: bool) -> int:
    """Returns the first token of a person's turn behind an answer, or of a tool's behind a call."""
    answered = answer("", tool_calls=[_OSLO]) if calls else answer("Hello.")
    chat = [user("Hi"), answered, result(1, "rain") if calls else user("Oh")]
    tokenizer = _that_calls(as_published(family))
    texts = [
        tokenizer.apply_chat_template(_given(family, chat[:end], loss_mask=False))["input_ids"]
        for end in (2, 3)
    ]
    shared = len(os.path.commonprefix(texts))  # noqa: RUF071  of lists of tokens
    return texts[1][shared] if shared < len(texts[1]) else -1


def _added(
    tokenizer: PreTrainedTokenizerFast, before: list[Message], tools: list[Any] | None, text: str
) -> str:
    """Returns what a text adds to that of the turns before."""
    seen = tokenizer.apply_chat_template(before, tools=tools, tokenize=False)
    return text[len(os.path.commonprefix([seen, text])) :]  # noqa: RUF071


def _given(family: str, messages: list[Message], loss_mask: bool) -> list[Message]:
    """Returns messages as the training template or the published one of a family takes them:
    reasoning as a key if it knows the key, and in the content if it does not; arguments as text for
    templates that join text; parts for the models with images that want them.
    """
    found = [_as_given(family, message, loss_mask) for message in messages]
    return prepare_multimodal_messages(found) if family in WANT_PARTS else found


def _as_given(family: str, message: Message, loss_mask: bool) -> Message:
    given, content = dict(message), message["content"]
    if isinstance(content, list):
        given["content"] = "".join(part["text"] for part in content)
    elif message["role"] == "assistant" and "<think>" in content and knows_reasoning(family):
        thought, _, rest = content.removeprefix("<think>\n").partition("\n</think>\n\n")
        given |= {"content": rest, "reasoning_content": thought}
    elif loss_mask and "reasoning_content" in message and family.startswith("deepseek"):
        given |= inline(given.pop("reasoning_content"), content)
    joins = family == "deepseek_r1_distill" or (family == "deepseekv3" and not loss_mask)
    if joins and "tool_calls" in message:
        given["tool_calls"] = list(map(_with_text, message["tool_calls"]))
    return given


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a call whose arguments are JSON text."""
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": arguments}}


@functools.cache
def knows_reasoning(family: str) -> bool:
    """Returns whether a training template writes `reasoning_content`."""
    messages = [user("Hi"), answer("Hello", reasoning_content="Greet")]
    if family in WANT_PARTS:
        messages = prepare_multimodal_messages(messages)
    return "Greet" in as_trained(family).apply_chat_template(messages, tokenize=False)


def _that_calls(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose template takes no text for a null content: DeepSeek R1's writes
    calls behind a null content alone, and the library leaves that key out.
    """
    code = tokenizer.chat_template
    null = "message['content'] is none"
    if f"{null} %}}{{%- set ns.is_tool" not in code:
        return tokenizer
    found = copy.copy(tokenizer)
    calls = "(message['tool_calls'] and not message['content'])"
    found.chat_template = code.replace(null, calls).replace(
        "message['content'] is not none", f"not {calls}"
    )
    return found
