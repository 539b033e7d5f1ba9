"""What ends an answer, as the chat template shows it.

Most templates close an answer with a token. Some leave it open, and the model ends its answer with
the first token of the turn that follows: GLM writes `<|user|>` behind an answer and
`<|observation|>` behind a call. Which of both it is shows in what the template writes of a few
conversations.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.data.formats.example import Message
from engine.data.tokens.answer_spans import PROBES
from engine.data.tokens.chat_template import ChatTemplate
from engine.data.tokens.rendered import common_prefix
from engine.data.tokens.template_process import Chat, Refusal

_ASKED = "Q4w6E"
_NAMES = ("d5Kadd", "d5Kmul")
MARK = re.compile(r"<\S+>|\[\S+\]")
"""Form of a text that was meant to be a token."""
_FOLLOWED_BY = ("user", "system")


@dataclass(frozen=True)
class TurnEnds:
    """Ends of the answers that a chat template writes."""

    tokens: tuple[str, ...] = ()
    """Tokens of which each ends an answer or a call, that of an answer first."""
    next_turns: Mapping[str, str] = field(default_factory=dict)
    """How the turn of a role begins, up to its first token, where that token ends the turn before
    it. `tool` is what follows a call.
    """
    text: str = ""
    """Text that the template writes behind an answer that no token ends."""

    def open_end(self, messages: Sequence[Message], place: int) -> str:
        """Returns what ends the answer at `place` of `messages` if the template leaves it open, and
        an empty text otherwise.
        """
        if messages[place].get("tool_calls"):
            return self.next_turns.get("tool", "")
        follows = messages[place + 1]["role"] if place + 1 < len(messages) else "user"
        return self.next_turns.get(follows) or self.next_turns.get("user", "")


def turn_ends(template: ChatTemplate, marks: Collection[str], special: Collection[str]) -> TurnEnds:
    """Returns what ends the answers of `template`.

    `marks` are the added tokens that it may write. Those of `special` are no part of an answer's
    text; of the others, only one that stands directly behind an answer ends it. Raises DataError as
    `ChatTemplate.write` does.
    """
    first, second = PROBES
    answer = {"role": "assistant", "content": first}
    asked = {"role": "user", "content": _ASKED}
    reasoned = answer | {"reasoning_content": second}
    followers = [{"role": role, "content": second} for role in _FOLLOWED_BY]
    chats = [Chat([asked, answer]), Chat([asked, reasoned])]
    chats += [Chat([asked, answer, follower]) for follower in followers]
    plain, with_reasoning, *followed = template.write(chats, generation=False)
    if isinstance(plain, Refusal) or first not in plain:
        return TurnEnds()
    longest_first = sorted(marks, key=len, reverse=True)
    tail = plain.rpartition(first)[2]
    closing = _last(tail, longest_first)
    tokens = [closing, _of_turn(tail, followed[0], closing, longest_first)]
    if isinstance(with_reasoning, str) and first in with_reasoning:
        tokens.append(_last(with_reasoning.rpartition(first)[2], longest_first))
    next_turns: dict[str, str] = {}
    if not closing and not MARK.match(tail.strip()):
        for role, text in zip(_FOLLOWED_BY, followed):
            next_turns[role] = _begin(plain, text, longest_first)
    of_call, of_tool = _of_call(template, closing, longest_first, special)
    tokens += [next_turns.get("user", ""), of_call]
    if not of_call:
        next_turns["tool"] = of_tool or next_turns.get("user", "")
        tokens.append(next_turns["tool"])
    found = tuple(dict.fromkeys(token.strip() for token in tokens if token.strip()))
    return TurnEnds(
        found,
        {role: begin for role, begin in next_turns.items() if begin},
        "" if found else _text_behind(tail, plain, followed[0]),
    )


def _of_call(
    template: ChatTemplate, closing: str, marks: Sequence[str], special: Collection[str]
) -> tuple[str, str]:
    """Returns the token with which the template closes calls and, where it leaves them open, how
    the turn with their results begins. `closing` is the token that closes an answer.
    """
    asked = {"role": "user", "content": _ASKED}
    for names in (_NAMES, _NAMES[:1]):  # some templates take one call alone
        called = {"role": "assistant", "content": "", "tool_calls": list(map(_call, names))}
        result = {"role": "tool", "content": PROBES[1], "name": names[-1]}
        result["tool_call_id"] = _id_of(names[-1])
        tools = list(map(_tool, names))
        chats = [Chat([asked, called], tools), Chat([asked, called, result], tools)]
        calls, with_result = template.write(chats, generation=False)
        if isinstance(calls, str) and names[-1] in calls.rpartition(_ASKED)[2]:
            break
    else:
        return closing, ""
    written = calls.rpartition(_ASKED)[2]
    last = _last(written.rpartition(names[-1])[2], marks)
    # A token behind each call, or one that a model writes as part of it, does not end the turn.
    if last and (last == closing or (last in special and written.count(last) == 1)):
        return last, ""
    return "", _begin(calls, with_result, marks)


def _call(name: str) -> dict[str, object]:
    return {
        "type": "function",
        "id": _id_of(name),
        "function": {"name": name, "arguments": {"a": 1}},
    }


def _id_of(name: str) -> str:
    """Returns an id of nine letters and digits, as some templates demand."""
    return f"call{name[-5:]}".ljust(9, "0")[:9]


def _tool(name: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "description": "a"}}}
    function = {"name": name, "description": "a", "parameters": parameters | {"required": ["a"]}}
    return {"type": "function", "function": function}


def _last(tail: str, marks: Iterable[str]) -> str:
    """Returns the mark with which a text ends, white space aside, or an empty text."""
    bare = tail.rstrip()
    return next((mark for mark in marks if bare.endswith(mark)), "")


def _of_turn(tail: str, followed: str | Refusal, closing: str, marks: Sequence[str]) -> str:
    """Returns the token that closes an answer when a turn follows, where `closing` then does not
    stand behind it: it closes the conversation, as in Phi's `<|end|>` before the end of the text.
    """
    if isinstance(followed, Refusal) or not closing:
        return ""
    behind = followed.rpartition(PROBES[0])[2].partition(PROBES[1])[0]
    if closing in behind:
        return ""
    pattern = "|".join(map(re.escape, marks))
    return ["", *re.findall(pattern, common_prefix(tail, behind))][-1]


def _begin(alone: str, followed: str | Refusal, marks: Sequence[str]) -> str:
    """Returns how the turn behind the text `alone` begins, up to and including its first token, or
    an empty text where it begins with none.
    """
    if isinstance(followed, Refusal) or not followed.startswith(alone):
        return ""
    begin = followed[len(alone) :].partition(PROBES[1])[0]
    bare = begin.lstrip()
    mark = next((mark for mark in marks if bare.startswith(mark)), "")
    return begin[: len(begin) - len(bare)] + mark if mark else ""


def _text_behind(tail: str, alone: str, followed: str | Refusal) -> str:
    """Returns the first line of what stands behind an answer, white space aside."""
    if not tail.strip() and isinstance(followed, str) and followed.startswith(alone):
        tail = followed[len(alone) :].partition(PROBES[1])[0]
    return re.split(r"[\r\n]", tail.strip())[0].strip()
