"""Uvicorn serves the app under limits that it does not set itself.

By default, Uvicorn waits for ever for the head of a request and accepts any number of connections.
With any parser but the one chosen here, it would also accept heads of any length.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

SHUTDOWN_SECONDS = 2
HEAD_SECONDS = 15.0
"""The head of a request must arrive within this many seconds. The same limit holds for the rest of
a body whose request was already answered.
"""
MOST_CONNECTIONS = 256
"""At most this many connections are served at once; further ones are answered with 503. A page
opens up to 6.
"""

LARGEST_HEAD = 1 << 20
"""The head of a request has at most this many bytes. Browsers keep up to 180 cookies of 4 KiB for a
host, and send them all to each of its ports.
"""


class Connection(H11Protocol):
    """A connection closes itself when its client sends a request too slowly.

    h11 refuses heads that are too large (400). The guard limits bodies, and heads without their
    cookies.
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

    def end_stream(self) -> None:
        """Ends an answer that has begun, as if its client had gone away. The page's streams go on
        until then: a server that stops would wait for them, and print a traceback for each.
        """
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()

    def _watch(self) -> None:
        """Starts the deadline at the first byte that arrives while no request is being answered.

        Later bytes of the same head do not extend the deadline: otherwise a client that sends one
        byte now and then would keep its connection open for ever.
        """
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
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
    """Returns the configuration for `uvicorn.Server`.

    `options` are further arguments of `uvicorn.Config`, such as the files of a certificate.
    """
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        h11_max_incomplete_event_size=LARGEST_HEAD,
        # The guard reads what a proxy says, if the user has named it; uvicorn would believe any
        # program of this machine, and whatever an environment variable names.
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        **options,
    )
