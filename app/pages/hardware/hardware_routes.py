"""Routes of the page Hardware.

GET  /api/hardware?fresh=true
    The current state of this machine. The table is based on it if `fresh`, and otherwise if it has
    changed.
GET  /api/hardware/choices
    The choices that the page offers.
POST /api/hardware/column {machine, timed, settings}
    One machine of the table of models.
POST /api/hardware/csv {machines, models, settings}
    Rows of that table as a file.
POST /api/hardware/largest {settings}
    The largest model that this machine can train.
POST /api/hardware/offers {model, settings}
    The known machines that would train a model.
POST /api/hardware/measure {}
    Starts the job that measures this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.pages.hardware.hardware import Hardware, choices
from app.server.requests import answering_errors, json_body, object_of, text_of, texts_of

Body = dict[str, Any]


def hardware_routes(hardware: Hardware) -> list[Route]:
    """Returns the routes that answer requests with `hardware`."""

    def column(body: Body) -> dict[str, Any]:
        is_timed = body.get("timed") is True
        return hardware.column(object_of(body, "settings"), text_of(body, "machine"), is_timed)

    def csv(body: Body) -> dict[str, Any]:
        settings = object_of(body, "settings")
        return {"csv": hardware.csv(settings, texts_of(body, "machines"), texts_of(body, "models"))}

    def largest(body: Body) -> dict[str, Any]:
        return hardware.largest(object_of(body, "settings"))

    def offers(body: Body) -> dict[str, Any]:
        return hardware.offers(object_of(body, "settings"), text_of(body, "model"))

    return [
        _answered("GET", "", lambda asked: hardware.about(asked.get("fresh") == "true")),
        _answered("GET", "/choices", lambda _: choices()),
        _answered("POST", "/column", column),
        _answered("POST", "/csv", csv),
        _answered("POST", "/largest", largest),
        _answered("POST", "/offers", offers),
        _answered("POST", "/measure", lambda _: hardware.measure().to_dict()),
    ]


def _answered(method: str, path: str, work: Callable[[Body], dict[str, Any]]) -> Route:
    """Returns a route that calls `work` in a thread, since it takes up to several seconds. It gets
    the body of the request or, of a GET, what its address asks for.
    """

    async def route(request: Request) -> Response:
        is_read = method == "GET"
        body = dict(request.query_params) if is_read else await json_body(request)
        return JSONResponse(await asyncio.to_thread(work, body))

    return Route(f"/api/hardware{path}", answering_errors(route), methods=[method])
