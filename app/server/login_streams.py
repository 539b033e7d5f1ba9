"""Ends an answer that lasts long, such as a stream of events, with the session that asked."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.login_sessions import LoginSession


async def answer_while_logged_in(
    session: LoginSession, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> bool:
    """Lets `app` answer a request for reading as long as the session lasts.

    To the app, the end of a session is the same as a client that leaves. Returns False if the
    session ended before anything was sent: then the caller has to answer.
    """
    exchange = _Exchange(session, receive, send)
    with session.watched(exchange.over.set):
        await app(scope, exchange.receive, exchange.send)
    return await exchange.finish()


class _Exchange:
    """Stands between the app and the client until the session is over.

    An answer of a known length that has begun is completed; a stream ends where it is.
    """

    def __init__(self, session: LoginSession, receive: Receive, send: Send):
        self.over = asyncio.Event()
        self._session, self._receive, self._send = session, receive, send
        self._begun = self._is_stream = self._complete = False

    @property
    def _is_cut_off(self) -> bool:
        return self._session.is_over() and (self._is_stream or not self._begun)

    async def receive(self) -> Message:
        """Returns the next message of the client, which has left once the answer is cut off."""
        # An app that looks whether its client has left does not wait, so this comes first.
        if self._is_cut_off:
            return {"type": "http.disconnect"}
        if not self.over.is_set():
            message = asyncio.ensure_future(self._receive())
            end = asyncio.ensure_future(self.over.wait())
            try:
                await asyncio.wait((message, end), return_when=asyncio.FIRST_COMPLETED)
                if message.done():
                    return message.result()
            finally:
                # Who waits here may be cancelled; nothing may listen on then.
                message.cancel()
                end.cancel()
            if self._is_cut_off:
                return {"type": "http.disconnect"}
        return await self._receive()

    async def send(self, message: Message) -> None:
        """Passes a message on, or drops it."""
        if self._is_cut_off:
            return
        if message["type"] == "http.response.start":
            self._begun = True
            self._is_stream = all(
                name.lower() != b"content-length" for name, _ in message.get("headers", [])
            )
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True
        await self._send(message)

    async def finish(self) -> bool:
        """Ends a stream that was cut off. Returns whether anything was sent."""
        if self._begun and self._is_stream and not self._complete:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return self._begun
