"""A conversation as the text that the tokenizer's own chat template makes of it, with the spans that carry loss.

No `{% generation %}` block is needed. A turn's span runs from the end of the generation prompt (the template applied to
everything before the turn) to the end of the turn (the template applied up to and with it), so what is trained is what
the model will be asked to write, its end-of-turn token included. Where the template rewrites earlier turns, as those do
that drop earlier reasoning, the whole text does not hold what the model would have seen; then every turn becomes a
text of its own, rendered as it would be when that answer is due.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from engine.data.formats import Conversation, Message

_FIRST_LITERAL = 0x108000
"""Private-use characters from here on stand in for special tokens that a person typed, while the template runs."""

_FIXED_VARIABLES = {"date_string": "26 Jul 2024"}
"""Templates that print today's date would make different tokens after a resume; this is Llama's own fallback."""

_PROBES = ("A1b2C", "Z9y8X")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Rendered:
    """One document. `spans` are character ranges that carry loss; `answer` is the span of the last answer. `framed`
    says that the text holds its own begin and end tokens already, as a template writes them."""

    text: str
    spans: tuple[tuple[int, int], ...]
    answer: tuple[int, int] | None
    framed: bool = True


@dataclass(frozen=True)
class Skipped:
    """Why an example is left out: `reason` is counted in the summary, `detail` is shown for the first one."""

    reason: str
    detail: str = ""


@dataclass(frozen=True)
class _Turn:
    """An answer in `text`, the template's output up to and with that answer."""

    text: str
    start: int
    end: int


