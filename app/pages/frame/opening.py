"""A head start for a page that is being opened.

The files that it will request first are named in the head of the answer. The server also begins to
read the record that the page will show, while the browser is still loading Gradio's part of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.pages.run.run_watch import watch_of
from app.session.session import Session
from engine.errors import RamstreamError

CHARTED = ("overview", "learning", "machine")
"""Views of a run that have charts."""


class Opening:
    """ASGI middleware that names the page's own files in the answer that opens the page. A `Link`
    header (RFC 8288) names them, so that the browser fetches them at once.
    Meanwhile the server begins to read the record of the run that the page will show.

    plotly.js, which is larger than all others together, is named only if the page opens with a
    chart.
    """

    def __init__(
        self,
        app: ASGIApp,
        session: Session,
        plotly: str,
        style: str,
        script: str,
    ):
        """Takes the addresses of plotly.js, and of the page's own style sheet and module."""
        self.app = app
        self._session = session
        self._links = f"<{script}>; rel=modulepreload, <{style}>; rel=preload; as=style"
        self._plotly_link = f"<{plotly}>; rel=preload; as=script"
        self._reading: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return

        found = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        query = {name: values[0] for name, values in found.items()}
        links = f"{self._plotly_link}, {self._links}" if has_charts(query) else self._links

        async def send_with_links(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (b"link", links.encode("ascii"))
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        self._session.was_opened.set()
        run = query.get("run")
        reading = asyncio.create_task(read_ahead(self._session, run))
        # The event loop keeps only a weak reference to the task, which could otherwise be collected
        # before it is done.
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        await self.app(scope, receive, send_with_links)


def has_charts(query: Mapping[str, str]) -> bool:
    """Returns whether the page of an address opens with a chart. `app/shared/address.js` reads the
    address in the same way.
    """
    if "compare" in query:
        return True
    if "show" in query or query.get("tab", "live") != "live":
        return False
    names_a_run = not query.keys().isdisjoint(("run", "view", "tab"))
    return names_a_run and query.get("view", "overview") in CHARTED


async def read_ahead(session: Session, run: str | None = None) -> None:
    """Reads the record of `run` in advance, so that no page waits for it.

    Without `run`, it reads the record of the run that a page shows by default.
    """
    with contextlib.suppress(RamstreamError):  # the page gets the error when it requests the run
        run = run or await asyncio.to_thread(session.run_to_open)
        if run is not None:
            await watch_of(session, run).answer(0, "step")
