"""The routes that an application has mounted, and what they answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from typing import Any

import httpx

from tests.support.served import ADDRESS

READS = {"GET", "HEAD", "OPTIONS"}
FILLED = {
    "run_id": "20260101-000000-run",
    "name": "main.js",
    "number": "1",
    "queued": "abc",
    "size": "192",
    "upload": "0123456789abcdef",
}


def walked(routes: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields (method, path with its parameters filled in, path template) for every route, including
    those of mounted applications.
    """
    for route in routes:
        included = getattr(route, "original_router", None)  # a router that FastAPI keeps unchanged
        inner = included.routes if included is not None else getattr(route, "routes", None)
        path = prefix + getattr(route, "path", "")
        if inner is not None:
            yield from walked(inner, path)
            continue
        assert "path" in vars(route), f"{route!r} is a kind of route that is not known here"
        filled = re.sub(r"{(\w+)(:\w+)?}", lambda name: FILLED.get(name[1], "x"), path)
        for method in route.methods:
            yield method, filled, path


def kind_of(method: str, path: str) -> str:
    """Returns the type of body that the guard lets pass to a route."""
    is_upload = method == "PUT" and path == f"/api/uploads/{FILLED['upload']}"
    return "application/octet-stream" if is_upload else "application/json"


def answers(
    app: Any, requests: Iterable[tuple[str, str, dict[str, str]]], content: bytes = b"{}"
) -> list[httpx.Response]:
    """Returns the answers to requests (method, path, headers), sent one after the other without
    following redirects. Those that do not read send `content`.
    """

    async def go() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=ADDRESS) as client:
            return [
                await client.request(
                    method, path, headers=headers, content=None if method in READS else content
                )
                for method, path, headers in requests
            ]

    return asyncio.run(go())