class ChatRenderer:
    """Renders conversations in batches. `warnings` counts what a person should know."""

    def __init__(self, tokenizer: Any, train_on: str):
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.warnings: Counter[str] = Counter()
        special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special and str(t)}
        special |= set(tokenizer.all_special_tokens)
        self.special_tokens = tuple(sorted(special, key=lambda token: (-len(token), token)))
        self._special_pattern = re.compile("|".join(map(re.escape, self.special_tokens)) or r"(?!)")
        self._stand_in_pattern = re.compile(f"[{chr(_FIRST_LITERAL)}-{chr(_FIRST_LITERAL + len(special) - 1)}]"
                                            if special else r"(?!)")

    @property
    def available(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def warning_sentences(self) -> list[str]:
        """What a person should know about the conversations rendered so far."""
        return [f"{text} ({'once' if count == 1 else f'{count:,} times'})." for text, count in self.warnings.items()]

    def pieces(self, text: str) -> list[tuple[int, str, bool]]:
        """A rendered text cut at stand-in characters: (first character, text, whether it is a typed special token)."""
        found, position = [], 0
        for match in self._stand_in_pattern.finditer(text):
            found.append((position, text[position:match.start()], False))
            found.append((match.start(), self.special_tokens[ord(match[0]) - _FIRST_LITERAL], True))
            position = match.end()
        return [piece for piece in [*found, (position, text[position:], False)] if piece[1]]

    def render(self, conversations: list[Conversation]) -> list[list[Rendered] | Skipped]:
        """Each conversation as its documents: one, or one a turn where the template rewrites earlier turns."""
        jobs = [self._job(conversation) for conversation in conversations]
        through: list[list[Message]] = []
        before: list[list[Message]] = []
        for messages, answers, whole in jobs:
            through.extend(messages[:i + 1] for i in answers)
            if whole:
                through.append(messages)
            before.extend(messages[:i] for i in answers)
        through_texts = iter(self._apply(through, generation=False))
        before_texts = iter(self._apply(before, generation=True))
        rendered: list[list[Rendered] | Skipped] = []
        for messages, answers, whole in jobs:
            ends = [next(through_texts) for _ in answers]
            full = next(through_texts) if whole else (ends[-1] if ends else None)
            prompts = [next(before_texts) for _ in answers]
            rendered.append(self._documents(messages, answers, ends, prompts, full))
        return rendered

    # ------------------------------------------------------------------ one conversation

    def _job(self, conversation: Conversation) -> tuple[list[Message], list[int], bool]:
        """Messages with typed special tokens stood in for, the answers to find, whether the whole is wanted."""
        messages = [{k: self.stand_in(v) for k, v in m.items()} for m in conversation.messages]
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= conversation.context]
        if self.train_on == "all":
            last = answers[-1:] if not answers or answers[-1] == len(messages) - 1 else []
            return messages, last, not last
        return messages, answers, False

    def stand_in(self, value: Any) -> Any:
        """A person's text with every special token in it replaced by its stand-in character."""
        if not isinstance(value, str) or not self._special_pattern.search(value):
            return value
        self.warnings["Special tokens that somebody typed into a turn stay text"] += 1
        return self._special_pattern.sub(lambda m: chr(_FIRST_LITERAL + self.special_tokens.index(m[0])), value)

    def _documents(self, messages: list[Message], answers: list[int], ends: list[str | Skipped],
                   prompts: list[str | Skipped], full: str | Skipped | None) -> list[Rendered] | Skipped:
        if full is None:
            return Skipped("there is no assistant turn")
        if isinstance(full, Skipped):
            return full
        turns: list[_Turn] = []
        for i, text, prompt in zip(answers, ends, prompts):
            turn = text if isinstance(text, Skipped) else self._turn(messages, i, text, prompt)
            if isinstance(turn, Skipped):
                return turn
            turns.append(turn)
        answer = (turns[-1].start, turns[-1].end) if turns else None
        if self.train_on == "all":
            return [Rendered(full, ((0, len(full)),), answer)]
        if all(full.startswith(turn.text) for turn in turns):
            return [Rendered(full, tuple((turn.start, turn.end) for turn in turns), answer)]
        self.warnings["A conversation is trained one turn at a time, because the chat template rewrites earlier turns "
                      "when more follow"] += 1
        return [Rendered(t.text, ((t.start, t.end),), (t.start, t.end)) for t in turns]

    def _turn(self, messages: list[Message], i: int, text: str, prompt: str | Skipped) -> _Turn | Skipped:
        if isinstance(prompt, str) and text.startswith(prompt):
            start = len(prompt)
        else:
            start = self._start_by_content(messages, i, text)
            if start is None:
                return Skipped("the chat template does not show where the answer begins")
            if isinstance(prompt, str):
                self.warnings["The chat template renders an answer in another way than its generation prompt begins it; "
                              "it is trained as rendered"] += 1
        written = _without_space(text[start:])
        if _without_space(str(messages[i].get("content") or "")) not in written:
            return Skipped("the chat template leaves out part of the answer",
                           "reasoning inside the answer is often dropped; use a template that keeps it")
        for key in _REASONING_KEYS:
            if _without_space(str(messages[i].get(key) or "")) not in written:
                return Skipped("the chat template leaves out the reasoning of the answer",
                               f"remove the {key} or use a template that keeps it")
        return _Turn(text, start, self._end(text, start))

    def _end(self, text: str, start: int) -> int:
        """White space after the end-of-turn token is the template's, not something to learn to write."""
        bare = text[start:].rstrip()
        if bare.endswith(self.special_tokens):
            return start + len(bare)
        self.warnings["The chat template closes an answer without a special token, so the model may not learn where to "
                      "stop"] += 1
        return len(text)

    def _start_by_content(self, messages: list[Message], i: int, text: str) -> int | None:
        """Where answer `i` begins in `text`, found by putting two other contents in its place."""
        bare = {k: v for k, v in messages[i].items() if k not in _REASONING_KEYS}
        first, second = (self._apply([[*messages[:i], {**bare, "content": probe}]], generation=False)[0]
                         for probe in _PROBES)
        if isinstance(first, Skipped) or isinstance(second, Skipped):
            return None
        header = os.path.commonprefix([first, second])
        trailer = os.path.commonprefix([first[::-1], second[::-1]])[::-1]
        regular = all(probed == header + probe + trailer for probed, probe in zip((first, second), _PROBES))
        if not regular or not text.startswith(header) or not text.endswith(trailer):
            return None
        return len(header)

    # ------------------------------------------------------------------ the template

    def _apply(self, chats: list[list[Message]], generation: bool) -> list[str | Skipped]:
        results: list[str | Skipped] = [Skipped("the chat template refuses an empty conversation")] * len(chats)
        wanted = [place for place, chat in enumerate(chats) if chat]
        if not wanted:
            return results
        try:
            texts = self._call([chats[place] for place in wanted], generation)
        except Exception as error:  # templates raise what they like
            if len(wanted) == 1:
                results[wanted[0]] = Skipped("the chat template refuses the conversation", str(error).rstrip("."))
                return results
            texts = [self._apply([chats[place]], generation)[0] for place in wanted]
        for place, text in zip(wanted, texts):
            results[place] = text
        return results

    def _call(self, chats: list[list[Message]], generation: bool) -> list[str]:
        return self.tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=generation,
                                                  **_FIXED_VARIABLES)


def _without_space(text: str) -> str:
    return "".join(text.split())
