"""What a page loads from our own routes is compressed."""

from __future__ import annotations

import re

from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

_COMPRESSED = ("/api/", "/ramstream/", "/assets/")
_AS_IT_IS = re.compile(r"/api/runs/[^/]+/(file|archive)")
"""Gigabytes are sent as fast as they are read; ranges of a file count its own bytes."""
_LEAST = 1_000
"""Bytes below which compression saves no packet."""
_LEVEL = 4
"""A higher level takes twice the time for a tenth fewer bytes."""


class Compressed:
    """ASGI middleware that compresses the page, the answers of our own routes and scripts.

    What Gradio has compressed passes as it is, and so do its streams.
    """

    def __init__(self, app: ASGIApp):
        self.app = app
        self._compressing = GZipMiddleware(app, minimum_size=_LEAST, compresslevel=_LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_compressed = scope["type"] == "http" and (
            scope["path"] == "/" or scope["path"].startswith(_COMPRESSED)
        )
        is_compressed = is_compressed and not _AS_IT_IS.fullmatch(scope["path"])
        await (self._compressing if is_compressed else self.app)(scope, receive, send)
