"""Routes of the page Chat.

GET  /api/chat?since=VERSION
    The chat, or only its version if the page already has that one.
GET  /api/chat/choices
    The runs, and the weights of each that can be used in a chat.
POST /api/chat/about {choice}
    The prompt format and other properties of these weights.
POST /api/chat/send {choice, message, compare, system, max_new_tokens, temperature, top_p, seed}
    Adds a message and starts its answer.
POST /api/chat/stop {}, /api/chat/new {}, /api/chat/unload {}
    Ends the answer under way, begins a new chat, or frees the memory of the weights.

A choice is {run_id, weights} or {folder}.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.pages.chat.chat import Chat, Choice
from app.server.requests import answering_errors, count_of, json_body, number_of, object_of, text_of
from engine.errors import RunError
from engine.tools.chat.conversation import Sampling

MAX_NEW_TOKENS = 4096
LONGEST_MESSAGE = 200_000
LARGEST_SEED = 2**32 - 1


def chat_routes(chat: Chat) -> list[Route]:
    """Returns the routes through which pages use the one chat, `chat`."""

    async def state(request: Request) -> Response:
        return JSONResponse(chat.state(count_of(request.query_params.get("since", "")) or 0))

    async def choices(_: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(chat.choices))

    return [
        Route("/api/chat", answering_errors(state), methods=["GET"]),
        Route("/api/chat/choices", answering_errors(choices), methods=["GET"]),
        _posted("about", lambda body: chat.about(_choice(body))),
        _posted("send", lambda body: _send(chat, body)),
        _posted("stop", lambda _: chat.stop()),
        _posted("new", lambda _: chat.new_chat()),
        _posted("unload", lambda _: chat.release()),
    ]


def _posted(path: str, work: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Route:
    """Returns a route that calls `work` in a thread, since it may read files or wait."""

    async def route(request: Request) -> Response:
        body = await json_body(request)
        return JSONResponse(await asyncio.to_thread(work, body) or {})

    return Route(f"/api/chat/{path}", answering_errors(route), methods=["POST"])


def _send(chat: Chat, body: dict[str, Any]) -> None:
    message, system = text_of(body, "message"), text_of(body, "system")
    if max(len(message), len(system)) > LONGEST_MESSAGE:
        raise RunError(f"The message has more than {LONGEST_MESSAGE:,} characters; shorten it.")
    sampling = Sampling(
        int(number_of(body, "max_new_tokens", 256, 1, MAX_NEW_TOKENS)),
        number_of(body, "temperature", 0.0, 0.0, 5.0),
        number_of(body, "top_p", 1.0, 0.01, 1.0),
        int(number_of(body, "seed", 0, 0, LARGEST_SEED)),
    )
    chat.send(_choice(body), message, body.get("compare") is True, system, sampling)


def _choice(body: dict[str, Any]) -> Choice:
    given = object_of(body, "choice")
    if "folder" in given:
        folder = text_of(given, "folder").strip()
        if not folder:
            raise RunError("No folder is given; name a folder with a model on this machine.")
        return Choice(weights="", folder=folder)
    return Choice(text_of(given, "run_id"), text_of(given, "weights"))
