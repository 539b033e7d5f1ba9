"""The files of the page: its style sheets and scripts, plotly.js, and those of Gradio.

An address changes with its content, so that a browser keeps what it has loaded, compiled scripts
included, and asks for nothing twice.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.bundle import bundled_scripts, bundled_styles
from app.server.plotly_js import compressed_plotly, plotly_address

APP = Path(__file__).parent.parent
FOREVER = "public, max-age=31536000, immutable"
_TYPES = {".css": "text/css", ".js": "text/javascript"}
_MAIN = "pages/frame/main.js"
SCRIPT, STYLE = "page.js", "page.css"
"""Names of all scripts and of all style sheets together, which are what a page loads."""
FIRST_SCRIPTS = ("pages/frame/frames.js", "pages/frame/asked_first.js")
_NAMED_BY_CONTENT = "/assets/"
"""Path of Gradio's own scripts and styles. A hash of the content ends each name."""


# ------------------------------------------------------------------ our own


@functools.cache
def page_files() -> dict[str, str]:
    """Returns the media type of each style sheet and script, by its path in `app`.

    They are in the order of their names, and style sheets apply in this order.
    """
    files = [path for path in APP.rglob("*") if path.suffix in _TYPES]
    files.sort(key=lambda path: (path.name, path))
    return {path.relative_to(APP).as_posix(): _TYPES[path.suffix] for path in files}


@functools.cache
def files_version() -> str:
    """Returns a name for the content of all page files together, since scripts import others by
    their relative paths.
    """
    found = hashlib.sha256()
    for name in page_files():
        content = (APP / name).read_bytes()
        found.update(f"{name} {len(content)} ".encode() + content)
    return f"v-{found.hexdigest()[:12]}"


def page_address(name: str) -> str:
    """Returns the address of SCRIPT or STYLE."""
    return f"/ramstream/{files_version()}/{name}"


@functools.cache
def _bundled(name: str) -> str:
    if name == SCRIPT:
        return bundled_scripts(APP, _MAIN)
    return bundled_styles(APP, [each for each in page_files() if each.endswith(".css")])


def first_script() -> str:
    """Returns the scripts that are no modules. The page contains them, and waits for none."""
    return "".join((APP / name).read_text(encoding="utf-8") for name in FIRST_SCRIPTS)


def head() -> str:
    """Returns the elements by which a page loads its files."""
    return (
        f'<link rel="stylesheet" href="{page_address(STYLE)}">'
        f'<meta name="ramstream-plotly" content="{plotly_address()}">'
        f'<script type="module" src="{page_address(SCRIPT)}"></script>'
    )


def file_routes() -> list[Route]:
    """Returns the routes of plotly.js and of our own files."""
    compressed_plotly("br")  # the first chart need not wait for it

    async def plotly(request: Request) -> Response:
        # Browsers take no Brotli from another machine without https.
        knows_brotli = "br" in request.headers.get("accept-encoding", "")
        coding = "br" if knows_brotli else "gzip"
        return Response(
            await run_in_threadpool(compressed_plotly, coding),
            media_type="text/javascript",
            headers={
                "cache-control": FOREVER,
                "content-encoding": coding,
                "vary": "accept-encoding",
            },
        )

    async def page_file(request: Request) -> Response:
        version, _, name = request.path_params["name"].partition("/")
        if not version.startswith("v-"):
            version, name = "", request.path_params["name"]
        # A page of another version of the program gets the file of this one, but may not keep it.
        headers = {"cache-control": FOREVER if version == files_version() else "no-cache"}
        if name in (SCRIPT, STYLE):
            return Response(_bundled(name), media_type=_TYPES[Path(name).suffix], headers=headers)
        if name not in page_files():
            return JSONResponse({"error": "There is no such file."}, 404)
        return FileResponse(APP / name, media_type=page_files()[name], headers=headers)

    return [Route(plotly_address(), plotly), Route("/ramstream/{name:path}", page_file)]


# ------------------------------------------------------------------ Gradio's


class KeptFiles:
    """ASGI middleware that has browsers keep Gradio's files. Gradio sets nothing for that, so that
    browsers would ask for some seventy files again each time.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_NAMED_BY_CONTENT):
            await self.app(scope, receive, send)
            return

        async def send_kept(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                kept = (b"cache-control", FOREVER.encode("ascii"))
                message = {**message, "headers": [*message["headers"], kept]}
            await send(message)

        await self.app(scope, receive, send_kept)
