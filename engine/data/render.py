"""A conversation as the text that the tokenizer's own chat template makes of it, with the spans
that carry loss.

No `{% generation %}` block is needed. A turn's span runs from the end of the generation prompt (the
template applied to everything before the turn) to the end of the turn (the template applied up to
and with it), so what is trained is what the model will be asked to write, its end-of-turn token
included. Where the template rewrites earlier turns, as those do that drop earlier reasoning, the
whole text does not hold what the model would have seen; then every turn becomes a text of its own,
rendered as it would be when that answer is due.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from engine.data.dates import fixed_date
from engine.data.formats import Conversation, Message
from engine.data.special import ControlTokens, ReservedText, mentioned

_PROBES = ("A1b2C", "Z9y8X")
_ROLES = ("user", "assistant", "system", "tool")
_RESERVED = "the text holds private-use characters that stand in for special tokens here"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Rendered:
    """One document. `spans` are character ranges that carry loss; `answer` is the span of the last
    answer. `framed` says that the text holds its own begin and end tokens already, as a template
    writes them, `typed` that characters in it stand in for special tokens that a person typed,
    `divided` that a text longer than a row goes on in the next.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    answer: tuple[int, int] | None
    framed: bool = True
    typed: bool = False
    divided: bool = False


@dataclass(frozen=True)
class Skipped:
    """Why an example is left out: `reason` is counted in the summary, `detail` is shown for the
    first one.
    """

    reason: str
    detail: str = ""


@dataclass(frozen=True)
class _Turn:
    """An answer in `text`, the template's output up to and with that answer."""

    text: str
    start: int
    end: int


_Chat = tuple[list[Message], list[Any] | None]
"""Messages, and the tools that their template is told of."""


def warning_sentences(warnings: Counter[str]) -> list[str]:
    """What a person should know about the conversations that were rendered."""
    return [
        f"{text} ({'once' if count == 1 else f'{count:,} times'})."
        for text, count in warnings.items()
    ]


