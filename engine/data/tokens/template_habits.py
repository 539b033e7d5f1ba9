"""`Habits` finds out in what form a chat template wants what a conversation holds.

Templates differ: content is text or a list of parts, arguments are objects or JSON text, call ids
are free or have nine characters, reasoning has a key or is a part. No list of families has which.
The template writes a short conversation in each form, in the order in which the library itself
gives them, and the first form in whose text nothing is missing is that of all conversations.

- Where the usual form is written, nothing changes.
- Where no form helps, the usual one stays; a conversation is then refused, or what the template
  leaves out of it is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from engine.data.formats.example import Message
from engine.data.tokens.message_forms import REASONING_KEYS, Form, described, in_form, made_id
from engine.data.tokens.rendered import common_prefix
from engine.data.tokens.template_process import Chat, Refusal

_ASKED, _ANSWERED, _GIVEN, _THOUGHT = "Qu3sti0n", "Answ3r3d", "Syst3ms", "R3as0ns"
_RESULT, _OTHER_RESULT = "R3sult1", "R3sult2"
_CONTENTS = (_ASKED, _ANSWERED, _GIVEN, _THOUGHT, _RESULT)
_NAME, _OTHER_NAME, _KEY, _VALUE = "callname", "nextname", "argkey", "argvalue"
_ARGUMENTS = {_KEY: _VALUE}
_NO_ROLE = "stranger"
_LONG_ID = "call_0123456789abcdef"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "What it does.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}
_THINK = ("<think>", "</think>")
"""Tags around reasoning in data sets, for models of any family."""
_OPENS = re.compile(r"(<[^<>/\s][^<>\s]*>|\[[^\[\]/\s]+\])\s*\Z")
"""Matches an opening tag at the end of a text."""
_FILLS = ((), ("type",), ("type", "name"), ("type", "name", "id"))
"""Values of calls that a template may need and rows often lack: none first."""
_SHOWN_PART = re.compile(rf"""(text|thinking)\\?['"]:\s*\\?['"]({"|".join(_CONTENTS)})""")

Write = Callable[[list[Chat], bool], "list[str | Refusal]"]
"""A function by which a template writes chats unchanged. The second argument adds the beginning of
an answer.
"""


@dataclass(frozen=True)
class Reasoning:
    """How a template writes the reasoning of an answer."""

    form: Form
    opening: str
    """The text before the reasoning, in the prompt or in the answer."""
    closing: str
    """Text between the reasoning and the answer, without the white space behind it if
    the template leaves reasoning out.
    """
    in_prompt: bool
    """Whether the prompt for an answer ends with the opening."""
    is_left_out: bool = False
    """Whether the template leaves the reasoning out of every answer, though its prompt begins it,
    as DeepSeek R1's: a model writes it behind the prompt.
    """


