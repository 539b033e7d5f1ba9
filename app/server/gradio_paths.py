"""The Gradio paths that the page needs; all others are blocked.

Gradio has some sixty more routes: uploads, files by path, a proxy, recordings, a code editor. The
page needs none of them, so none is served, and neither is any route that a later version adds.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.server.api_key import API_PREFIX
from app.server.login import LOGIN_PATH

_READ = re.compile(
    r"/|/theme\.css|/favicon\.ico|/manifest\.json|/config"
    r"|/assets/[\w./@-]+|/static/(js|img|fonts)/[\w./@-]+"
    r"|/gradio_api/(app_id|queue/data|heartbeat/\w+)",
    re.ASCII,
)
_SENT = re.compile(r"/gradio_api/(queue/join|run/predict)")
_OWN = ("/api/", "/ramstream/", API_PREFIX)
LONGEST_PATH = 200
GRADIO_PARAMETERS = ("page", "deep_link")
"""Words of an address that Gradio reads. This app has no page of that kind, for which Gradio would
fail.
"""


class OnlyNeeded:
    """ASGI middleware that answers 404 unless a path is one of our routes or a Gradio path that the
    page needs.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_needed(scope["method"], scope["path"]):
            await JSONResponse({"error": "There is no such page."}, 404)(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/":
            await self.app(_without_gradio_parameters(scope), receive, send)
        else:
            await self.app(scope, receive, send)


def _without_gradio_parameters(scope: Scope) -> Scope:
    """Returns the scope of a request without what only Gradio reads in its query."""
    parameters = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    kept = [(name, value) for name, value in parameters if name not in GRADIO_PARAMETERS]
    if len(kept) == len(parameters):
        return scope
    return {**scope, "query_string": urlencode(kept).encode("ascii")}


def is_needed(method: str, path: str) -> bool:
    """Returns whether a request is for one of our routes or a Gradio path that the page needs."""
    if path.startswith(_OWN) or path == LOGIN_PATH:
        return True
    if len(path) > LONGEST_PATH or ".." in path or "//" in path:
        return False
    needed = _READ if method in ("GET", "HEAD") else _SENT
    return bool(needed.fullmatch(path))
