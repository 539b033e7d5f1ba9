"""Answers to streams of Gradio's queue that Gradio does not know.

Gradio itself begins to answer, and then raises an exception, which the server prints at length.
"""

from __future__ import annotations

import json
from urllib.parse import parse_qs

import gradio as gr
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

STREAM = "/gradio_api/queue/data"
_UNKNOWN = {
    "msg": "unexpected_error",
    "message": "The server does not know this stream; reload the page.",
    "session_not_found": True,
    "success": False,
}
"""Message that Gradio's page takes for a stream that is over."""


class KnownStreams:
    """ASGI middleware that passes a stream of a session of the queue on only if the queue knows
    that session.
    """

    def __init__(self, app: ASGIApp, page: gr.Blocks):
        self.app = app
        self._queue = page._queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != STREAM:
            await self.app(scope, receive, send)
            return
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        sessions = query.get("session_hash", [])
        if len(sessions) != 1:
            answer: Response = JSONResponse({"error": "session_hash is missing."}, 422)
        elif sessions[0] in self._queue.pending_messages_per_session:
            await self.app(scope, receive, send)
            return
        else:
            answer = Response(f"data: {json.dumps(_UNKNOWN)}\n\n", media_type="text/event-stream")
        await answer(scope, receive, send)
