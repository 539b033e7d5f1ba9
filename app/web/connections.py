"""How uvicorn serves the app: it waits for ever for the head of a request, takes any number of
connections, and with another parser than this one reads heads of any length.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

SHUTDOWN_SECONDS = 2
HEAD_SECONDS = 15.0
"""In which the head of a request arrives, or what is left of a body that was answered already."""
MOST_CONNECTIONS = 256
"""At once; those beyond are answered 503. A page has up to 6."""


class Connection(H11Protocol):
    """One that is closed when it is slow to ask. Heads end after 64 KiB (400); bodies are the
    guard's.
    """

    head_seconds = HEAD_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """The time runs from the first byte on that belongs to no request being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.head_seconds, self._give_up)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.abort()


def server_config(
    app: Any, host: str, port: int, protocol: type[Connection] = Connection, **options: Any
) -> uvicorn.Config:
    """What `uvicorn.Server` is started with; `options` are more of uvicorn's, such as the files of
    a certificate.
    """
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        limit_concurrency=MOST_CONNECTIONS,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        **options,
    )
