"""A head start for a page that is being opened.

The files that it will request are named in the head of the answer. The server also begins to read
the record that the page will show, while the browser is still loading Gradio's part of the page.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.pages.run.run_watch import watch_of
from app.session.session import Session
from engine.errors import RamstreamError


class Opening:
    """ASGI middleware that names the files that the page's scripts will load in the answer that
    opens a page. A `Link` header (RFC 8288) names them, so that the browser fetches them at once.
    Meanwhile the server begins to read the record of the run that the page will show.
    """

    def __init__(
        self,
        app: ASGIApp,
        session: Session,
        scripts: Sequence[str],
        styles: Sequence[str],
        modules: Sequence[str],
    ):
        """Takes the addresses of plain scripts, style sheets and modules."""
        self.app = app
        self._session = session
        links = [
            *(f"<{address}>; rel=modulepreload" for address in modules),
            *(f"<{address}>; rel=preload; as=style" for address in styles),
            *(f"<{address}>; rel=preload; as=script" for address in scripts),
        ]
        self._links = (b"link", ", ".join(links).encode("ascii"))
        self._reading: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return

        async def send_with_links(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], self._links]}
            await send(message)

        self._session.was_opened.set()
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        run = query.get("run", [None])[0]
        reading = asyncio.create_task(read_ahead(self._session, run))
        # The event loop keeps only a weak reference to the task, which could otherwise be collected
        # before it is done.
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        await self.app(scope, receive, send_with_links)


async def read_ahead(session: Session, run: str | None = None) -> None:
    """Reads the record of `run` in advance, so that no page waits for it.

    Without `run`, it reads the record of the run that a page shows by default.
    """
    with contextlib.suppress(RamstreamError):  # the page gets the error when it requests the run
        run = run or await asyncio.to_thread(session.run_to_open)
        if run is not None:
            await watch_of(session, run).answer(0, "step")
