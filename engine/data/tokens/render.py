"""The tokenizer's own chat template turns a conversation into text. Then the spans that carry loss
are found in the text.

- No `{% generation %}` block is needed: `answers.py` finds the answers. So the trained text is
  exactly what the model will have to generate, including the end-of-turn token.
- Some templates rewrite earlier turns, for example to drop earlier reasoning. The text of the whole
  conversation then differs from what the model would have seen. In that case every answer becomes a
  separate text, rendered as it would be when that answer is due.
- Some templates leave out a turn once the answer is there, for example a system turn that belongs
  to the last question. Then every answer becomes a separate text too: the prompt that the template
  makes for it, and the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from engine.data.formats.example import Conversation
from engine.data.tokens.answer_spans import Answer, Texts, starts_by_content
from engine.data.tokens.chat_template import ChatTemplate
from engine.data.tokens.dropped_turns import (
    DroppedTurns,
    dropped_by,
    is_blank,
    is_more_than_answer,
    missing_of_answer,
    renamed_tools,
    tool_names,
    unused_keys,
)
from engine.data.tokens.rendered import Handling, RejectedExample, Rendered, common_prefix
from engine.data.tokens.special_tokens import ControlTokens, ReservedText, written_by
from engine.data.tokens.template_process import Chat, Refusal
from engine.data.tokens.turn_ends import TurnEnds, turn_ends

_RESERVED = "the text holds private-use characters that stand in for special tokens here"
_NO_START = RejectedExample("the chat template does not show where the answer begins")
_MORE = RejectedExample(
    "the chat template writes more than the answer in its place",
    "use a model whose template writes each turn once, in order",
)
_REWRITES = (
    "A conversation is trained one turn at a time, because the chat template rewrites earlier "
    "turns when more follow"
)
_OTHERWISE = (
    "The chat template renders an answer in another way than its generation prompt begins it; it "
    "is trained as rendered"
)
_AFTER_PROMPT = (
    "An answer is trained after the prompt that the chat template makes for it, because the "
    "template leaves out an earlier turn once the answer is there"
)
_WEIGHTED = "The losses of an answer are multiplied by the weight that its row gives it"
_DEVELOPER = (
    "A developer turn is written as a system turn: the chat template does not know its role"
)
_TOOL_PROBE = "Q7x"
"""Beginning of names of tools that stand in no conversation."""
_MOST_WRITTEN = 2_000_000
"""Largest number of turns times answers of a conversation: for each answer, the template writes all
turns before it.
"""
_TOO_MANY_TURNS = RejectedExample(
    "the conversation has too many turns", "divide it into several rows"
)
_UNTRAINED = RejectedExample(
    "The row says that an answer is not trained, but preferences count all answers of a row",
    "remove that mark, or set train.objective to sft",
    refused=True,
)
_OPEN = (
    "Nothing that ends an answer is in the sums of preferences, as with TRL: the chat template "
    "leaves the last answer open"
)
NO_END = "The chat template ends an answer with no token, so the model cannot learn where to stop"


@dataclass(frozen=True)
class _Job:
    """The work that the template has to do for one conversation."""

    chat: Chat
    answers: list[int]
    """Indices of the messages whose answers must be found in the text."""
    whole: bool
    """Whether the text of the whole conversation is needed too. Otherwise the text ends with the
    last answer.
    """
    excluded: frozenset[int] = frozenset()
    """Answers that are not trained where all of the text is."""
    weights: Mapping[int, float] = field(default_factory=dict)
    """Answers that have a weight other than 1."""

    def weight(self, answer: Answer) -> float:
        """Returns by what the losses of an answer are multiplied."""
        return self.weights.get(answer.place, 1.0)

    @property
    def rendered(self) -> Chat:
        """The part of the chat that is written."""
        return self.chat if self.whole else self.chat.until(self.answers[-1] + 1)


@dataclass(frozen=True)
class _Written:
    """The template's output for one job."""

    answers: list[Texts]
    """One for each answer."""
    full: str | Refusal
    """The text of the whole conversation, or up to its last answer."""


