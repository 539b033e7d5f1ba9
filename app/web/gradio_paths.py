"""What of Gradio the page asks for. Gradio has some sixty routes more: uploads, files by path, a
proxy, recordings, a code editor. None of them is needed here, so none is served, and what a later
version adds is not served either.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from app.web.login import LOGIN_PATH

Scope = MutableMapping[str, Any]
App = Callable[
    [Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]
]

_READ = re.compile(
    r"/|/theme\.css|/favicon\.ico|/manifest\.json|/config"
    r"|/assets/[\w./@-]+|/static/(js|img|fonts)/[\w./@-]+"
    r"|/gradio_api/(app_id|queue/data|heartbeat/\w+)",
    re.ASCII,
)
_SENT = re.compile(r"/gradio_api/(queue/join|run/predict)")
_OWN = ("/api/", "/ramstream/")
LONGEST_PATH = 200


class OnlyNeeded:
    """ASGI middleware: 404 for what neither this program serves itself nor its page asks of Gradio."""

    def __init__(self, app: App):
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not is_needed(scope["method"], scope["path"]):
            await JSONResponse({"error": "There is no such page."}, 404)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def is_needed(method: str, path: str) -> bool:
    """Whether a request is for a route of ours or for one that the page needs of Gradio."""
    if path.startswith(_OWN) or path == LOGIN_PATH:
        return True
    if len(path) > LONGEST_PATH or ".." in path or "//" in path:
        return False
    return bool((_READ if method in ("GET", "HEAD") else _SENT).fullmatch(path))
