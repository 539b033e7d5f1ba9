"""Routes of OpenAI's API, which clients use with the key. Errors have the form of that API.

GET  /v1/models, /v1/models/MODEL
    The names of the run that is served: its own, and that of its base model.
POST /v1/chat/completions
    The next message of a conversation.
POST /v1/completions
    What follows a text, or several.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.server.api_key import API_PREFIX, api_error
from app.server.requests import LONGEST_SENTENCE, Handler, json_object
from app.session.engine_calls import ServedModel
from app.session.serving import Served, Serving, UnknownModel
from engine.errors import DataError, RamstreamError, RunError
from engine.tools.serve.answer_request import AnswerRequest, chat_request, completion_request
from engine.tools.serve.request_fields import RequestFault

MOST_ASKED = 512
"""Answers that are under way or wait at most; further ones are refused for now."""
LOAD_SECONDS = 600.0
"""Seconds for which a request waits for its weights, or for another job before they are loaded."""
LOOK_SECONDS = 0.1
CLIENT_LEFT = 499

Parse = Callable[[dict[str, Any]], AnswerRequest]


class _Busy(RamstreamError):
    """More answers are asked for than can wait."""


def openai_routes(serving: Serving) -> list[Route]:
    """Returns the routes that answer with the model of `serving`."""

    async def models(_: Request) -> Response:
        served = serving.served()
        names = [] if served is None else served.names().values()
        return JSONResponse({"object": "list", "data": [_model(name, served) for name in names]})

    async def model(request: Request) -> Response:
        served, name = serving.served(), request.path_params["model"]
        serving.refuse_unknown(name)
        return JSONResponse(_model(name, served))

    def answering(parse: Parse) -> Handler:
        async def answer(request: Request) -> Response:
            return await _answer(serving, request, parse)

        return answer

    async def nothing(_: Request) -> Response:
        return JSONResponse(api_error(404, "There is no such path here."), 404)

    return [
        Route(f"{API_PREFIX}models", _in_form(models), methods=["GET"]),
        Route(f"{API_PREFIX}models/{{model:path}}", _in_form(model), methods=["GET"]),
        Route(f"{API_PREFIX}chat/completions", _in_form(answering(chat_request)), methods=["POST"]),
        Route(
            f"{API_PREFIX}completions", _in_form(answering(completion_request)), methods=["POST"]
        ),
        Route(
            f"{API_PREFIX}{{rest:path}}",
            nothing,
            methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"],
        ),
    ]


def _model(name: str, served: Served | None) -> dict[str, Any]:
    began = 0 if served is None else served.began
    return {"id": name, "object": "model", "created": began, "owned_by": "ramstream"}


def _in_form(route: Handler) -> Handler:
    """Returns `route` with its errors in the form of OpenAI's API."""

    async def answer(request: Request) -> Response:
        try:
            return await route(request)
        except RamstreamError as error:
            return _refusal(error)
        except Exception as error:  # noqa: BLE001  the client gets an answer at any fault
            traceback.print_exc(file=sys.stderr)
            sentence = f"The program failed at this by a fault of its own ({type(error).__name__})."
            return JSONResponse(api_error(500, sentence), 500)

    return answer


def _refusal(error: RamstreamError) -> Response:
    status = _status(error)
    return JSONResponse(_body_of(error, status), status)


def _status(error: RamstreamError) -> int:
    """Returns the status of an error: the request is at fault, its model, or what goes on here."""
    if isinstance(error, UnknownModel):
        return 404
    if isinstance(error, _Busy):
        return 429
    return 400 if isinstance(error, (RequestFault, DataError)) else 503


def _body_of(error: RamstreamError, status: int) -> dict[str, Any]:
    field, code = None, None
    if isinstance(error, RequestFault):
        field, code = error.field, error.code
    elif isinstance(error, UnknownModel):
        field, code = "model", "model_not_found"
    sentence = str(error)[:LONGEST_SENTENCE].encode("utf-8", "replace").decode()
    return api_error(status, sentence, field, code)


# ---------------------------------------------------------------------- answers


