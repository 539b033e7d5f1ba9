"""The tokenizer's own chat template turns a conversation into text. Then the spans that carry loss
are found in the text.

- No `{% generation %}` block is needed. For each answer, the template is applied to all turns
  before the answer, with the generation prompt, and to all turns up to and including the answer.
  The second text adds the answer to the first. So the trained text is exactly what the model will
  have to generate, including the end-of-turn token.
- Some templates rewrite earlier turns, for example to drop earlier reasoning. The text of the whole
  conversation then differs from what the model would have seen. In that case every answer becomes a
  separate text, rendered as it would be when that answer is due.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.data.dates import fixed_date
from engine.data.special import ControlTokens, ReservedText, mentioned
from engine.examples.example import Conversation, Message

_PROBES = ("A1b2C", "Z9y8X")
"""Contents that occur in no template. They begin and end with different characters."""
_ROLES = ("user", "assistant", "system", "tool")
_RESERVED = "the text holds private-use characters that stand in for special tokens here"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Rendered:
    """A `Rendered` is the text of one document, with the character ranges that carry loss."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """These character ranges carry loss."""
    answer: tuple[int, int] | None
    """The last answer has this character range."""
    framed: bool = True
    """It is true when the text already has its begin and end tokens, as text from a template
    does.
    """
    typed: bool = False
    """It is true when characters in the text stand in for special tokens that a person typed."""
    divided: bool = False
    """It is true when a text that is longer than a row continues in the next row."""


@dataclass(frozen=True)
class Skipped:
    """A `Skipped` gives the reason why an example is left out. The summary counts each `reason`,
    and shows the `detail` of its first example.
    """

    reason: str
    detail: str = ""


_REFUSED_EMPTY = Skipped("the chat template refuses an empty conversation")


@dataclass(frozen=True)
class _Turn:
    """An answer at [start, end) of `text`, the template's output up to and including that
    answer.
    """

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class _Chat:
    """Messages, and the tools that the template receives."""

    messages: list[Message]
    tools: list[Any] | None

    def until(self, end: int) -> _Chat:
        """Returns the chat of the messages before place `end`."""
        return _Chat(self.messages[:end], self.tools)


@dataclass(frozen=True)
class _Job:
    """The work that the template has to do for one conversation."""

    chat: _Chat
    answers: list[int]
    """Indices of the messages whose answers must be found in the text."""
    whole: bool
    """Whether the text of the whole conversation is needed too. Otherwise the text ends with the
    last answer.
    """


@dataclass(frozen=True)
class _Texts:
    """The template's output for one job."""

    through: list[str | Skipped]
    """For each answer, the text up to and including it."""
    before: list[str | Skipped]
    """For each answer, the text before it, with the generation prompt."""
    full: str | Skipped | None
    """The text of the whole conversation, or up to its last answer; None if there is no answer and
    the whole is not needed.
    """


def warning_sentences(warnings: Counter[str]) -> list[str]:
    """Puts the warnings on rendered conversations into sentences."""
    sentences = []
    for text, count in warnings.items():
        times = "once" if count == 1 else f"{count:,} times"
        sentences.append(f"{text} ({times}).")
    return sentences


def common_prefix(one: str, other: str) -> str:
    """Returns the longest prefix that both texts share."""
    return os.path.commonprefix([one, other])  # noqa: RUF071  characters are what is wanted


