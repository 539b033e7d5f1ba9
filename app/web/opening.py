"""A page that is being opened: what it will ask for is named in the answer's head or begun at once,
while its browser is still busy with Gradio's part of the page.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from app.session.session import Session
from engine.errors import RamstreamError

App = Callable[[MutableMapping[str, Any], Any, Callable[[Any], Awaitable[None]]], Awaitable[None]]


class Opening:
    """ASGI middleware. The page's head names the files that its scripts will load (`Link`, RFC
    8288), and the record of the run that it will show begins to be read.
    """

    def __init__(
        self,
        app: App,
        session: Session,
        scripts: Sequence[str],
        styles: Sequence[str],
        modules: Sequence[str],
    ):
        """Addresses of plain scripts, of style sheets and of modules."""
        self.app = app
        self._session = session
        links = [
            *(f"<{address}>; rel=modulepreload" for address in modules),
            *(f"<{address}>; rel=preload; as=style" for address in styles),
            *(f"<{address}>; rel=preload; as=script" for address in scripts),
        ]
        self._links = (b"link", ", ".join(links).encode("ascii"))
        self._reading: set[asyncio.Task[None]] = set()

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: Any, send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return

        async def with_links(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], self._links]}
            await send(message)

        self._session.was_opened.set()
        run = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("run", [None])[0]
        reading = asyncio.create_task(read_ahead(self._session, run))
        self._reading.add(reading)  # the loop itself does not keep it
        reading.add_done_callback(self._reading.discard)
        await self.app(scope, receive, with_links)


async def read_ahead(session: Session, run: str | None = None) -> None:
    """Read the record of `run`, or else of the one that a page shows unless it is told which, so
    that no page waits for it.
    """
    with contextlib.suppress(RamstreamError):  # which the page is told when it asks
        run = run or await asyncio.to_thread(session.run_to_open)
        if run is not None:
            await session.watch(run).answer(0, "step")
