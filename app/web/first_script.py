"""One of our scripts runs before those of Gradio, which loads all others of ours itself."""

from __future__ import annotations

from app.login.asgi import App, Message, Receive, Scope, Send

HEAD = b"<head>"


class FirstScript:
    """It adds a script to the head of the page, before all other scripts.

    The class is ASGI middleware.
    """

    def __init__(self, app: App, script: str):
        self.app = app
        self._script = f"<script>\n{script}</script>".encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_page = scope["type"] == "http" and scope["path"] == "/" and scope["method"] == "GET"
        await self.app(scope, receive, self._adding(send) if is_page else send)

    def _adding(self, send: Send) -> Send:
        """Returns a `send` that waits for the whole page, since its length comes before it."""
        start: Message = {}
        pieces: list[bytes] = []

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            pieces.append(message.get("body", b""))
            if message.get("more_body"):
                return
            page = b"".join(pieces).replace(HEAD, HEAD + self._script, 1)
            headers = [each for each in start["headers"] if each[0] != b"content-length"]
            headers.append((b"content-length", str(len(page)).encode("ascii")))
            await send({**start, "headers": headers})
            await send({"type": "http.response.body", "body": page})

        return add