class Habits:
    """The habits of one chat template, each found when it is first asked for. `write` has the
    template write chats, whose code is `code`; has_tools: the chats have tools.
    """

    def __init__(self, write: Write, code: str, has_tools: bool):
        self._write = write
        self._code = code
        self._tools = [_TOOL] if has_tools else None

    def in_form(self, chats: Sequence[Chat]) -> list[Chat]:
        """Returns chats in the form that the template wants."""
        made: dict[tuple[int, ...], Message] = {}
        found = []
        for chat in chats:
            tools = chat.tools
            if tools and self._describes_tools:
                tools = list(map(described, tools))
            found.append(Chat(in_form(chat.messages, self._form_of(chat.messages), made), tools))
        return found

    def apart(self, message: Message) -> Message:
        """Returns an answer whose reasoning is a key of its own and no part of its content, if the
        template writes reasoning. In a content it is between the template's own tags or between
        <think> and </think>, or before the closing tag alone where the prompt begins it.
        """
        content = message.get("content")
        if message["role"] != "assistant" or not isinstance(content, str):
            return message
        if any(message.get(key) for key in REASONING_KEYS) or not _may_have_tags(content):
            return message
        way = self.reasoning
        found = None if way is None else next(_inside(content, way), None)
        if way is None or found is None:
            return message
        thought, rest, is_own = found
        if way.is_left_out:
            # The row's own white space stays. A line end is reasoning that is empty.
            return message | {"content": rest, "reasoning_content": thought or "\n"}
        rest = rest.lstrip("\n")
        if thought:
            return message | {"content": rest, "reasoning_content": thought}
        # An empty block is what some templates themselves write where there is no reasoning.
        return message if is_own and not way.in_prompt else message | {"content": rest}

    @property
    def renames_developer(self) -> bool:
        """Whether a turn of the developer is written as the system's."""
        return self._with_developer.developer != "developer"

    @cached_property
    def reasoning(self) -> Reasoning | None:
        """How the template writes reasoning, or None if it does not."""
        turns = [_turn("user", _ASKED), _turn("assistant", _ANSWERED)]
        thought = [turns[0], turns[1] | {"reasoning_content": _THOUGHT}]
        forms = [
            replace(self._contents, reasoning=way)
            for way in ("reasoning_content", "reasoning", "part")
        ]
        texts = self._texts([(thought, form) for form in forms])
        (begun,) = self._texts([(turns[:1], self._contents)], generation=True)
        prompt = begun if isinstance(begun, str) else ""
        for form, text in zip(forms, texts):
            if _writes(text, _ASKED, _THOUGHT, _ANSWERED):
                return _reasoning_in(str(text), prompt, form)
        return self._left_out(turns, prompt)

    # ------------------------------------------------------------------ forms

    def _form_of(self, messages: Sequence[Message]) -> Form:
        """Returns the form of a conversation: what it does not hold is not tried."""
        roles = {message["role"] for message in messages}
        form = self._contents
        if "tool" in roles or any(message.get("tool_calls") for message in messages):
            form = self._calls
        if "developer" in roles:
            form = replace(form, developer=self._with_developer.developer)
        if any(message.get(key) for message in messages for key in REASONING_KEYS):
            way = self.reasoning
            form = form if way is None else replace(form, reasoning=way.form.reasoning)
        return form

    @cached_property
    def _contents(self) -> Form:
        """The form of contents."""
        turns = [_turn("user", _ASKED), _turn("assistant", _ANSWERED)]
        roles = [(), ("user", "assistant"), ("user",), ("assistant",)]
        forms = [Form(frozenset(each)) for each in roles]
        form = self._first(turns, forms, _ASKED, _ANSWERED) or forms[0]
        given = [_turn("system", _GIVEN), *turns]
        order = [form, Form(form.parts | {"system"})]
        if "user" in form.parts:
            order.reverse()
        return self._first(given, order, _GIVEN, _ASKED, _ANSWERED) or order[0]

    @cached_property
    def _calls(self) -> Form:
        """The form of conversations with calls."""
        contents = self._contents
        results = [contents, replace(contents, parts=contents.parts | {"tool"})]
        if "user" in contents.parts:
            results.reverse()
        forms = [
            replace(one, arguments_are_text=are_text, no_text=no_text, fills=fills)
            for fills, no_text, are_text, one in product(_FILLS, ("", None), (False, True), results)
        ]
        turns = [
            _turn("user", _ASKED),
            _turn("assistant", "", tool_calls=[_call(_NAME)]),
            _turn("tool", _RESULT),
            _turn("assistant", _ANSWERED),
        ]
        marks = (_NAME, _KEY, _VALUE)
        form = self._first(turns, forms, *marks, _RESULT) or self._first(turns, forms, *marks)
        return contents if form is None else self._with_ids(form)

    def _with_ids(self, form: Form) -> Form:
        """Returns the form of calls with its ids, names and missing arguments."""
        asked, answered = _turn("user", _ASKED), _turn("assistant", _ANSWERED)
        results = [_turn("tool", _RESULT), _turn("tool", _OTHER_RESULT)]
        calls = _turn("assistant", "", tool_calls=[_call(_NAME), _call(_OTHER_NAME)])
        several = [asked, calls, *results, answered]
        with_id = _turn("assistant", "", tool_calls=[{"id": _LONG_ID, **_call(_NAME)}])
        long_ids = [asked, with_id, results[0] | {"tool_call_id": _LONG_ID}, answered]
        no_arguments = {"type": "function", "function": {"name": _NAME}}
        bare = [asked, _turn("assistant", "", tool_calls=[no_arguments]), results[0], answered]
        full = replace(form, fills=_FILLS[-1])
        short = replace(full, short_ids=True)
        with_arguments = replace(full, fills=(*full.fills, "arguments"))
        plain, filled, long, shortened, without, emptied = self._texts(
            [
                (several, form),
                (several, full),
                (long_ids, full),
                (long_ids, short),
                (bare, short),
                (bare, replace(with_arguments, short_ids=True)),
            ]
        )
        # A template may look up by its id which tool gave a result, and not write the id.
        is_looked_up = isinstance(plain, str) and isinstance(filled, str) and plain != filled
        if is_looked_up and not any(made_id(number) in str(filled) for number in range(2)):
            form = full
        if isinstance(long, Refusal) and isinstance(shortened, str):
            form = replace(form, short_ids=True)
        if isinstance(without, Refusal) and isinstance(emptied, str):
            form = replace(form, fills=(*form.fills, "arguments"))
        return form

    @cached_property
    def _with_developer(self) -> Form:
        """The form of a developer's turn. It is the system's where the template does not know the
        role: it writes it as it would any word, leaves it out, or refuses it.
        """
        form = self._contents
        as_system = replace(form, developer="system")
        asked = _turn("user", _ASKED)
        own, nobody = ([_turn(role, _GIVEN), asked] for role in ("developer", _NO_ROLE))
        # Prompts are compared: some templates write a system turn with the last question alone.
        known, stranger, system = self._texts(
            [(own, form), (nobody, form), (own, as_system)], generation=True
        )
        if not _writes(system, _GIVEN, _ASKED):
            return form
        if not _writes(known, _GIVEN, _ASKED):
            return as_system
        if isinstance(stranger, Refusal):
            return form
        is_any_word = stranger.lower().replace(_NO_ROLE, "developer") == str(known).lower()
        return as_system if is_any_word else form

    @cached_property
    def _describes_tools(self) -> bool:
        """Whether tools must have a description and parameters: they are empty if a row gives
        none.
        """
        bare = {"type": "function", "function": {"name": _NAME}}
        asked = in_form([_turn("user", _ASKED)], self._contents, {})
        chats = [Chat(asked, [tool]) for tool in (bare, described(bare))]
        bared, filled = self._write(chats, False)
        return isinstance(bared, Refusal) and isinstance(filled, str) and _NAME in filled

    def _left_out(self, turns: list[Message], prompt: str) -> Reasoning | None:
        """Returns the way of a template whose prompt begins the reasoning that it leaves out."""
        opens = _OPENS.search(prompt)
        (plain,) = self._texts([(turns, self._contents)])
        if opens is None or isinstance(plain, Refusal):
            return None
        closing = _closing(opens[1])
        if closing not in self._code or not plain.startswith(prompt[: opens.start()] + _ANSWERED):
            return None
        opening = prompt[opens.start() :]
        return Reasoning(self._contents, opening, f"\n{closing}", True, is_left_out=True)

    # ------------------------------------------------------------------ texts

    def _first(self, turns: list[Message], forms: list[Form], *contents: str) -> Form | None:
        """Returns the first form in which the template writes all contents of the turns."""
        texts = self._texts([(turns, form) for form in forms])
        return next((form for form, text in zip(forms, texts) if _writes(text, *contents)), None)

    def _texts(
        self, asked: list[tuple[list[Message], Form]], generation: bool = False
    ) -> list[str | Refusal]:
        chats = [Chat(in_form(turns, form, {}), self._tools) for turns, form in asked]
        return self._write(chats, generation)


