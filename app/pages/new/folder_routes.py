"""Routes that browse the folders that the command line names with --data-folder.

- GET /api/folders answers with `{folders}`: the paths of these folders.
- GET /api/folders/N?below=PATH answers with what is in a folder below number N: `{path, folders,
  files, left_out}`. A file is `{name, bytes, path}`.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.server.requests import answering_errors, count_of
from app.session.data_folders import DataFolders


def folder_routes(folders: DataFolders) -> list[Route]:
    """Returns the routes that browse `folders`."""

    async def roots(_: Request) -> Response:
        return JSONResponse({"folders": [str(root) for root in folders.roots]})

    async def one(request: Request) -> Response:
        number = count_of(request.path_params["number"])
        below = request.query_params.get("below", "")
        found = await asyncio.to_thread(folders.listing, number, below)
        files = [
            {"name": name, "bytes": size, "path": str(found.path / name)}
            for name, size in found.files
        ]
        return JSONResponse(
            {
                "path": str(found.path),
                "folders": found.folders,
                "files": files,
                "left_out": found.left_out,
            }
        )

    return [
        Route("/api/folders", answering_errors(roots), methods=["GET"]),
        Route("/api/folders/{number}", answering_errors(one), methods=["GET"]),
    ]
