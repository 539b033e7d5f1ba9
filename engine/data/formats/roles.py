"""Whose turn it is: the names that programs write, and what they are called in chat templates."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from engine.data.formats.values import shown
from engine.errors import DataError

ROLES: Mapping[str, tuple[str, ...]] = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai"),
    "system": ("system",),
    "developer": ("developer",),
    "tool": (
        "tool",
        "function",
        "ipython",
        "observation",
        "observations",
        "tool_response",
        "tool_responses",
        "tool_result",
        "tool_results",
        "tool_output",
        "function_response",
        "function_result",
        "function_output",
    ),
}
"""The names of each role of chat templates, for {role, content} and {from, value} alike. Capital
letters do not matter, and nor does a hyphen in place of an underscore.
"""
CALLS = ("tool_call", "tool_calls", "function_call", "function_calls")
"""Roles of an answer that holds nothing but calls, written as JSON."""
_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}


def role_of(name: str, place: str, own: Mapping[str, str]) -> tuple[str, bool]:
    """Returns the role that chat templates have for the `name` of a turn, and whether the turn
    holds nothing but calls. `own` are the names of `data.roles`, which come first. Raises DataError
    for a name that neither has.
    """
    if name.strip() in own:
        return own[name.strip()], False
    plain = plain_name(name)
    if plain in CALLS:
        return "assistant", True
    found = _ROLE_OF.get(plain) or _ROLE_OF.get(plain.replace("_", ""))
    if found is None:
        raise DataError(
            f"The role {shown(name)} in {place} is not known; write user, assistant, system or "
            f"tool, or say what it is in data.roles, such as {_example(name)} (name it as itself "
            "if the chat template has that role)."
        )
    return found, False


@functools.lru_cache(1 << 12)
def plain_name(name: str) -> str:
    """Returns a name in small letters, with underscores between its words."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[\s-]+", "_", text).lower()


def own_roles(pairs: Any) -> dict[str, str]:
    """Returns the roles of `data.roles`, a list of texts NAME=ROLE, by their names."""
    split = [pair.partition("=") for pair in pairs]
    return {name.strip(): role.strip() for name, _, role in split}


def _example(name: str) -> str:
    line = " ".join(name.encode(errors="replace").decode().split())[:30]
    return f"{line}=user"
