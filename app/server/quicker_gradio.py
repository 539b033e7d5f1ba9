"""A script of Gradio that finds components is sent with a function that remembers what it found.

Gradio looks a component up by walking the tree of all components, 350 for our form, and does so for
each of eighty boxes whenever the form is read or an event changes its state. That was a fifth of
the work of opening a page. Nothing of our page is rendered anew, so what was found stays true.
"""

from __future__ import annotations

import re
from pathlib import Path

import gradio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

ASSETS = Path(gradio.__file__).parent / "templates" / "frontend" / "assets"
_WALK = re.compile(
    r"function (?P<name>[\w$]+)\((?P<node>\w),(?P<id>\w)\)\{if\((?P=node)\.id===(?P=id)\)return "
    r"(?P=node);if\((?P=node)\.children\)for\(let (?P<child>\w) of (?P=node)\.children\)\{let "
    r"(?P=node)=(?P=name)\((?P=child),(?P=id)\);if\((?P=node)\)return (?P=node)\}return null\}"
)
_REMEMBER = """const ramstreamFound = new WeakMap();
function {name}(root, id) {{
    let found = ramstreamFound.get(root);
    if (!found) ramstreamFound.set(root, (found = new Map()));
    if (!found.has(id)) {{
        const node = ramstreamWalk(root, id);
        if (!node) return null;
        found.set(id, node);
    }}
    return found.get(id);
}}
"""


def quicker_routes() -> list[Route]:
    """Returns the routes of the scripts that are changed."""
    return [_route(name, text) for name, text in quicker_scripts().items()]


def _route(name: str, text: str) -> Route:
    async def script(_: Request) -> Response:
        return Response(text, media_type="text/javascript")

    return Route(f"/assets/{name}", script)


def quicker_scripts() -> dict[str, str]:
    """Returns the text of each changed script, by its name. There is none if another version of
    Gradio has another function, which then works as it is.
    """
    changed = {}
    for path in ASSETS.glob("core-*.js"):
        text = path.read_text(encoding="utf-8")
        walk = _WALK.search(text)
        if walk is None:
            continue
        name = walk["name"]
        plain = walk[0].replace(f"{name}(", "ramstreamWalk(")
        remembering = _REMEMBER.format(name=name) + plain
        changed[path.name] = text[: walk.start()] + remembering + text[walk.end() :]
    return changed
