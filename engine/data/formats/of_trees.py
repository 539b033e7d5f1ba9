"""Trees of answers, as OpenAssistant has them: each turn has its replies, ranked by people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.data.formats.example import Example
from engine.data.formats.format import Format
from engine.data.formats.roles import role_of
from engine.data.formats.row_parts import Parts
from engine.data.formats.turns import Turn, conversation
from engine.data.formats.values import is_blank, type_text, valid_text
from engine.errors import DataError

_UNRANKED = 1 << 30
FLAT = frozenset({"message_id", "parent_id", "text", "role"})
"""The columns of the same trees with a row for each turn."""


def is_flat(names: Mapping[str, Any]) -> bool:
    """Returns whether rows are single turns of trees. A stream cannot put them together."""
    return set(names) >= FLAT


def _read_tree(parts: Parts) -> Example | None:
    """Reads the path of the best-ranked replies, up to the last answer on it."""
    turn = parts.value("tree")
    turns: list[Turn] = []
    while turn is not None:
        place = f"reply {len(turns)} of {parts.place('tree')}"
        if not isinstance(turn, dict) or not isinstance(turn.get("text"), str):
            raise DataError(
                f"There is no text in {place}, but {type_text(turn)}; write every turn as {{text, "
                "role, replies}."
            )
        role = turn.get("role")
        if not isinstance(role, str):
            raise DataError(f"There is no role prompter or assistant in {place}; add it.")
        role, _ = role_of(valid_text(role), place, parts.settings.roles)
        turns.append(Turn({"role": role, "content": valid_text(turn["text"])}))
        turn = _best(turn.get("replies"), place)
    while turns and turns[-1].message["role"] != "assistant":
        turns.pop()
    return conversation(turns)


def _best(replies: Any, place: str) -> Any:
    """Returns the best-ranked reply (0 is the best) that was not taken back, or None."""
    if is_blank(replies):
        return None
    if not isinstance(replies, list | tuple):
        raise DataError(f"The replies of {place} are {type_text(replies)}; write a list.")
    kept: list[tuple[int, Any]] = []
    for reply in replies:
        keys = reply if isinstance(reply, dict) else {}
        if keys.get("deleted") is True or keys.get("review_result") is False:
            continue
        rank = keys.get("rank")
        kept.append((rank if isinstance(rank, int) else _UNRANKED, reply))
    return min(kept, key=lambda ranked: ranked[0])[1] if kept else None


OASST = Format(
    name="oasst",
    required={"tree": ("prompt",)},
    read=_read_tree,
    looks_like=lambda first: isinstance(first["tree"], dict) and "replies" in first["tree"],
    needs="a column prompt: a tree of {text, role, replies}",
    weak=frozenset({"prompt"}),
    note="Of each tree (column {tree}), the path of the best-ranked replies is trained; the others "
    "are not used.",
    is_fixed=True,
)
