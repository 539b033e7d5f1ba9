"""Formats of conversations: lists of {role, content}, and of {from, value}."""

from __future__ import annotations

from engine.data.formats.example import Example
from engine.data.formats.format import SYSTEM, TOOLS, TURNS, Format
from engine.data.formats.row_parts import Parts
from engine.data.formats.turns import conversation, has_turns, with_system

_OPTIONAL = {"system": SYSTEM, "tools": (*TOOLS, "toolconfig", "tool_config")}  # of Bedrock
_MEANINGS = {"system": "the system turn, where the turns have none of their own"}


def _read_conversation(parts: Parts) -> Example | None:
    turns = with_system(parts.system(), parts.turns("messages"))
    return conversation(turns, tools=parts.tools())


MESSAGES = Format(
    name="messages",
    required={"messages": TURNS},
    optional=_OPTIONAL,
    read=_read_conversation,
    looks_like=lambda first: has_turns(first["messages"], "role"),
    needs="a column messages: a list of {role, content}",
    weak=frozenset({"chat", "items"}),
    meanings=_MEANINGS,
)
SHAREGPT = Format(
    name="sharegpt",
    required={"messages": ("conversations", "conversation", "messages", "chat", "items")},
    optional=_OPTIONAL,
    read=_read_conversation,
    looks_like=lambda first: has_turns(first["messages"], "from"),
    needs="a column conversations: a list of {from, value}",
    weak=frozenset({"chat", "items"}),
    meanings=_MEANINGS,
)
