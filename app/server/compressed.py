"""What the page is made of, and what our own routes answer, is compressed for the network."""

from __future__ import annotations

from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

_OURS = ("/api/", "/ramstream/")
_LEAST = 1_000
"""Bytes below which compression saves no packet."""
_LEVEL = 4
"""A higher level takes twice the time for a tenth fewer bytes."""


class Compressed:
    """ASGI middleware that compresses the page and the answers of our own routes.

    Gradio compresses its own files. Its streams and uploads pass as they are.
    """

    def __init__(self, app: ASGIApp):
        self.app = app
        self._compressing = GZipMiddleware(app, minimum_size=_LEAST, compresslevel=_LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and (
            scope["path"] == "/" or scope["path"].startswith(_OURS)
        )
        await (self._compressing if is_ours else self.app)(scope, receive, send)
