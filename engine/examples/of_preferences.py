"""These are the formats of preferences: of two answers, one was chosen. A run that learns from
pairs reads both; any other trains the chosen one alone, as an answer.
"""

from __future__ import annotations

import math
import re

from engine.errors import DataError
from engine.examples.example import Example, Preference
from engine.examples.format import SYSTEM, TOOLS, TURNS, Format, is_text_or_turns
from engine.examples.of_pairs import PROMPT, joined_prompt
from engine.examples.row_parts import Parts
from engine.examples.turns import Turn, conversation, with_system
from engine.examples.values import in_words, is_blank, parsed_list, shown

REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")
"""These columns may hold how likely the answers are for the model that they are compared with."""

_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_DIALOGUE = ("Human:", "Assistant:")


def _read_preference(parts: Parts) -> Example | None:
    chosen = _answer(parts, "chosen")
    if not chosen:
        return None
    if chosen[0].message["role"] == "assistant":
        before = _prompt(parts)
    else:  # the whole conversation, which shares its begin with the rejected one
        before, chosen = _divided(parts, chosen)
    before = with_system(parts.system(), [*parts.history(), *before])
    return conversation(before + chosen, len(before), parts.tools())


def _read_pair(parts: Parts) -> Preference | None:
    chosen, rejected = _answer(parts, "chosen"), _answer(parts, "rejected")
    if not chosen:
        return None
    if chosen[0].message["role"] == "assistant":
        before = _prompt(parts)
    else:
        before, chosen = _divided(parts, chosen)
        rejected = _behind(parts, before, rejected)
    before = with_system(parts.system(), [*parts.history(), *before])
    tools = parts.tools()
    best = conversation(before + chosen, len(before), tools)
    assert best is not None  # it has the chosen answer at least
    other = conversation(before + rejected, len(before), tools) if rejected else None
    return Preference(best, other, _references(parts))


def _behind(parts: Parts, before: list[Turn], rejected: list[Turn]) -> list[Turn]:
    """Returns the rejected answer of a whole conversation that begins with the turns `before`."""
    begins = [turn.message for turn in rejected[: len(before)]]
    if not rejected or (before and begins == [turn.message for turn in before]):
        return rejected[len(before) :]
    raise DataError(
        f"The columns {parts.columns['chosen']} and {parts.place('rejected')} are conversations "
        "that begin with different turns; write the same question at the begin of both."
    )


def _references(parts: Parts) -> tuple[float, float] | None:
    """Returns the values of the columns `REFERENCES`, or None where the row has none."""
    values = [parts.row.get(column) for column in REFERENCES]
    if all(is_blank(value) for value in values):
        return None
    found = []
    for column, value in zip(REFERENCES, values):
        known = (
            value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        )
        found.append(float(known))
        if not -math.inf < found[-1] <= 0:
            raise DataError(
                f"The column {column} in {parts.where} is {in_words(value)} and no logarithm of a "
                "probability; give a number of 0 or less in both columns, or leave both out."
            )
    return found[0], found[1]


def _answer(parts: Parts, part: str) -> list[Turn]:
    """Returns an answer, or the whole conversation that ends with it."""
    value = parts.value(part)
    if isinstance(value, str) and value.lstrip().startswith(_DIALOGUE):
        return _dialogue(parts.text(part))
    return parts.turns_or_text(part, "assistant")


def _dialogue(text: str) -> list[Turn]:
    """Returns the turns of a text such as "Human: ...", a blank line and "Assistant: ..."."""
    pieces = _SPEAKER.split(f"\n\n{text.strip()}")
    turns = []
    for speaker, said in zip(pieces[1::2], pieces[2::2]):
        role = "user" if speaker == "Human" else "assistant"
        turns.append(Turn({"role": role, "content": said.strip()}))
    return turns


def _prompt(parts: Parts) -> list[Turn]:
    """Returns the turns before the answers."""
    has_question = "prompt" in parts.columns and not (
        is_blank(parts.optional("prompt")) and is_blank(parts.optional("input"))
    )
    if not has_question:
        raise DataError(
            f"The column {parts.place('chosen')} has no question before its answer; name the "
            "column of the question in data.columns.prompt."
        )
    value = parsed_list(parts.value("prompt"))
    if not isinstance(value, str | None):
        return parts.turns("prompt")
    value = value or ""
    if value.lstrip().startswith(_DIALOGUE):
        turns = _dialogue(parts.text("prompt"))
        is_open = turns and is_blank(turns[-1].message["content"])
        return turns[:-1] if is_open else turns
    return [Turn({"role": "user", "content": joined_prompt(parts)})]


def _divided(parts: Parts, chosen: list[Turn]) -> tuple[list[Turn], list[Turn]]:
    """Divides the chosen conversation where the rejected one differs. Raises DataError if the row
    has another prompt than the conversation.
    """
    rejected = _answer(parts, "rejected")
    shared = len(chosen) - 1
    for place, (ours, other) in enumerate(zip(chosen[:-1], rejected)):
        if ours.message != other.message:
            shared = place
            break
    if "prompt" in parts.columns and not is_blank(parts.optional("prompt")):
        asked = {turn.message["content"].strip() for turn in _prompt(parts)}
        said = {turn.message["content"].strip() for turn in chosen}
        if not asked <= said:
            raise DataError(
                f"The column {parts.place('chosen')} is a conversation without the turns of the "
                f"column {parts.columns['prompt']}; give the answers alone, or no prompt."
            )
    return chosen[:shared], chosen[shared:]


PREFERENCE = Format(
    name="preference",
    required={
        "chosen": ("chosen", "chosen_messages", "chosen_response", "response_chosen"),
        "rejected": ("rejected", "rejected_messages", "rejected_response", "response_rejected"),
    },
    optional={
        "prompt": ("instruction", *PROMPT, *TURNS),
        "input": ("input", "context"),
        "system": SYSTEM,
        "history": ("history",),
        "tools": TOOLS,
    },
    read=_read_preference,
    looks_like=lambda first: all(
        is_text_or_turns(parsed_list(first[part])) for part in ("chosen", "rejected")
    ),
    needs="columns chosen and rejected",
    meanings={"prompt": "the turns before the answer"},
    note="Only the chosen answers (column {chosen}) are trained; the rejected ones are not used.",
    read_pair=_read_pair,
    pair_note="Each row is a pair: a chosen answer (column {chosen}) and a rejected one (column "
    "{rejected}).",
)


# ---------------------------------------------------------------------- two models


def _read_arena(parts: Parts) -> Example | None:
    winner = parts.text("winner").strip().lower()
    if winner in ("model_a", "model_b"):
        return conversation(parts.turns(winner))
    if not winner.startswith("tie"):
        raise DataError(
            f"The winner in {parts.where} is {shown(winner)}; write model_a, model_b or tie."
        )
    neither = [Turn(turn.message, weight=0.0) for turn in parts.turns("model_a")]
    return conversation(neither)


ARENA = Format(
    name="arena",
    required={
        "model_a": ("conversation_a",),
        "model_b": ("conversation_b",),
        "winner": ("winner",),
    },
    read=_read_arena,
    looks_like=lambda first: is_text_or_turns(first["model_a"]),
    needs="columns conversation_a, conversation_b and winner",
    note="Only the conversation that won is trained; a row without a winner is not.",
    is_fixed=True,
)
