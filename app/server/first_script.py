"""The one of our scripts that runs before those of Gradio, which loads all others of ours
itself.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.login import Login

HEAD = b"<head>"
MARK = b'<meta name="ramstream-login" content="%b">'
"""Mark by which `app/pages/frame/main.js` shows what there is to do about logins."""


class FirstScript:
    """ASGI middleware that adds a script to the head of the page, before all other scripts, and how
    the person who asks was let in.
    """

    def __init__(self, app: ASGIApp, script: str, login: Login | None = None):
        self.app = app
        self._login = login
        self._script = f"<script>\n{script}</script>".encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_page = scope["type"] == "http" and scope["path"] == "/" and scope["method"] == "GET"
        if not is_page:
            await self.app(scope, receive, send)
            return
        way_in = None if self._login is None else self._login.way_in(scope)
        mark = b"" if way_in is None else MARK % way_in.encode("ascii")
        await self.app(scope, receive, self._adding(mark + self._script, send))

    def _adding(self, added: bytes, send: Send) -> Send:
        """Returns a `send` that waits for the whole page, since its length comes before it."""
        start: Message = {}
        chunks: list[bytes] = []

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            chunks.append(message.get("body", b""))
            if message.get("more_body"):
                return
            page = b"".join(chunks).replace(HEAD, HEAD + added, 1)
            headers = [each for each in start["headers"] if each[0] != b"content-length"]
            headers.append((b"content-length", str(len(page)).encode("ascii")))
            await send({**start, "headers": headers})
            await send({"type": "http.response.body", "body": page})

        return add