def _turn(role: str, content: str, **keys: Any) -> Message:
    return {"role": role, "content": content, **keys}


def _call(name: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": _ARGUMENTS}}


def _writes(text: str | Refusal, *contents: str) -> bool:
    """Returns whether a text has all contents, and shows no list or object of Python, or JSON of
    parts: a template that does so wants text.
    """
    if isinstance(text, Refusal) or str(_ARGUMENTS) in text or _SHOWN_PART.search(text):
        return False
    return all(each in text for each in contents)


def _may_have_tags(content: str) -> bool:
    return "</" in content or "[/" in content or "|>" in content or "<|" in content


def _closing(tag: str) -> str:
    """Returns the tag that closes <tag> or [TAG]."""
    return f"{tag[0]}/{tag[1:]}"


def _reasoning_in(text: str, prompt: str, form: Form) -> Reasoning:
    """Returns how reasoning stands in the text of an answer, whose prompt is `prompt`."""
    before, _, rest = text.partition(_THOUGHT)
    closing = rest.partition(_ANSWERED)[0]
    opening = before[len(common_prefix(before, prompt)) :]
    opens = _OPENS.search(prompt)
    in_prompt = not opening.strip() and opens is not None
    if opens is not None and in_prompt:
        opening = prompt[opens.start() :]
    return Reasoning(form, opening, closing, in_prompt)


def _inside(content: str, way: Reasoning) -> Iterator[tuple[str, str, bool]]:
    """Yields the reasoning in a content, the rest of it, and whether the tags are the template's
    own.
    """
    text = content.lstrip()
    own = (way.opening.strip(), way.closing.strip())
    for opening, closing in (own, _THINK):
        if opening and closing and text.startswith(opening):
            thought, found, rest = text.removeprefix(opening).partition(closing)
            if found:
                yield thought.strip("\n"), rest, opening == own[0]
    opening, closing = own
    if way.in_prompt and closing:
        thought, found, rest = text.partition(closing)
        if found and opening not in thought:
            yield thought.strip("\n"), rest, True
