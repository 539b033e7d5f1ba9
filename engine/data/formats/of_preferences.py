"""Formats of preferences: of two answers, one was chosen. A run that learns from pairs reads both;
any other trains the chosen one alone, as an answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from engine.data.formats.example import Example, Pair, Preference
from engine.data.formats.format import SYSTEM, TOOLS, TURNS, Format, Names, is_text_or_turns
from engine.data.formats.of_pairs import BETWEEN, PROMPT, joined_prompt
from engine.data.formats.row_parts import Parts
from engine.data.formats.turns import Turn, conversation, with_system
from engine.data.formats.values import is_blank, parsed_list, shown, type_text
from engine.errors import DataError

REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")
"""Columns that may hold reference log-probabilities."""

_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_DIALOGUE = ("Human:", "Assistant:")


def _read_preference(parts: Parts) -> Example | None:
    chosen = _answer(parts, "chosen")
    if not chosen:
        return None
    if _has_texts(parts):
        return _text(parts, "chosen")
    if _is_answer(chosen):
        before = _prompt(parts)
    else:  # the whole conversation, which shares its begin with the rejected one
        before, chosen = _divided(parts, chosen, _answer(parts, "rejected"))
    before = with_system(parts.system(), [*parts.history(), *before])
    return conversation(before + chosen, len(before), parts.tools())


def _read_pair(parts: Parts) -> Preference | None:
    chosen, rejected = _answer(parts, "chosen"), _answer(parts, "rejected")
    if not chosen:
        return None
    if _has_texts(parts):
        worse = _text(parts, "rejected") if rejected else None
        return Preference(_text(parts, "chosen"), worse, _references(parts))
    if _is_answer(chosen):
        before = _prompt(parts)
    else:
        before, chosen = _divided(parts, chosen, rejected)
        rejected = _behind(parts, before, rejected)
    before = with_system(parts.system(), [*parts.history(), *before])
    tools = parts.tools()
    best = conversation(before + chosen, len(before), tools)
    assert best is not None  # it has the chosen answer at least
    other = conversation(before + rejected, len(before), tools) if rejected else None
    return Preference(best, other, _references(parts))


def _has_texts(parts: Parts) -> bool:
    """Returns whether the prompt and both answers of a row are texts, with nothing that needs a
    chat template.
    """
    if "prompt" not in parts.columns or not is_blank(parsed_list(parts.optional("history"))):
        return False
    values = (parts.optional(part) for part in ("prompt", "chosen", "rejected"))
    is_plain = all(
        value is None
        or (isinstance(parsed_list(value), str) and not value.lstrip().startswith(_DIALOGUE))
        for value in values
    )
    return is_plain and not parts.tools()


def _text(parts: Parts, part: str) -> Pair:
    """Returns an answer of a row of texts behind its prompt. As in rows of one answer, an
    instruction has an empty line behind it where no chat template writes it, and a prompt has
    nothing.
    """
    (asked,) = _prompt(parts)
    is_instruction = parts.columns["prompt"].lower() == "instruction"
    between = BETWEEN if is_instruction or parts.between is not None else ""
    return Pair(asked.message["content"], parts.text(part), parts.system(), between)


def _is_answer(turns: list[Turn]) -> bool:
    """Returns whether turns continue behind a prompt, and are no whole conversation."""
    return bool(turns) and turns[0].message["role"] in ("assistant", "tool")


def _behind(parts: Parts, before: list[Turn], rejected: list[Turn]) -> list[Turn]:
    """Returns the rejected answer, alone or of a whole conversation that begins with the turns
    `before`.
    """
    if before and _is_answer(rejected):
        return rejected
    begins = [turn.message for turn in rejected[: len(before)]]
    if not rejected or (before and begins == [turn.message for turn in before]):
        return rejected[len(before) :]
    raise DataError(
        f"The columns {parts.columns['chosen']} and {parts.place('rejected')} are conversations "
        "that begin with different turns; begin both with the same prompt."
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
                f"The column {column} in {parts.where} is {type_text(value)} and no logarithm of a "
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
    fields = _SPEAKER.split(f"\n\n{text.strip()}")
    turns = []
    for speaker, content in zip(fields[1::2], fields[2::2]):
        role = "user" if speaker == "Human" else "assistant"
        turns.append(Turn({"role": role, "content": content.strip()}))
    return turns


def _prompt(parts: Parts) -> list[Turn]:
    """Returns the turns before the answers."""
    has_question = "prompt" in parts.columns and not (
        is_blank(parts.optional("prompt")) and is_blank(parts.optional("input"))
    )
    if not has_question:
        raise DataError(
            f"The column {parts.place('chosen')} has no prompt before its answer; name the "
            "column of the prompt in data.columns.prompt."
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


def _divided(
    parts: Parts, chosen: list[Turn], rejected: list[Turn]
) -> tuple[list[Turn], list[Turn]]:
    """Divides the chosen conversation where the rejected one differs, at the last turn of the
    shorter one at the latest. A rejected answer without a question takes the place of what follows
    the last question of the chosen one, or of the last turn if it is a text. Raises DataError if
    the row has another prompt than the conversation.
    """
    shared = len(chosen) - 1
    if _is_answer(rejected):
        if not isinstance(parts.value("rejected"), str):
            roles = [turn.message["role"] for turn in chosen]
            shared = len(roles) - roles[::-1].index("user") if "user" in roles else shared
    elif rejected:
        shared = min(len(chosen), len(rejected)) - 1
        for place in range(shared):
            if chosen[place].message != rejected[place].message:
                shared = place
                break
    if "prompt" in parts.columns and not is_blank(parts.optional("prompt")):
        asked = {turn.message["content"].strip() for turn in _prompt(parts)}
        written = {turn.message["content"].strip() for turn in chosen}
        if not asked <= written:
            raise DataError(
                f"The column {parts.place('chosen')} is a conversation without the turns of the "
                f"column {parts.columns['prompt']}; give the answers alone, or no prompt."
            )
    return chosen[:shared], chosen[shared:]


_CHOSEN = ("chosen", "chosen_messages", "chosen_response", "response_chosen")
_REJECTED = ("rejected", "rejected_messages", "rejected_response", "response_rejected")


def beside_messages(names: Iterable[str]) -> dict[str, str]:
    """Returns the column of each part where rows have the chosen answer at the end of their
    `messages`, and the rejected one beside them, as ms-swift writes pairs; nothing for other
    columns.
    """
    there = {name.lower(): name for name in names}

    def column(usual: Names) -> str | None:
        return next((there[name] for name in usual if name in there), None)

    turns, rejected = column(TURNS), column(_REJECTED)
    if turns is None or rejected is None or column(_CHOSEN) is not None:
        return {}
    found = {
        "chosen": turns,
        "rejected": rejected,
        "system": column(SYSTEM),
        "tools": column(TOOLS),
    }
    return {part: name for part, name in found.items() if name is not None}


PREFERENCE = Format(
    name="preference",
    required={"chosen": _CHOSEN, "rejected": _REJECTED},
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
