"""Places of the answers of a conversation in a template's text.

The template is applied to all turns before an answer, with the generation prompt, and to all turns
up to and including the answer. The second text adds the answer to the first. Where a template does
not do so, two other contents are written in the answer's place: the text that both share is what
comes before the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.data.formats.example import Message
from engine.data.tokens.chat_template import ChatTemplate
from engine.data.tokens.message_forms import REASONING_KEYS
from engine.data.tokens.rendered import common_prefix
from engine.data.tokens.template_process import Chat, Refusal

PROBES = ("A1b2C", "Z9y8X")
"""Contents that occur in no template. They begin and end with different characters."""
_SUFFIX = 400
"""Number of characters in which the end of a prompt is searched for."""
_BEHIND = 32
"""Largest number of characters that stand between the end of a prompt and an answer."""
_ALIKE = 4
"""Number of equal characters below which they do not show where a prompt ends."""


@dataclass(frozen=True)
class Texts:
    """Texts that a template writes for one answer."""

    through: str | Refusal
    """The text up to and including the answer."""
    before: str | Refusal
    """The text before the answer, with the generation prompt."""

    @property
    def prompt(self) -> str | None:
        """The text before the answer if the answer is added to it, and None otherwise."""
        through, before = self.through, self.before
        if isinstance(through, str) and isinstance(before, str) and through.startswith(before):
            return before
        return None


@dataclass(frozen=True)
class Answer:
    """An answer at [start, end) of `text`, the template's output up to and including it."""

    place: int
    """Index of the answer's message."""
    text: str
    start: int
    end: int
    prompt: str | None
    """The template's own prompt for this answer, or None if it makes none."""

    @property
    def continues(self) -> bool:
        """Whether the text is the prompt and the answer."""
        return self.prompt is not None and self.start == len(self.prompt)

    def after_prompt(self) -> Answer:
        """Returns the same answer after its prompt, as the model would be asked for it."""
        assert self.prompt is not None
        start = len(self.prompt)
        text = self.prompt + self.text[self.start :]
        return Answer(self.place, text, start, start + self.end - self.start, self.prompt)


def starts_by_content(
    template: ChatTemplate, asked: list[tuple[Chat, int, Texts]]
) -> list[int | None]:
    """Returns where each answer begins in its text, or None if that cannot be found. Each is asked
    for by its chat, its place in the chat, and its texts.
    """
    chats: list[Chat] = []
    openings: list[str] = []
    for chat, place, _ in asked:
        before, answer = chat.messages[:place], chat.messages[place]
        thinks = any(answer.get(key) for key in REASONING_KEYS)
        way = template.reasoning(bool(chat.tools)) if thinks else None
        openings.append("" if way is None or way.in_prompt else way.opening)
        probed = [_probed(answer, probe, way is not None) for probe in PROBES]
        chats += [Chat([*before, each], chat.tools) for each in probed]
    written = template.write(chats, generation=False)
    pairs = zip(written[::2], written[1::2], openings)
    return [_start(texts, *pair) for (_, _, texts), pair in zip(asked, pairs)]


def _probed(answer: Message, probe: str, thinks: bool) -> Message:
    """Returns an answer with the probe in place of what it begins with: its reasoning, if the
    template writes it, or its content, behind which nothing stands.
    """
    thoughts = [key for key in REASONING_KEYS if answer.get(key)]
    if thoughts and thinks:
        return answer | dict.fromkeys(thoughts, probe)
    left_out = {*thoughts, "tool_calls"}
    return {key: value for key, value in answer.items() if key not in left_out} | {"content": probe}


def _start(texts: Texts, first: str | Refusal, second: str | Refusal, opening: str) -> int | None:
    """Returns where the answer begins in its text. `first` and `second` have the probes in its
    place, or in place of its reasoning, which the answer begins with `opening`.
    """
    text = texts.through
    if isinstance(text, Refusal) or isinstance(first, Refusal) or isinstance(second, Refusal):
        return None
    header = common_prefix(first, second)
    trailer = common_prefix(first[::-1], second[::-1])[::-1]
    is_regular = all(
        probed == header + probe + trailer for probed, probe in zip((first, second), PROBES)
    )
    if not is_regular or not text.endswith(trailer):
        return None
    # What a template writes before an answer may depend on the answer: a space before a text and
    # none before a call, or an empty block of reasoning.
    shared = common_prefix(header, text)
    if isinstance(texts.before, str):
        begun = common_prefix(texts.before, text)
        # The model itself writes what the prompt lacks, such as the end of an empty block of
        # reasoning: <think></think> where the prompt is <think> and a line end.
        if len(begun) < len(shared) and texts.before[len(begun) :].isspace():
            return len(begun)
        behind = _behind_prompt(shared, texts.before)
        if behind is not None:
            return len(shared) - len(behind)
    return len(header.removesuffix(opening)) if shared == header else None


def _behind_prompt(header: str, prompt: str) -> str | None:
    """Returns the end of `header`, the text before an answer, that comes behind the end of the
    prompt: a template may write a space there, which the model has to generate. Returns None if the
    header does not show where the prompt ends.
    """
    # What both begin with stands before the answer, even if the question ends as the prompt does.
    longest = min(_BEHIND, len(header) - len(common_prefix(header, prompt)))
    header, prompt = header[-_SUFFIX:], prompt[-_SUFFIX:]
    most, behind = 0, ""
    for cut in range(min(longest, len(header)) + 1):
        kept = header[: len(header) - cut]
        alike = len(common_prefix(kept[::-1], prompt[::-1]))
        if alike > most:
            most, behind = alike, header[len(header) - cut :]
    return behind if most >= _ALIKE else None
