"""What routes answer, asked without a server and without the guard; and waiting for what threads
do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.routing import BaseRoute


def send_all(routes: Sequence[BaseRoute], *requests: tuple[str, str, Any]) -> list[httpx.Response]:
    """The answers to (method, path, json) requests, sent one after the other in one event loop."""

    async def go() -> list[httpx.Response]:
        transport = httpx.ASGITransport(Starlette(routes=routes))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [
                await client.request(method, path, json=body) for method, path, body in requests
            ]

    return asyncio.run(go())


def send(routes: Sequence[BaseRoute], method: str, path: str, body: Any = None) -> httpx.Response:
    """The answer to one request."""
    return send_all(routes, (method, path, body))[0]


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Until `condition()` is true. Raises AssertionError where it is not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this never became true"
        time.sleep(0.005)