class ChatRenderer:
    """Renders conversations in batches. `warnings` counts the warnings for the user."""

    def __init__(self, tokenizer: Any, handling: Handling):
        self.template = ChatTemplate(tokenizer)
        self.warnings: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._handling = handling

    @cached_property
    def control(self) -> ControlTokens:
        """The tokens that a template writes. To find them, the template must be run."""
        written = written_by(self.template) if self.available else ""
        handling = self._handling
        typed_are_text = handling.typed_tokens == "text"
        return ControlTokens(self._tokenizer, written, typed_are_text, handling.add_tokens)

    @cached_property
    def ends(self) -> TurnEnds:
        """What ends an answer. To find it, the template must be run."""
        if not self.available:
            return TurnEnds()
        control, own = self.control, self._handling.add_tokens
        return turn_ends(self.template, {*control.tokens, *own}, {*control.special, *own})

    @cached_property
    def _closing(self) -> tuple[str, ...]:
        """The tokens that may end an answer."""
        return (*self.control.special, *self.ends.tokens)

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
        return self.template.available

    def render(self, conversations: list[Conversation]) -> list[list[Rendered] | RejectedExample]:
        """Renders each conversation as its documents: one, or one for each answer if the template
        rewrites or leaves out earlier turns. Few calls of the template cover all conversations.
        Raises DataError when the template exceeds its limits.
        """
        jobs = [self._job(conversation) for conversation in conversations]
        todo = [job for job in jobs if isinstance(job, _Job)]
        written = self._written(todo)
        starts = iter(self._starts(todo, written))
        texts = iter(written)
        rendered: list[list[Rendered] | RejectedExample] = []
        for job in jobs:
            if isinstance(job, RejectedExample):
                rendered.append(job)
            else:
                own = next(texts)
                rendered.append(self._documents(job, own, [next(starts) for _ in own.answers]))
        return rendered

    def render_completions(
        self, conversations: list[Conversation]
    ) -> list[list[Rendered] | RejectedExample]:
        """Renders each conversation as one document, of which everything behind the prompt is
        marked: its first `context` messages with the generation prompt. That is what TRL's
        trainers of preferences sum: also the line end behind an end-of-turn token, and the turns of
        users and tools between several answers. Raises DataError when the template exceeds its
        limits.
        """
        jobs = [self._completion_job(conversation) for conversation in conversations]
        todo = [job for job in jobs if not isinstance(job, RejectedExample)]
        through = [chat.until(_first_answer(chat, context) + 1) for chat, context in todo]
        whole = iter(self.template.write([*(chat for chat, _ in todo), *through], generation=False))
        full = [next(whole) for _ in todo]
        before = [chat.until(context) for chat, context in todo]
        texts = zip(full, self.template.write(before, generation=True), whole)
        rendered: list[list[Rendered] | RejectedExample] = []
        for job in jobs:
            if isinstance(job, RejectedExample):
                rendered.append(job)
            else:
                rendered.append(self._completion(*job, *next(texts)))
        return rendered

    def _after_prompt(
        self, chat: Chat, context: int, full: str, before: str, through: str | Refusal
    ) -> str | None:
        """Returns the text of a completion after the prompt that the template makes for it, if that
        has a turn of which the text of the whole conversation, `full`, has nothing; otherwise None.
        The other arguments are those of `_completion`.
        """
        in_prompt = self._dropped(before, chat.until(context), None)
        in_text = self._dropped(full, chat, None)
        is_next = chat.messages[context]["role"] == "assistant"
        if in_prompt.context >= in_text.context or not is_next or not isinstance(through, str):
            return None
        (start,) = starts_by_content(self.template, [(chat, context, Texts(through, before))])
        if start is None or not full.startswith(through):
            return None
        return before + full[start:]

    def _completion_job(self, conversation: Conversation) -> tuple[Chat, int] | RejectedExample:
        """Returns a conversation with stand-ins, and the length of its prompt in messages."""
        chat = self._chat(conversation)
        if isinstance(chat, RejectedExample):
            return chat
        context = conversation.context
        answers = [
            place
            for place, message in enumerate(chat.messages)
            if place >= context and message["role"] == "assistant"
        ]
        if not answers or not context:
            return RejectedExample(
                "there is no assistant turn" if context else "there is no prompt"
            )
        if conversation.untrained.intersection(answers):
            return _UNTRAINED
        if all(is_blank(chat.messages[place]) for place in answers):
            return RejectedExample("the answer is empty")
        return chat, context

    def _completion(
        self,
        chat: Chat,
        context: int,
        full: str | Refusal,
        before: str | Refusal,
        through: str | Refusal,
    ) -> list[Rendered] | RejectedExample:
        """Returns a conversation as a document. `full` is its text, `before` that of its prompt,
        and `through` the text up to the first answer behind the prompt.
        """
        if isinstance(full, Refusal):
            return _refused(full)
        if isinstance(before, Refusal):
            return _refused(before)
        dropped = self._dropped(full, chat, None)
        if dropped.context and self._handling.dropped_turns == "refuse":
            return _dropped_turn(dropped)
        shown = (
            self._after_prompt(chat, context, full, before, through) if dropped.context else None
        )
        if shown is not None:
            self.warn(_AFTER_PROMPT)
            assert isinstance(through, str)  # or nothing would be shown
            behind = len(full) - len(through)
            full, through = shown, shown[: len(shown) - behind]
            dropped = self._dropped(full, chat, None)
        start = len(common_prefix(full, before))
        if start < len(before):
            self.warn(_OTHERWISE)
        written = self._without_special(full[start:])
        for message in chat.messages[context:]:
            if message["role"] == "assistant" and not is_blank(message):
                missing = missing_of_answer(message, written)
                if missing is not None:
                    return RejectedExample(*missing)
        self._warn(dropped)
        if not full.rstrip().endswith(self._closing) and chat.messages[-1]["role"] == "assistant":
            self.warn(_OPEN if self.ends.next_turns else NO_END)
        # A person is shown, and the model is asked for, the first answer alone.
        first = through if isinstance(through, str) and full.startswith(through) else full
        answer = (start, start + len(first[start:].rstrip()))
        rendered = self._rendered(full, {(start, len(full)): 1.0}, answer)
        return [replace(rendered, prompt=before)]

    def question(self, text: str) -> str | RejectedExample:
        """Returns a person's text as a conversation with one turn, up to where the answer is due.
        Stand-ins replace the special tokens in it.
        """
        asked = self.plain(text)
        if isinstance(asked, RejectedExample):
            return asked
        chat = Chat([{"role": "user", "content": asked}])
        written = self.template.write([chat], generation=True)[0]
        return _refused(written) if isinstance(written, Refusal) else written

    def plain(self, text: str) -> str | RejectedExample:
        """Returns a person's text with stand-ins for the special tokens in it."""
        try:
            return self._placeholder(text, answer=False)
        except ReservedText:
            return RejectedExample(_RESERVED)

    # ------------------------------------------------------------------ before the template

    def _chat(self, conversation: Conversation) -> Chat | RejectedExample:
        """Returns the turns and tools of a conversation, in which stand-ins replace the special
        tokens that were typed.
        """
        turns = self.template.apart(conversation.messages, bool(conversation.tools))
        try:
            messages = [
                self._placeholder(message, message["role"] == "assistant") for message in turns
            ]
            tools = self._placeholder(conversation.tools, answer=False)
        except ReservedText:
            return RejectedExample(_RESERVED)
        chat = Chat(messages, tools)
        for key in sorted(unused_keys(chat, self.template.sources)):
            self.warn(f"The key {key} of a turn is not used: the chat template does not name it")
        if self.template.renames_developer(chat):
            self.warn(_DEVELOPER)
        return chat

    def _job(self, conversation: Conversation) -> _Job | RejectedExample:
        """Chooses the answers of a conversation that are trained."""
        chat = self._chat(conversation)
        if isinstance(chat, RejectedExample):
            return chat
        messages = chat.messages
        if self._handling.train_on == "all":
            return self._job_of_all(conversation, chat)
        answers = self._trained_answers(conversation, chat)
        if isinstance(answers, RejectedExample):
            return answers
        if len(answers) * len(messages) > _MOST_WRITTEN:
            return _TOO_MANY_TURNS
        if answers[-1] + 1 < len(messages):
            self.warn(
                "A turn behind the last trained answer is left out", len(messages) - answers[-1] - 1
            )
        weights = {
            place: weight for place, weight in conversation.weights.items() if place in answers
        }
        return self._weighted(_Job(chat, answers, whole=False, weights=weights))

    def _job_of_all(self, conversation: Conversation, chat: Chat) -> _Job | RejectedExample:
        """All of the text is trained, except the answers that the row excludes. An answer at the
        very end must be found too, as the expected answer to a validation question.
        """
        if not chat.messages:
            return RejectedExample("there is no turn")
        excluded = frozenset(
            place for place in conversation.untrained if chat.messages[place]["role"] == "assistant"
        )
        last = len(chat.messages) - 1
        ends_with_answer = chat.messages[last]["role"] == "assistant"
        is_expected = ends_with_answer and last >= conversation.context
        weights = conversation.weights
        answers = sorted({*excluded, *weights, *([last] if is_expected else [])})
        if len(answers) * len(chat.messages) > _MOST_WRITTEN:
            return _TOO_MANY_TURNS
        return self._weighted(_Job(chat, answers, last not in answers, excluded, weights))

    def _weighted(self, job: _Job) -> _Job:
        """Returns the job, and the number of its answers with a weight of their own."""
        if job.weights:
            self.warn(_WEIGHTED, len(job.weights))
        return job

    def _trained_answers(
        self, conversation: Conversation, chat: Chat
    ) -> list[int] | RejectedExample:
        """Returns the places of the answers to train on."""
        places = [
            place
            for place, message in enumerate(chat.messages)
            if message["role"] == "assistant" and place >= conversation.context
        ]
        if not places:
            return RejectedExample("there is no assistant turn")
        wanted = [place for place in places if place not in conversation.untrained]
        if len(wanted) < len(places):
            self.warn(
                "An answer is not trained, because its row says so", len(places) - len(wanted)
            )
        if not wanted:
            return RejectedExample("the row says that none of its answers is trained")
        answers = [place for place in wanted if not is_blank(chat.messages[place])]
        if len(answers) < len(wanted):
            self.warn("An answer without text is not trained", len(wanted) - len(answers))
        return answers or RejectedExample("the answer is empty")

    def _placeholder(self, value: Any, answer: bool) -> Any:
        replaced = self.control.placeholder(value, answer)
        if replaced != value:
            self.warn("Special tokens that somebody typed into a turn stay text")
        return replaced

    # ------------------------------------------------------------------ the template

    def _written(self, jobs: list[_Job]) -> list[_Written]:
        """Has the template write everything that the jobs need, in two calls."""
        through: list[Chat] = []
        before: list[Chat] = []
        for job in jobs:
            through.extend(job.chat.until(place + 1) for place in job.answers)
            if job.whole:
                through.append(job.chat)
            before.extend(job.chat.until(place) for place in job.answers)
        through_texts = iter(self.template.write(through, generation=False))
        before_texts = iter(self.template.write(before, generation=True))
        found = []
        for job in jobs:
            answers = [Texts(next(through_texts), next(before_texts)) for _ in job.answers]
            full = next(through_texts) if job.whole else answers[-1].through
            found.append(_Written(answers, full))
        return found

    def _starts(self, jobs: list[_Job], written: list[_Written]) -> Iterator[int | None]:
        """Yields where each answer of the jobs begins in its text, or None if that is not found."""
        asked = []
        for job, own in zip(jobs, written):
            for place, texts in zip(job.answers, own.answers):
                if texts.prompt is None:
                    asked.append((job.chat, place, texts))
        by_content = iter(starts_by_content(self.template, asked) if asked else [])
        for own in written:
            for texts in own.answers:
                yield next(by_content) if texts.prompt is None else len(texts.prompt)

    # ------------------------------------------------------------------ after the template

    def _documents(
        self, job: _Job, written: _Written, starts: list[int | None]
    ) -> list[Rendered] | RejectedExample:
        if isinstance(written.full, Refusal):
            return _refused(written.full)
        answers = self._answers(job, written, starts)
        if isinstance(answers, RejectedExample):
            return answers
        full = written.full if job.whole else answers[-1].text
        end = None if job.whole else job.answers[-1]
        dropped = self._dropped(full, job.rendered, end)
        is_rewritten = not all(full.startswith(answer.text) for answer in answers)
        is_whole = self._handling.train_on == "all" or not is_rewritten
        if is_whole and dropped.context and self._handling.dropped_turns == "refuse":
            return _dropped_turn(dropped)
        if self._handling.train_on == "all":
            self._warn(dropped)
            return self._all_but(job, full, answers)
        if is_rewritten:
            self.warn(_REWRITES)
        elif not dropped.context or not any(self._helps(answer, job.chat) for answer in answers):
            self._warn(dropped)
            self._warn_otherwise(answers)
            spans = {(answer.start, answer.end): job.weight(answer) for answer in answers}
            return [self._rendered(full, spans, (answers[-1].start, answers[-1].end))]
        return self._alone(job, answers)

    def _answers(
        self, job: _Job, written: _Written, starts: list[int | None]
    ) -> list[Answer] | RejectedExample:
        """Returns where each answer of a job is, or why the conversation is skipped."""
        found: list[Answer] = []
        for place, texts, start in zip(job.answers, written.answers, starts):
            if isinstance(texts.through, Refusal):
                return _refused(texts.through)
            if start is None:
                return _NO_START
            text = texts.through
            missing = missing_of_answer(
                job.chat.messages[place], self._without_special(text[start:])
            )
            if missing is not None:
                return RejectedExample(*missing)
            text, end = self._ended(job, place, text, start)
            if self._has_more(job.chat, place, text[start:end]):
                return _MORE
            prompt = texts.before if isinstance(texts.before, str) else None
            found.append(Answer(place, text, start, end, prompt))
        return found

    def _has_more(self, chat: Chat, place: int, written: str) -> bool:
        """Returns whether the template writes more than an answer in its place."""
        last = next((token for token in self._closing if written.endswith(token)), "")
        return is_more_than_answer(chat, place, written.removesuffix(last), last)

    def _ended(self, job: _Job, place: int, text: str, start: int) -> tuple[str, int]:
        """Returns the text up to an answer with what ends it, and where it ends. White space after
        the end-of-turn token comes from the template, so the model need not learn to write it.
        """
        messages = job.chat.messages
        is_followed = self._handling.train_on == "all" and place + 1 < len(messages)
        ahead = self.ends.open_end(messages, place)
        if ahead and not is_followed:
            return text + ahead, len(text) + len(ahead)
        bare = text[start:].rstrip()
        if bare.endswith(self._closing):
            return text, start + len(bare)
        if not ahead:
            self.warn(NO_END)
        return text, len(text)

    def _all_but(
        self, job: _Job, full: str, answers: list[Answer]
    ) -> list[Rendered] | RejectedExample:
        """Returns the whole text, all of it trained but the answers that the row excludes,
        and those that it gives a weight with that weight.
        """
        last = len(job.chat.messages) - 1
        begin = 0
        spans: dict[tuple[int, int], float] = {}
        for answer in answers:
            if answer.place not in job.excluded | job.weights.keys():
                continue  # it is the last one, and trained like all text
            if not full.startswith(answer.text):
                return _NO_START
            spans[begin, answer.start] = 1.0
            if answer.place not in job.excluded:
                spans[answer.start, answer.end] = job.weight(answer)
            begin = answer.end
        spans[begin, len(full)] = 1.0
        ends_with_answer = answers and answers[-1].place == last
        expected = (answers[-1].start, answers[-1].end) if ends_with_answer else None
        return [self._rendered(full, spans, expected)]

    def _alone(self, job: _Job, answers: list[Answer]) -> list[Rendered] | RejectedExample:
        """Returns a document for each answer, with all that the template shows the model before
        it.
        """
        documents: list[Rendered] = []
        for answer in answers:
            own = job.chat.until(answer.place + 1)
            dropped = self._dropped(answer.text, own, answer.place)
            if dropped.context and self._handling.dropped_turns == "refuse":
                return _dropped_turn(dropped)
            shown = answer
            if dropped.context and self._helps(answer, job.chat):
                self.warn(_AFTER_PROMPT)
                shown = answer.after_prompt()
                asked = own.until(answer.place)
                dropped = self._dropped(shown.text, own, answer.place, asked)
            self._warn(dropped)
            self._warn_otherwise([shown])
            span = (shown.start, shown.end)
            documents.append(self._rendered(shown.text, {span: job.weight(answer)}, span))
        return documents

    def _dropped(
        self, text: str, chat: Chat, answer: int | None, asked: Chat | None = None
    ) -> DroppedTurns:
        """Returns what of `chat` is missing from `text`, which ends with the answer at a place.
        `asked` is the chat whose prompt the text begins with, or None if it is written as a whole.
        """
        return dropped_by(
            self._without_special(text),
            chat,
            answer,
            lambda: self._writes_tools(asked or chat, generation=asked is not None),
        )

    def _writes_tools(self, chat: Chat, generation: bool) -> bool:
        """Returns whether the template writes the tools of a chat, as tools of other names show."""
        names = [f"{_TOOL_PROBE}{number}z" for number, _ in enumerate(tool_names(chat.tools or []))]
        renamed = Chat(chat.messages, renamed_tools(chat.tools or [], names))
        (text,) = self.template.write([renamed], generation)
        return isinstance(text, Refusal) or all(name in text for name in names)

    def _without_special(self, text: str) -> str:
        """Returns a text without the special tokens of the template."""
        if self._handling.typed_tokens == "tokens":
            return text  # it may have those that somebody typed
        return self.control.without_special(text)

    def _helps(self, answer: Answer, chat: Chat) -> bool:
        """Returns whether the template's prompt for an answer has a turn before it that the text
        with the answer lacks.
        """
        if answer.prompt is None:
            return False
        asked = chat.until(answer.place)
        in_prompt = self._dropped(answer.prompt, asked, None, asked)
        in_text = self._dropped(answer.text, chat.until(answer.place + 1), answer.place)
        return in_prompt.context < in_text.context

    def _warn(self, dropped: DroppedTurns) -> None:
        """Counts what the model will not see, in training as when it is asked."""
        for role in dropped.roles:
            self.warn(f"The chat template leaves out a {role} turn, in its prompts too")
        if dropped.tools:
            self.warn("The chat template leaves out the tools of a conversation")
        if dropped.answers:
            self.warn(
                "The chat template leaves out part of an earlier answer, such as its reasoning",
                dropped.answers,
            )

    def _warn_otherwise(self, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.prompt is not None and not answer.continues:
                self.warn(_OTHERWISE)

    def _rendered(
        self, text: str, spans: dict[tuple[int, int], float], answer: tuple[int, int] | None
    ) -> Rendered:
        """Returns a text with the weight of each range that carries loss."""
        typed = self.control.is_placeholder(text)
        weights = tuple(spans.values()) if any(one != 1 for one in spans.values()) else ()
        return Rendered(text, tuple(spans), answer, typed=typed, weights=weights)


def _first_answer(chat: Chat, context: int) -> int:
    """Returns the place of the first answer behind the prompt, which has `context` messages."""
    places = range(context, len(chat.messages))
    return next(place for place in places if chat.messages[place]["role"] == "assistant")


def _refused(refusal: Refusal) -> RejectedExample:
    return RejectedExample(
        "the chat template refuses the conversation", refusal.message.rstrip(".")
    )


def _dropped_turn(dropped: DroppedTurns) -> RejectedExample:
    what = f"a {dropped.roles[0]} turn" if dropped.roles else "the tools"
    return RejectedExample(
        f"The chat template leaves out {what}",
        "set data.dropped_turns to turn_by_turn to train with the prompts that the template makes, "
        "or use a model whose template writes it",
        refused=True,
    )
