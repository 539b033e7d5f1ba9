"""Answers of the server as facts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.support.behavior.plain import digest, each_text, without
from tests.support.behavior.sides import Answer, Server, Side

Plain = Callable[[str], str]
UNIQUE = {"server_id", "app_id", "version"}
"""Names of values that each server makes anew."""
NOT_COMPARED = {"date", "content-length", "etag", "last-modified"}
"""Headers whose values vary with time and length; that they are there is compared."""


def fact_of(
    side: Side, answer: Answer, unique: set[str] = UNIQUE, plain: Plain | None = None
) -> dict[str, Any]:
    """Status, headers and body. JSON is compared value by value, text as it is, other bodies by
    their digest.
    """
    headers = {
        name: "..."
        if name in NOT_COMPARED
        else _cookie(value)
        if name == "set-cookie"
        else side.plain(value)
        for name, value in sorted(answer.headers)
    }
    return {
        "status": answer.status,
        "headers": headers,
        "body": body_of(side, answer, unique, plain),
    }


def body_of(
    side: Side, answer: Answer, unique: set[str] = UNIQUE, plain: Plain | None = None
) -> Any:
    """`plain` takes out of texts what varies: by default what `Side.plain` does."""
    plain = plain or side.plain
    kind = answer.header("content-type")
    if "json" in kind and answer.body:
        return each_text(without(json.loads(answer.body), unique), plain)
    if kind.startswith("text/"):
        return plain(answer.body.decode("utf-8", "replace"))
    return digest(answer.body)


def _cookie(value: str) -> str:
    """The cookie without its value: a name, and how it is kept."""
    name, _, rest = value.partition("=")
    return f"{name}=...; {rest.partition('; ')[2]}"


class Asked:
    """Asks a server and writes down what it answers."""

    def __init__(self, server: Server, facts: dict[str, Any], plain: Plain | None = None):
        self.server, self.facts, self.plain = server, facts, plain

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        name: str = "",
        unique: set[str] = UNIQUE,
        **more: Any,
    ) -> Answer:
        """One request, whose answer becomes a fact under its method and path, or `name`."""
        answer = self.server.ask(method, path, body, **more)
        side = self.server.side
        text = "" if body is None else f" {json.dumps(body, ensure_ascii=False)[:160]}"
        self.facts[side.plain(name or f"{method} {path[:160]}{text}")] = fact_of(
            side, answer, unique, self.plain
        )
        return answer
