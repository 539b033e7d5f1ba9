"""What our own routes are asked, and how they answer: JSON objects in, JSON out, and one sentence
for what is wrong.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.errors import RamstreamError, RunError

LONGEST_SENTENCE = 2000
"""Characters of an answer that says what is wrong: what is quoted in it may be as long as the
request.
"""
DEEPEST = 16
"""Objects and lists inside one another, of which our requests have 3."""
_COUNT = re.compile(r"[0-9]{1,15}")
_NO_TEXT = re.compile("[\ud800-\udfff]")


def answering_errors(
    route: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """The route, whose errors are answered by `{"error": sentence}`: 404 or 409 for what was asked
    wrongly, 500 for a fault of the program, which is also printed.
    """

    async def answer(request: Request) -> Response:
        try:
            response = await route(request)
        except RamstreamError as error:
            response = _refusal(404 if request.method in ("GET", "HEAD") else 409, str(error))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            response = _refusal(
                500,
                f"The program failed at this by a fault of its own ({type(error).__name__}: "
                f"{error}); the terminal in which it runs says where.",
            )
        response.headers["cache-control"] = "no-store"
        return response

    return answer


def _refusal(status: int, sentence: str) -> JSONResponse:
    """A sentence that quotes what UTF-8 cannot carry, such as a name of a file, says so by U+FFFD."""
    shown = (
        sentence if len(sentence) <= LONGEST_SENTENCE else f"{sentence[: LONGEST_SENTENCE - 1]}…"
    )
    return JSONResponse({"error": _NO_TEXT.sub("\ufffd", shown)}, status)


async def json_body(request: Request) -> dict[str, Any]:
    """The body of a request, see `json_object`."""
    return json_object(await request.body())


def json_object(raw: bytes) -> dict[str, Any]:
    """What a body says. Raises RunError unless it is a JSON object whose texts can be written to a
    file.
    """
    try:
        body = json.loads(raw)
        if isinstance(body, dict) and not _is_deeper(body, DEEPEST):
            # Python reads NaN, infinite numbers and halves of surrogate pairs, which no answer and
            # no file could carry.
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
            return body
    except (ValueError, RecursionError):
        pass
    raise RunError("The request is not a JSON object of plain texts and numbers.")


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects stand inside one another more than `limit` times."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def count_of(text: str) -> int | None:
    """A number of an address, such as a step; None for what is none. Its digits are bounded: `int`
    refuses thousands.
    """
    return int(text) if _COUNT.fullmatch(text) else None


def text_of(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise RunError(f"{name} is missing; it is a text.")
    return value


def texts_of(body: dict[str, Any], name: str) -> list[str]:
    values = body.get(name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise RunError(f"{name} is missing; it is a list of texts.")
    return values


def object_of(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name, {})
    if not isinstance(value, dict):
        raise RunError(f"{name}: {repr(value)[:60]} is not an object of settings.")
    return value


def switch_of(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool):
        raise RunError(f"{name} is missing; it is true or false.")
    return value


def number_of(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise RunError(f"{name}: {repr(value)[:60]} is not a number from {low:g} to {high:g}.")
    return float(value)