class ChatRenderer:
    """Renders conversations in batches. `warnings` counts what a person should know."""

    def __init__(self, tokenizer: Any, train_on: str):
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.warnings: Counter[str] = Counter()
        self.control = ControlTokens(tokenizer, self._written() if self.available else "")

    def warn(self, text: str, times: int = 1) -> None:
        """A person should know `text`, and how often it came up."""
        self.warnings[text] += times

    def take_warnings(self) -> Counter[str]:
        """Those since the last call."""
        found, self.warnings = self.warnings, Counter()
        return found

    @property
    def available(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def render(self, conversations: list[Conversation]) -> list[list[Rendered] | Skipped]:
        """Each conversation as its documents: one, or one a turn where the template rewrites
        earlier turns.
        """
        jobs = [self._job(conversation) for conversation in conversations]
        through: list[_Chat] = []
        before: list[_Chat] = []
        for job in jobs:
            if isinstance(job, Skipped):
                continue
            messages, tools, answers, whole = job
            through.extend((messages[: i + 1], tools) for i in answers)
            if whole:
                through.append((messages, tools))
            before.extend((messages[:i], tools) for i in answers)
        through_texts = iter(self._apply(through, generation=False))
        before_texts = iter(self._apply(before, generation=True))
        rendered: list[list[Rendered] | Skipped] = []
        for job in jobs:
            if isinstance(job, Skipped):
                rendered.append(job)
                continue
            messages, tools, answers, whole = job
            ends = [next(through_texts) for _ in answers]
            full = next(through_texts) if whole else (ends[-1] if ends else None)
            prompts = [next(before_texts) for _ in answers]
            rendered.append(self._documents((messages, tools), answers, ends, prompts, full))
        return rendered

    def question(self, text: str) -> str | Skipped:
        """A person's text as a conversation of its own, up to where the answer is due; special
        tokens stood in for.
        """
        try:
            return self._apply(
                [([{"role": "user", "content": self._stand_in(text, answer=False)}], None)],
                generation=True,
            )[0]
        except ReservedText:
            return Skipped(_RESERVED)

    def plain(self, text: str) -> str | Skipped:
        """A person's text with its special tokens stood in for."""
        try:
            return self._stand_in(text, answer=False)
        except ReservedText:
            return Skipped(_RESERVED)

    # ------------------------------------------------------------------ one conversation

    def _job(
        self, conversation: Conversation
    ) -> tuple[list[Message], list[Any] | None, list[int], bool] | Skipped:
        """Messages and tools with typed special tokens stood in for, the answers to find, whether
        the whole is wanted.
        """
        try:
            messages = [
                self._stand_in(message, message["role"] == "assistant")
                for message in conversation.messages
            ]
            tools = self._stand_in(conversation.tools, answer=False)
        except ReservedText:
            return Skipped(_RESERVED)
        answers = [
            i
            for i, m in enumerate(messages)
            if m["role"] == "assistant" and i >= conversation.context
        ]
        if self.train_on == "all":
            last = answers[-1:] if not answers or answers[-1] == len(messages) - 1 else []
            return messages, tools, last, not last
        return messages, tools, answers, False

    def _stand_in(self, value: Any, answer: bool) -> Any:
        replaced = self.control.stand_in(value, answer)
        if replaced != value:
            self.warnings["Special tokens that somebody typed into a turn stay text"] += 1
        return replaced

    def _documents(
        self,
        chat: _Chat,
        answers: list[int],
        ends: list[str | Skipped],
        prompts: list[str | Skipped],
        full: str | Skipped | None,
    ) -> list[Rendered] | Skipped:
        if full is None:
            return Skipped("there is no assistant turn")
        if isinstance(full, Skipped):
            return full
        turns: list[_Turn] = []
        for i, text, prompt in zip(answers, ends, prompts):
            turn = text if isinstance(text, Skipped) else self._turn(chat, i, text, prompt)
            if isinstance(turn, Skipped):
                return turn
            turns.append(turn)
        answer = (turns[-1].start, turns[-1].end) if turns else None
        if self.train_on == "all":
            return [self._rendered(full, ((0, len(full)),), answer)]
        if all(full.startswith(turn.text) for turn in turns):
            return [self._rendered(full, tuple((turn.start, turn.end) for turn in turns), answer)]
        self.warnings[
            "A conversation is trained one turn at a time, because the chat template rewrites "
            "earlier turns when more follow"
        ] += 1
        return [self._rendered(t.text, ((t.start, t.end),), (t.start, t.end)) for t in turns]

    def _rendered(
        self, text: str, spans: tuple[tuple[int, int], ...], answer: tuple[int, int] | None
    ) -> Rendered:
        return Rendered(text, spans, answer, typed=self.control.stands_in(text))

    def _turn(self, chat: _Chat, i: int, text: str, prompt: str | Skipped) -> _Turn | Skipped:
        if isinstance(prompt, str) and text.startswith(prompt):
            start = len(prompt)
        else:
            start = self._start_by_content(chat, i, text)
            if start is None:
                return Skipped("the chat template does not show where the answer begins")
            if isinstance(prompt, str):
                self.warnings[
                    "The chat template renders an answer in another way than its generation prompt "
                    "begins it; it is trained as rendered"
                ] += 1
        messages, written = chat[0], _without_space(text[start:])
        if _without_space(str(messages[i].get("content") or "")) not in written:
            return Skipped(
                "the chat template leaves out part of the answer",
                "reasoning inside the answer is often dropped; use a template that keeps it",
            )
        for key in _REASONING_KEYS:
            if _without_space(str(messages[i].get(key) or "")) not in written:
                return Skipped(
                    "the chat template leaves out the reasoning of the answer",
                    f"remove the {key} or use a template that keeps it",
                )
        for call in messages[i].get("tool_calls") or ():
            function = call.get("function", call)
            if _without_space(str(function.get("name") or "")) not in written:
                return Skipped(
                    "the chat template leaves out the tool calls of the answer",
                    "use a model whose chat template writes tool_calls",
                )
        return _Turn(text, start, self._end(text, start))

    def _end(self, text: str, start: int) -> int:
        """White space after the end-of-turn token is the template's, not something to learn to
        write.
        """
        bare = text[start:].rstrip()
        if bare.endswith(self.control.special):
            return start + len(bare)
        self.warnings[
            "The chat template closes an answer without a special token, so the model may not "
            "learn where to stop"
        ] += 1
        return len(text)

    def _start_by_content(self, chat: _Chat, i: int, text: str) -> int | None:
        """Where answer `i` begins in `text`, found by putting two other contents in its place."""
        messages, tools = chat
        bare = {k: v for k, v in messages[i].items() if k not in (*_REASONING_KEYS, "tool_calls")}
        first, second = (
            self._apply([([*messages[:i], {**bare, "content": probe}], tools)], generation=False)[0]
            for probe in _PROBES
        )
        if isinstance(first, Skipped) or isinstance(second, Skipped):
            return None
        header = os.path.commonprefix([first, second])
        trailer = os.path.commonprefix([first[::-1], second[::-1]])[::-1]
        regular = all(
            probed == header + probe + trailer for probed, probe in zip((first, second), _PROBES)
        )
        if not regular or not text.startswith(header) or not text.endswith(trailer):
            return None
        return len(header)

    # ------------------------------------------------------------------ the template

    def _written(self) -> str:
        """What the template mentions, and what it writes around turns: a role's marker may be put
        together from pieces and the role's name.
        """
        turns: list[Message] = [{"role": role, "content": _PROBES[0]} for role in _ROLES]
        texts = self._apply(
            [([*before, turn], None) for turn in turns for before in ([], turns[:1])],
            generation=True,
        )
        templates = self.tokenizer.chat_template
        sources = templates.values() if isinstance(templates, dict) else [templates]
        return "\n".join(
            [*map(mentioned, sources), *(text for text in texts if isinstance(text, str))]
        )

    def _apply(self, chats: list[_Chat], generation: bool) -> list[str | Skipped]:
        results: list[str | Skipped] = [
            Skipped("the chat template refuses an empty conversation")
        ] * len(chats)
        places = [place for place, (messages, _) in enumerate(chats) if messages]
        # The library takes one list of tools for all conversations of a call.
        for _, group in itertools.groupby(places, key=lambda place: id(chats[place][1])):
            wanted = list(group)
            for place, text in zip(
                wanted, self._call([chats[place] for place in wanted], generation)
            ):
                results[place] = text
        return results

    def _call(self, chats: list[_Chat], generation: bool) -> list[str | Skipped]:
        try:
            return self.tokenizer.apply_chat_template(
                [messages for messages, _ in chats],
                tools=chats[0][1],
                tokenize=False,
                add_generation_prompt=generation,
                **fixed_date(self.tokenizer, chats[0][1]),
            )
        except Exception as error:  # templates raise what they like
            if len(chats) == 1:
                return [
                    Skipped("the chat template refuses the conversation", str(error).rstrip("."))
                ]
            return [self._call([chat], generation)[0] for chat in chats]


def _without_space(text: str) -> str:
    return "".join(text.split())