async def _answer(serving: Serving, request: Request, parse: Parse) -> Response:
    try:
        body = json_object(await request.body())
    except RunError as error:
        raise RequestFault(str(error)) from None
    asked = parse(body)
    left = asyncio.ensure_future(_until_left(request.receive))
    try:
        model = await _ready(serving, asked.model, left)
        if model is None:
            return Response(status_code=CLIENT_LEFT)
        if model.asked + asked.rows > MOST_ASKED:
            raise _Busy("Too many answers at once. Try again in a moment.")
        prompts = await asyncio.to_thread(model.prompts, asked)
        exchange = _Exchange(model, asked, prompts)
        if asked.is_stream:
            return _EventStream(exchange.events())
        return await _whole(exchange, left)
    finally:
        left.cancel()


async def _ready(serving: Serving, name: str, left: asyncio.Future[None]) -> ServedModel | None:
    """Returns the weights that a client names, once they are loaded; None if it left meanwhile."""
    end = time.monotonic() + LOAD_SECONDS
    while True:
        model = serving.model(name)
        if model is not None:
            return model
        if time.monotonic() > end:
            raise RunError(f"{name} is not loaded yet; try again in a while.")
        await asyncio.wait({left}, timeout=LOOK_SECONDS)
        if left.done():
            return None


async def _whole(exchange: _Exchange, left: asyncio.Future[None]) -> Response:
    """Returns the answers in one piece; if the client leaves, they end."""
    answered = asyncio.ensure_future(exchange.whole())
    try:
        either: list[asyncio.Future[Any]] = [answered, left]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            return Response(answered.result(), media_type="application/json")
        return Response(status_code=CLIENT_LEFT)
    finally:
        answered.cancel()


async def _until_left(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Exchange:
    """The answers to one request while they are drawn."""

    def __init__(self, model: ServedModel, asked: AnswerRequest, prompts: list[list[int]]):
        self._model, self._asked, self._prompts = model, asked, prompts
        self._reply = model.reply(asked, prompts)
        self._drawn: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

    async def whole(self) -> bytes:
        """Returns the body of an answer that is sent at once."""
        gains: list[list[Any]] = [[] for _ in self._reply.answers]
        async with contextlib.aclosing(self._gains()) as batches:
            async for batch in batches:
                for place, gain in batch:
                    gains[place].append(gain)
        return msgspec.json.encode(self._reply.whole(gains))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream; an error that comes later ends it as an event."""
        try:
            yield _events(self._reply.first_chunks())
            async with contextlib.aclosing(self._gains()) as batches:
                async for batch in batches:
                    chunks = [self._reply.chunk(place, gain) for place, gain in batch]
                    yield _events([chunk for chunk in chunks if chunk is not None])
            yield _events(self._reply.last_chunks()) + b"data: [DONE]\n\n"
        except RamstreamError as error:
            yield _events([_body_of(error, _status(error))])

    async def _gains(self) -> AsyncGenerator[list[tuple[int, Any]], None]:
        """Yields what the answers gain, all that has come at once. Answers end with it: at a stop
        text, or if nobody waits for them any longer.
        """
        loop = asyncio.get_running_loop()
        rows = self._model.ask(
            self._asked,
            self._prompts,
            lambda place, drawn: self._drawn.put_nowait((place, drawn)),
            loop.call_soon_threadsafe,
        )
        going = dict(enumerate(rows))
        try:
            while going:
                drawn = [await self._drawn.get()]
                while not self._drawn.empty():
                    drawn.append(self._drawn.get_nowait())
                yield self._taken(drawn, going)
        finally:
            for row in going.values():
                self._model.cancel(row)

    def _taken(self, drawn: list[tuple[int, Any]], going: dict[int, Any]) -> list[tuple[int, Any]]:
        gains = []
        for place, token in drawn:
            if place not in going:
                continue
            if isinstance(token, RamstreamError):
                raise token
            gain = self._reply.answers[place].take(token)
            gains.append((place, gain))
            if gain.finish is not None:
                self._model.cancel(going.pop(place))
        return gains


def _events(chunks: list[dict[str, Any]]) -> bytes:
    """Returns chunks as events. Many clients take U+0085, U+2028 and U+2029 for ends of lines, too,
    so these are escaped.
    """
    events = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)
    for letter in "\x85\u2028\u2029":
        events = events.replace(letter.encode(), f"\\u{ord(letter):04x}".encode())
    return events


class _EventStream(Response):
    """An answer in events. If the client goes away, it ends."""

    def __init__(self, events: AsyncGenerator[bytes, None]):
        super().__init__()
        self._events = events

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        left = asyncio.ensure_future(_until_left(receive))
        try:
            await asyncio.wait({sending, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),  # a proxy passes each event on at once
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(self._events) as events:
            async for content in events:
                if content:
                    await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
