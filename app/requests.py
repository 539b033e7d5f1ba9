"""What our own routes are asked, and how they answer: JSON objects in, JSON out, and one sentence for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.errors import RamstreamError, RunError


def answering_errors(route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            response = await route(request)
        except RamstreamError as error:
            status = 404 if request.method == "GET" else 409
            response = JSONResponse({"error": str(error)}, status)
        response.headers["cache-control"] = "no-store"
        return response

    return answer


async def json_body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise RunError("The request is not a JSON object.")
    return body


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
        raise RunError(f"{name}: {value!r} is not an object of settings.")
    return value


def number_of(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise RunError(f"{name}: {value!r} is not a number from {low:g} to {high:g}.")
    return float(value)
