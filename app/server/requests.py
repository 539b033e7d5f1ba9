"""Requests to our own routes, and answers to their errors.

Requests are JSON objects and answers are JSON; an error is answered with one sentence.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.errors import RamstreamError, RunError
from engine.runs.record.run_folder import NoSuchRun

LONGEST_SENTENCE = 2000
"""Largest number of characters in the sentence of an error: a value that it quotes may be as long
as the request.
"""
DEEPEST = 16
"""Largest depth to which objects and lists may be nested. Those of our pages are 3 deep."""
_COUNT = re.compile(r"[0-9]{1,15}")
_SURROGATES = re.compile("[\ud800-\udfff]")

Handler = Callable[[Request], Awaitable[Response]]


def answering_errors(route: Handler) -> Handler:
    """Returns `route` with its errors answered by `{"error": sentence}`.

    The status is 404 or 409 for an invalid request, and 500 for a fault of the program. Such a
    fault is also printed.
    """

    async def answer(request: Request) -> Response:
        try:
            response = await route(request)
        except NoSuchRun:
            response = _refusal(_status(request), "This run does not exist. Was it deleted?")
        except RamstreamError as error:
            response = _refusal(_status(request), str(error))
        except Exception as error:  # noqa: BLE001  the page shows any fault of the program
            traceback.print_exc(file=sys.stderr)
            response = _refusal(
                500,
                f"The program failed at this by a fault of its own ({type(error).__name__}: "
                f"{error}); the terminal in which it runs says where.",
            )
        response.headers["cache-control"] = "no-store"
        return response

    return answer


def _status(request: Request) -> int:
    return 404 if request.method in ("GET", "HEAD") else 409


def _refusal(status: int, sentence: str) -> JSONResponse:
    """Returns an answer that carries an error sentence.

    The sentence may quote characters that UTF-8 cannot encode, such as those in the name of a file.
    U+FFFD replaces them.
    """
    if len(sentence) > LONGEST_SENTENCE:
        sentence = f"{sentence[: LONGEST_SENTENCE - 1]}…"
    return JSONResponse({"error": _SURROGATES.sub("\ufffd", sentence)}, status)


async def json_body(request: Request) -> dict[str, Any]:
    """Returns the JSON object in the body of a request; see `json_object`."""
    return json_object(await request.body())


def json_object(raw: bytes) -> dict[str, Any]:
    """Returns the JSON object that a body holds.

    Raises RunError unless the body is a JSON object whose texts can be written to a file.
    """
    try:
        # NaN, infinite numbers and halves of surrogate pairs are refused, which no answer and no
        # file could hold.
        body = msgspec.json.decode(raw, type=dict[str, Any])
        if not _is_deeper(body, DEEPEST):
            return body
    except (ValueError, RecursionError):
        pass
    raise RunError("The request is not a JSON object of plain texts and numbers.")


def _is_deeper(value: Any, limit: int) -> bool:
    """Returns whether lists and objects are nested more than `limit` levels deep.

    It works level by level, since recursion would fail on a deeply nested value.
    """
    level = [value]
    for _ in range(limit):
        below: list[Any] = []
        for parent in level:
            children = parent.values() if isinstance(parent, dict) else parent
            below += [child for child in children if isinstance(child, (dict, list))]
        if not below:
            return False
        level = below
    return True


def count_of(text: str) -> int | None:
    """Returns the number that part of an address gives, such as a step, or None if `text` is not
    one.

    It has at most 15 digits: `int` refuses thousands of them.
    """
    return int(text) if _COUNT.fullmatch(text) else None


def text_of(body: dict[str, Any], name: str) -> str:
    """Returns the text `name` of a body. Raises RunError if it is not a text."""
    value = body.get(name)
    if not isinstance(value, str):
        raise RunError(f"{name} is missing; it is a text.")
    return value


def texts_of(body: dict[str, Any], name: str) -> list[str]:
    """Returns the list of texts `name` of a body. Raises RunError if it is not such a list."""
    values = body.get(name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise RunError(f"{name} is missing; it is a list of texts.")
    return values


def object_of(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the object `name` of a body, or an empty one if it is left out.

    Raises RunError for any other type.
    """
    value = body.get(name, {})
    if not isinstance(value, dict):
        raise RunError(f"{name}: {repr(value)[:60]} is not an object of settings.")
    return value


def switch_of(body: dict[str, Any], name: str) -> bool:
    """Returns the boolean `name` of a body. Raises RunError if it is not a boolean."""
    value = body.get(name)
    if not isinstance(value, bool):
        raise RunError(f"{name} is missing; it is true or false.")
    return value


def number_of(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    """Returns the number `name` of a body, or `default` if it is left out.

    Raises RunError if it is not a number or outside of `low` to `high`.
    """
    value = body.get(name, default)
    # To Python, True and False are numbers too.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise RunError(f"{name}: {repr(value)[:60]} is not a number from {low:g} to {high:g}.")
    return float(value)
