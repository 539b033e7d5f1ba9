"""Limits on connections that Uvicorn does not set itself.

By default, Uvicorn waits for ever for the head of a request and accepts any number of connections.
With any parser but the one chosen here, it would also accept heads of any length.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.server.guard import UPLOAD_PATH
from app.server.peers import PEER_KEY, Peer

SHUTDOWN_SECONDS = 2
HEAD_SECONDS = 15.0
"""Seconds within which the head of a request must arrive. The same limit holds for the rest of a
body whose request was already answered.
"""
MOST_CONNECTIONS = 256
"""Number of open connections below which every request is answered. For one on a further
connection, the oldest is closed on which a request arrives, or on which nothing is asked. Where all
others are being answered or receive a file, it is answered with 503. A page opens up to 6.
"""
NEW_SECONDS = 1.0
"""Seconds for which a connection is new."""
MOST_OPEN = 512
"""Largest number of open connections, of which most may not have sent a request yet."""

LARGEST_HEAD = 1 << 20
"""Largest number of bytes in the head of a request. Browsers keep up to 180 cookies of 4 KiB for a
host, and send them all to each of its ports.
"""


class Connection(H11Protocol):
    """A connection closes itself when its client sends a request too slowly.

    h11 refuses heads that are too large (400). The guard limits bodies, and heads without their
    cookies.
    """

    head_seconds = HEAD_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.app = self._served

    async def _served(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request, where there is room for it."""
        has_room = self._makes_room(MOST_CONNECTIONS)
        await (self.config.loaded_app if has_room else service_unavailable)(scope, receive, send)

    def connection_made(self, transport: Any) -> None:
        self._made = self.loop.time()
        super().connection_made(transport)
        self._makes_room(MOST_OPEN)
        # Uvicorn gives each request a copy of this state: all of a connection have one peer.
        self.app_state = {**self.app_state, PEER_KEY: Peer(self.client, self.server)}
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def end_stream(self) -> None:
        """Ends an answer that has begun, as if its client had gone away. The page's streams
        continue until then: a server that stops would wait for them, and print a traceback for
        each.
        """
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()

    def _makes_room(self, most: int) -> bool:
        """Closes the connections that are least needed, until fewer than `most` are open: who sends
        slowly on many of them shuts nobody out. Returns whether that is so.
        """
        while len(self.connections) >= most:
            others = (each for each in self.connections if isinstance(each, Connection))
            needless = (each for each in others if each is not self and each.may_end())
            ended = min(needless, key=Connection.age, default=None)
            if ended is None:
                return False
            ended.give_up()
        return True

    def may_end(self) -> bool:
        """Returns whether no route answers a request of this connection, or receives its file."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        is_file = self.scope["method"] == "PUT" and UPLOAD_PATH.fullmatch(self.scope["path"])
        return cycle.more_body and not is_file

    def age(self) -> tuple[bool, bool, float]:
        """Returns what connections are sorted by, those that are least needed first: on which a
        request arrives for long, or the rest of one that was answered already; on which nothing is
        asked; and new ones, whose request may be complete and not read yet. The oldest come first.
        """
        is_new = self.loop.time() - self._made < NEW_SECONDS
        is_arriving = self._deadline is not None or self.cycle is None or self.cycle.more_body
        return is_new, not is_new and not is_arriving, self._made

    def give_up(self) -> None:
        """Closes the connection at once."""
        self._forget()
        self.connections.discard(self)
        self.transport.abort()

    def _watch(self) -> None:
        """Starts the deadline at the first byte that arrives while no request is being answered.

        Later bytes of the same head do not extend the deadline: otherwise a client that sends one
        byte now and then would keep its connection open for ever.
        """
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.head_seconds, self.give_up)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


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
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        **options,
    )
