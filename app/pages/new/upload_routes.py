"""Routes that receive files, list them and remove them.

- GET /api/uploads answers with `{uploads, problem}`: a list of `{id, name, path, bytes, uploaded}`,
  newest first, with `uploaded` in seconds since 1970; and a sentence about what cannot be read.
- POST /api/uploads {name, bytes} asks whether such a file may be uploaded, and answers with a free
  `{id}`. A browser does not show the refusal of a body that it is still sending, so it asks first.
- PUT /api/uploads/ID?name=NAME receives a file of type `application/octet-stream` with a
  Content-Length, and answers with the upload. The guard reads no such body; its limits are here.
- DELETE /api/uploads/ID {} removes a file. It is refused while a run reads it or waits for it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.server.clients import client_of
from app.server.requests import Handler, answering_errors, count_of, json_body, number_of, text_of
from app.session.session import Session
from app.session.uploads import Incoming, RefusedUpload, Upload, UploadLimits, Uploads
from engine.runs.record.snapshot import OVER_STATES

CHUNK_BYTES = 1 << 20
"""Approximate size of the chunks in which a thread writes the bytes of a file."""
LARGEST_SIZE = 1 << 53
"""Largest number to which a browser counts bytes."""
NOT_READ = (*OVER_STATES, "interrupted", "unreadable")
"""States of a run in which it reads no data."""


def upload_routes(session: Session, uploads: Uploads) -> list[Route]:
    """Returns the routes about `uploads`. The runs of `session` may read them."""

    async def show(_: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(_listed, uploads))

    async def ask(request: Request) -> Response:
        body = await json_body(request)
        name = text_of(body, "name")
        size = int(number_of(body, "bytes", 0, 0, LARGEST_SIZE))
        client = client_of(request.scope).group
        return JSONResponse({"id": await asyncio.to_thread(uploads.new_id, name, size, client)})

    async def receive(request: Request) -> Response:
        size = count_of(request.headers.get("content-length", ""))
        if size is None:
            raise RefusedUpload(411, "An upload says how long it is; send a Content-Length.")
        name = request.query_params.get("name", "")
        upload_id = request.path_params["upload"]
        client = client_of(request.scope).group
        incoming = await asyncio.to_thread(uploads.begin, upload_id, name, size, client)
        try:
            await _load_tensor(request, incoming, uploads.limits)
            kept = await asyncio.to_thread(incoming.keep)
        except asyncio.CancelledError:
            incoming.drop()  # at once: the server ends, and waits for nothing more
            raise RefusedUpload(503, "The server was stopped; upload the file again.") from None
        except BaseException:
            await asyncio.to_thread(incoming.drop)
            raise
        return JSONResponse(_shown(kept))

    async def remove(request: Request) -> Response:
        await json_body(request)
        await asyncio.to_thread(_remove, session, uploads, request.path_params["upload"])
        return JSONResponse(await asyncio.to_thread(_listed, uploads))

    one = "/api/uploads/{upload}"
    return [
        Route("/api/uploads", answering_errors(show), methods=["GET"]),
        Route("/api/uploads", _refusing(ask), methods=["POST"]),
        Route(one, _refusing(receive), methods=["PUT"]),
        Route(one, _refusing(remove), methods=["DELETE"]),
    ]


def _refusing(route: Handler) -> Handler:
    """Returns `route` with its refusals answered under their own status."""

    async def answer(request: Request) -> Response:
        try:
            return await route(request)
        except RefusedUpload as refusal:
            # A file that is sent in spite of that must not hold its connection.
            more = {"connection": "close"} if refusal.status == 429 else None
            return JSONResponse({"error": str(refusal)}, refusal.status, headers=more)

    return answering_errors(answer)


async def _load_tensor(request: Request, incoming: Incoming, limits: UploadLimits) -> None:
    """Writes the body of a request as it arrives. Raises RefusedUpload if it breaks off, if nothing
    or too little arrives, and if it cannot be written.
    """
    stream = request.stream()
    waiting = bytearray()
    seconds, arrived = 0.0, 0
    while True:
        began = time.monotonic()
        try:
            async with asyncio.timeout(limits.idle_seconds):
                chunk = await anext(stream)
        except TimeoutError:
            raise RefusedUpload(
                408, f"Nothing arrived for {limits.idle_seconds:g} seconds; upload the file again."
            ) from None
        except ClientDisconnect:
            raise RefusedUpload(400, "The upload broke off.") from None
        # Only the time in which this server waits counts: its disk may be slow.
        seconds += time.monotonic() - began
        arrived += len(chunk)
        if seconds >= limits.idle_seconds:
            if chunk and arrived < limits.least_rate * seconds:
                raise RefusedUpload(
                    408,
                    f"The file arrives too slowly, with {arrived / seconds:,.0f} bytes a second of "
                    f"at least {limits.least_rate:,}; upload it again over a faster connection.",
                )
            seconds, arrived = 0.0, 0
        waiting += chunk
        # The stream ends with an empty chunk.
        if len(waiting) >= CHUNK_BYTES or not chunk:
            await asyncio.to_thread(incoming.write, waiting)
            waiting = bytearray()
        if not chunk:
            return


def _remove(session: Session, uploads: Uploads, upload_id: str) -> None:
    """Removes an upload. Raises RefusedUpload if it is unknown or in use."""
    upload = uploads.find(upload_id)
    path = str(upload.path)
    users = [run.name for run in session.runs() if run.state not in NOT_READ and path in run.data]
    users += [run.name for run in session.queue.listed() if path in run.data]
    if users:
        raise RefusedUpload(
            409, f"The run {users[0]} needs {upload.name}; wait for its end, or remove it first."
        )
    uploads.remove(upload_id)


def _listed(uploads: Uploads) -> dict[str, Any]:
    shown = [_shown(upload) for upload in uploads.listed()]
    return {"uploads": shown, "problem": uploads.problem}


def _shown(upload: Upload) -> dict[str, Any]:
    return {
        "id": upload.id,
        "name": upload.name,
        "path": str(upload.path),
        "bytes": upload.bytes,
        "uploaded": upload.uploaded,
    }