class ChatRenderer:
    """Renders conversations in batches. `warnings` counts the warnings for the user."""

    def __init__(self, tokenizer: Any, train_on: str):
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.warnings: Counter[str] = Counter()
        self.control = ControlTokens(tokenizer, self._written() if self.available else "")

    def warn(self, text: str, times: int = 1) -> None:
        """Adds `times` to the count of the warning `text`."""
        self.warnings[text] += times

    def take_warnings(self) -> Counter[str]:
        """Returns the warnings since the last call."""
        found = self.warnings
        self.warnings = Counter()
        return found

    @property
    def available(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def render(self, conversations: list[Conversation]) -> list[list[Rendered] | Skipped]:
        """Renders each conversation as its documents: one, or one for each answer if the template
        rewrites earlier turns. Two calls of the template cover all conversations.
        """
        jobs = [self._job(conversation) for conversation in conversations]
        through: list[_Chat] = []
        before: list[_Chat] = []
        for job in jobs:
            if isinstance(job, Skipped):
                continue
            through.extend(job.chat.until(place + 1) for place in job.answers)
            if job.whole:
                through.append(job.chat)
            before.extend(job.chat.until(place) for place in job.answers)
        through_texts = iter(self._apply(through, generation=False))
        before_texts = iter(self._apply(before, generation=True))
        rendered: list[list[Rendered] | Skipped] = []
        for job in jobs:
            if isinstance(job, Skipped):
                rendered.append(job)
            else:
                rendered.append(self._documents(job, _taken(job, through_texts, before_texts)))
        return rendered

    def question(self, text: str) -> str | Skipped:
        """Returns a person's text as a conversation with one turn, up to where the answer is due.
        Stand-ins replace the special tokens in it.
        """
        asked = self.plain(text)
        if isinstance(asked, Skipped):
            return asked
        chat = _Chat([{"role": "user", "content": asked}], None)
        return self._apply([chat], generation=True)[0]

    def plain(self, text: str) -> str | Skipped:
        """Returns a person's text with stand-ins for the special tokens in it."""
        try:
            return self._stand_in(text, answer=False)
        except ReservedText:
            return Skipped(_RESERVED)

    # ------------------------------------------------------------------ one conversation

    def _job(self, conversation: Conversation) -> _Job | Skipped:
        """Replaces the special tokens that were typed, and finds the answers."""
        try:
            messages = [
                self._stand_in(message, message["role"] == "assistant")
                for message in conversation.messages
            ]
            tools = self._stand_in(conversation.tools, answer=False)
        except ReservedText:
            return Skipped(_RESERVED)
        chat = _Chat(messages, tools)
        answers = [
            place
            for place, message in enumerate(messages)
            if message["role"] == "assistant" and place not in conversation.untrained
        ]
        if self.train_on != "all":
            return _Job(chat, answers, whole=False)
        # All of the text is trained. Only an answer at its very end must be found, as the expected
        # answer to a held-out question.
        ends_with_answer = not answers or answers[-1] == len(messages) - 1
        last_answer = answers[-1:] if ends_with_answer else []
        return _Job(chat, last_answer, whole=not last_answer)

    def _stand_in(self, value: Any, answer: bool) -> Any:
        replaced = self.control.stand_in(value, answer)
        if replaced != value:
            self.warn("Special tokens that somebody typed into a turn stay text")
        return replaced

    def _documents(self, job: _Job, texts: _Texts) -> list[Rendered] | Skipped:
        full = texts.full
        if full is None:
            return Skipped("there is no assistant turn")
        if isinstance(full, Skipped):
            return full
        turns = self._turns(job, texts)
        if isinstance(turns, Skipped):
            return turns
        answer = (turns[-1].start, turns[-1].end) if turns else None
        if self.train_on == "all":
            return [self._rendered(full, ((0, len(full)),), answer)]
        if all(full.startswith(turn.text) for turn in turns):
            return [self._rendered(full, tuple((turn.start, turn.end) for turn in turns), answer)]
        self.warn(
            "A conversation is trained one turn at a time, because the chat template rewrites "
            "earlier turns when more follow"
        )
        documents = []
        for turn in turns:
            span = (turn.start, turn.end)
            documents.append(self._rendered(turn.text, (span,), span))
        return documents

    def _turns(self, job: _Job, texts: _Texts) -> list[_Turn] | Skipped:
        """Returns where each answer of a job is, or why the conversation is skipped."""
        turns: list[_Turn] = []
        for place, text, prompt in zip(job.answers, texts.through, texts.before):
            if isinstance(text, Skipped):
                return text
            turn = self._turn(job.chat, place, text, prompt)
            if isinstance(turn, Skipped):
                return turn
            turns.append(turn)
        return turns

    def _rendered(
        self, text: str, spans: tuple[tuple[int, int], ...], answer: tuple[int, int] | None
    ) -> Rendered:
        return Rendered(text, spans, answer, typed=self.control.stands_in(text))

    def _turn(self, chat: _Chat, place: int, text: str, prompt: str | Skipped) -> _Turn | Skipped:
        """Finds the answer at `place` of the messages in `text`, which ends with it."""
        start: int | None
        if isinstance(prompt, str) and text.startswith(prompt):
            start = len(prompt)
        else:
            start = self._start_by_content(chat, place, text)
            if start is None:
                return Skipped("the chat template does not show where the answer begins")
            if isinstance(prompt, str):
                self.warn(
                    "The chat template renders an answer in another way than its generation prompt "
                    "begins it; it is trained as rendered"
                )
        left_out = _left_out(chat.messages[place], text[start:])
        if left_out is not None:
            return left_out
        return _Turn(text, start, self._end(text, start))

    def _end(self, text: str, start: int) -> int:
        """Returns where the answer ends. White space after the end-of-turn token comes from the
        template, so the model need not learn to write it.
        """
        bare = text[start:].rstrip()
        if bare.endswith(self.control.special):
            return start + len(bare)
        self.warn(
            "The chat template closes an answer without a special token, so the model may not "
            "learn where to stop"
        )
        return len(text)

    def _start_by_content(self, chat: _Chat, place: int, text: str) -> int | None:
        """Returns where the answer at `place` begins in `text`, or None if that cannot be found.
        Two other contents are rendered in its place: the prefix that both texts share is the text
        before the answer.
        """
        answer = {
            key: value
            for key, value in chat.messages[place].items()
            if key not in (*_REASONING_KEYS, "tool_calls")
        }
        before = chat.messages[:place]
        chats = [_Chat([*before, answer | {"content": probe}], chat.tools) for probe in _PROBES]
        # Each is rendered in a separate call, because a template may refuse one and not the other.
        first, second = (self._apply([probed], generation=False)[0] for probed in chats)
        if isinstance(first, Skipped) or isinstance(second, Skipped):
            return None
        header = common_prefix(first, second)
        trailer = common_prefix(first[::-1], second[::-1])[::-1]
        is_regular = all(
            probed == header + probe + trailer for probed, probe in zip((first, second), _PROBES)
        )
        if not is_regular or not text.startswith(header) or not text.endswith(trailer):
            return None
        return len(header)

    # ------------------------------------------------------------------ the template

    def _written(self) -> str:
        """Returns the texts in the template's source, and the text that it writes around turns.
        Both are needed, because the template may compose a role's marker from pieces and the role's
        name.
        """
        turns: list[Message] = [{"role": role, "content": _PROBES[0]} for role in _ROLES]
        chats = []
        for turn in turns:
            chats.append(_Chat([turn], None))
            chats.append(_Chat([turns[0], turn], None))
        texts = self._apply(chats, generation=True)
        templates = self.tokenizer.chat_template
        sources = templates.values() if isinstance(templates, dict) else [templates]
        written = [text for text in texts if isinstance(text, str)]
        return "\n".join([*map(mentioned, sources), *written])

    def _apply(self, chats: list[_Chat], generation: bool) -> list[str | Skipped]:
        """Returns the template's text for each chat. `generation` adds the generation prompt."""
        results: list[str | Skipped] = [_REFUSED_EMPTY] * len(chats)
        places = [place for place, chat in enumerate(chats) if chat.messages]
        # The library takes one list of tools for all conversations in a call.
        for _, group in itertools.groupby(places, key=lambda place: id(chats[place].tools)):
            same_tools = list(group)
            texts = self._call([chats[place] for place in same_tools], generation)
            for place, text in zip(same_tools, texts):
                results[place] = text
        return results

    def _call(self, chats: list[_Chat], generation: bool) -> list[str | Skipped]:
        tools = chats[0].tools
        try:
            return self.tokenizer.apply_chat_template(
                [chat.messages for chat in chats],
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation,
                **fixed_date(self.tokenizer, tools),
            )
        except Exception as error:  # noqa: BLE001  a template may raise anything
            if len(chats) == 1:
                detail = str(error).rstrip(".")
                return [Skipped("the chat template refuses the conversation", detail)]
            # The template refuses one of the chats. Rendered one at a time, the others succeed.
            return [self._call([chat], generation)[0] for chat in chats]


def _taken(job: _Job, through: Iterator[str | Skipped], before: Iterator[str | Skipped]) -> _Texts:
    """Takes the texts of one job from the iterators over all texts, in the order in which `render`
    requested them.
    """
    through_answers = [next(through) for _ in job.answers]
    full: str | Skipped | None = None
    if job.whole:
        full = next(through)
    elif through_answers:
        full = through_answers[-1]
    return _Texts(through_answers, [next(before) for _ in job.answers], full)


def _left_out(answer: Message, written: str) -> Skipped | None:
    """Returns why an answer is skipped if its content, reasoning or calls are missing from
    `written`, the template's text for it; None if nothing is missing. White space is ignored.
    """
    written = _without_space(written)
    if _without_space(str(answer.get("content") or "")) not in written:
        return Skipped(
            "the chat template leaves out part of the answer",
            "reasoning inside the answer is often dropped; use a template that keeps it",
        )
    for key in _REASONING_KEYS:
        if _without_space(str(answer.get(key) or "")) not in written:
            return Skipped(
                "the chat template leaves out the reasoning of the answer",
                f"remove the {key} or use a template that keeps it",
            )
    for call in answer.get("tool_calls") or ():
        function = call.get("function", call)
        if _without_space(str(function.get("name") or "")) not in written:
            return Skipped(
                "the chat template leaves out the tool calls of the answer",
                "use a model whose chat template writes tool_calls",
            )
    return None


def _without_space(text: str) -> str:
    return "".join(text.split())
