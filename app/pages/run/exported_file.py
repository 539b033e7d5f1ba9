"""A file of an exported folder, as a download that goes on where it was broken off."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from app.pages.run.export_details import export_folders, files_of
from engine import safe_files
from engine.errors import RunError
from engine.runs.record.run_folder import RunFolder

_LARGEST = 1 << 50


class OpenedFile(FileResponse):
    """Sends a file that is open already, or the ranges of it that are asked for.

    Starlette opens a file by its path when it answers. The path that it gets here is that of our
    descriptor, so the file is the one that was checked, whatever has its name by then.
    """

    chunk_size = 1 << 20

    def __init__(self, file: BinaryIO, name: str):
        super().__init__(
            f"/proc/self/fd/{file.fileno()}",
            media_type="application/octet-stream",
            filename=name,
            stat_result=os.fstat(file.fileno()),
        )
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


def exported_file(run: RunFolder, folder: str, name: str) -> Response:
    """Returns an answer that sends the file `name` of an exported `folder` of a run. Raises
    RunError for a folder that the run did not export to, and for what is no regular file there.
    """
    if folder not in export_folders(run) or name not in files_of(Path(folder)):
        raise RunError("This run has not exported such a file, or it is gone.")
    path = Path(folder) / name
    try:
        file = safe_files.open_to_read(path, path.parent, _LARGEST)
    except OSError as error:
        raise RunError(f"{name} cannot be read ({error.strerror}).") from None
    return OpenedFile(file, name)
