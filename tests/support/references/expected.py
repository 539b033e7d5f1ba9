"""The documents that a conversation must become, by the slow way and in the words of the rules.

- An answer is trained with its end-of-turn token, unless it is blank or its row excludes it.
- A conversation is one document if the template adds to its text turn by turn. Otherwise each
  answer has a document of its own, with the turns before it as the template then writes them.
- Where the document lacks what the template's own prompt for an answer has, the document of each
  answer is that prompt and the answer.
- What is missing even then is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.references.family import Family, Refused, Segment

REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass
class Expected:
    """A conversation becomes these documents."""

    documents: list[tuple[list[Segment], frozenset[int]]] = field(default_factory=list)
    """The segments of each, and the answers in it that are trained."""
    lost: Counter[str] = field(default_factory=Counter)
    """So many turns of each role are missing from a document and from its prompt, over all
    documents. Tools count as the role "tools".
    """
    refused: str = ""
    """A word of the reason why nothing is trained of it."""


@dataclass(frozen=True)
class _Answer:
    place: int
    through: list[Segment]
    prompt: list[Segment] | None
    """The template's own prompt, or None if it refuses the turns before the answer."""


def expected(
    family: Family,
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
    untrained: frozenset[int] = frozenset(),
) -> Expected:
    """Returns the documents of a conversation."""
    messages = [_apart(family, message) for message in _with_systems(family, messages)]
    try:
        answers = _answers(family, messages, tools, untrained)
    except Refused as refusal:
        return Expected(refused=refusal.why)
    whole = answers[-1].through
    if all(_text(whole).startswith(_text(answer.through)) for answer in answers) and not any(
        _prompt_has_more(messages, tools, answer, whole) for answer in answers
    ):
        lost = Counter(role for role, _ in _missing(messages, tools, whole, answers[-1].place))
        return Expected([(whole, frozenset(answer.place for answer in answers))], lost)
    found = Expected()
    for answer in answers:
        document = answer.through
        if answer.prompt is not None and _prompt_has_more(messages, tools, answer, document):
            own = [part for part in answer.through if part.answer == answer.place]
            document = answer.prompt + own
        found.documents.append((document, frozenset([answer.place])))
        found.lost.update(role for role, _ in _missing(messages, tools, document, answer.place))
    return found


def _with_systems(family: Family, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns of developers are the system's, whose role no template here knows, where the template
    writes a system turn at all.
    """
    turns = [{"role": role, "content": "a"} for role in ("system", "user", "assistant")]
    try:
        says = {part.says for part in family.page(turns, None)}
    except Refused:
        return messages
    if 0 not in says:
        return messages
    return [
        message | {"role": "system", "said_by": "developer"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]


def _apart(family: Family, message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning between its tags in an answer is a key of its own, where the template knows it."""
    known = message["role"] != "assistant" or any(message.get(key) for key in REASONING)
    if known or not family.thinks:
        return message
    text = message["content"].lstrip()
    before, closed, rest = text.partition("</think>")
    reasoning = before.removeprefix("<think>").strip("\n")
    if not closed or not text.startswith("<think>") or not reasoning:
        return message
    return message | {"content": rest.lstrip("\n"), "reasoning_content": reasoning}


def _answers(
    family: Family,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    untrained: frozenset[int],
) -> list[_Answer]:
    """Returns the answers to train. Raises Refused where there is none or one cannot be."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise Refused("no assistant turn")
    places = [place for place in places if place not in untrained]
    if not places:
        raise Refused("none of its answers")
    places = [place for place in places if not _is_blank(messages[place])]
    if not places:
        raise Refused("empty")
    family.page(messages[: places[-1] + 1], tools)
    return [_answer(family, messages, tools, place) for place in places]


def _is_blank(message: dict[str, Any]) -> bool:
    texts = [message["content"], *(message.get(key) or "" for key in REASONING)]
    return not message.get("tool_calls") and not "".join(texts).strip()


def _answer(
    family: Family, messages: list[dict[str, Any]], tools: list[Any] | None, place: int
) -> _Answer:
    """Has the family write an answer. Raises Refused where the template leaves out a part of it."""
    through = family.page(messages[: place + 1], tools)
    message = messages[place]
    if messages[0]["role"] == "assistant":
        through = _without_lead(through)
    shown = [
        part
        for part in through
        if part.answer == place and not (part.written and part.text in family.special)
    ]
    own = "".join(_text(shown).split())
    for text in (message["content"], *(message.get(key) or "" for key in REASONING)):
        if "".join(text.split()) not in own:
            raise Refused("leaves out")
    if message.get("tool_calls") and not family.calls:
        raise Refused("leaves out")
    try:
        prompt = family.page(messages[:place], tools, prompt=True) if place else None
    except Refused:
        prompt = None
    return _Answer(place, through, prompt)


def _without_lead(parts: list[Segment]) -> list[Segment]:
    """Where no turn stands before an answer, there is no prompt that shows where it begins: it is
    trained from its content on.
    """
    begins = next(place for place, part in enumerate(parts) if part.says == 0)
    lead = [replace(part, answer=None) for part in parts[:begins]]
    return lead + parts[begins:]


def _text(parts: list[Segment]) -> str:
    return "".join(part.text for part in parts)


def _missing(
    messages: list[dict[str, Any]], tools: list[Any] | None, parts: list[Segment], end: int
) -> Iterator[tuple[str, int]]:
    """Yields the role and the place of each turn before `end` that nobody says in `parts`."""
    says = {part.says for part in parts}
    for place, message in enumerate(messages[:end]):
        if message["role"] != "assistant" and message["content"].strip() and place not in says:
            yield message.get("said_by", message["role"]), place
    if tools and not all(f'"name": "{tool["function"]["name"]}"' in _text(parts) for tool in tools):
        yield "tools", -1


def _prompt_has_more(
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    answer: _Answer,
    document: list[Segment],
) -> bool:
    if answer.prompt is None:
        return False
    place = answer.place
    prompt = set(_missing(messages, tools, answer.prompt, place))
    return not set(_missing(messages, tools, document, place)) <= prompt
