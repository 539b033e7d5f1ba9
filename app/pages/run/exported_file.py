"""A file of an exported folder, as a download."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from starlette.responses import Response, StreamingResponse

from app.pages.run.export_details import export_folders, files_of
from engine import safe_files
from engine.errors import RunError
from engine.runs.record.run_folder import RunFolder

_CHUNK = 1 << 20
_LARGEST = 1 << 50


def exported_file(run: RunFolder, folder: str, name: str) -> Response:
    """Returns an answer that streams the file `name` of an exported `folder` of a run. Raises
    RunError for a folder that the run did not export to, and for what is no regular file there.
    """
    if folder not in export_folders(run) or name not in files_of(Path(folder)):
        raise RunError("This run has not exported such a file, or it is gone.")
    path = Path(folder) / name
    try:
        file = safe_files.open_to_read(path, path.parent, _LARGEST)
    except OSError as error:
        raise RunError(f"{name} cannot be read ({error.strerror}).") from None
    size = file.seek(0, 2)
    file.seek(0)
    headers = {
        "content-length": str(size),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(name)}",
    }
    return StreamingResponse(
        _chunks(file, size), media_type="application/octet-stream", headers=headers
    )


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields at most `size` bytes, as announced: a file may grow meanwhile."""
    with file:
        while size and (chunk := file.read(min(_CHUNK, size))):
            size -= len(chunk)
            yield chunk
