"""All files of an exported folder, as one download: a ZIP file that is written while it is sent."""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Generator
from pathlib import Path
from urllib.parse import quote

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from app.pages.run.export_details import export_folders, files_of
from engine import safe_files
from engine.errors import RunError
from engine.runs.record.run_folder import RunFolder
from engine.runs.summaries.names import shown_name
from engine.training.export.gguf_known import as_file_name

_CHUNK = 1 << 20
_LARGEST = 1 << 50
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a ZIP file can hold."""


def exported_archive(run: RunFolder, folder: str) -> Response:
    """Returns an answer that streams the regular files of an exported `folder` of a run, in a
    folder of their own. Raises RunError for a folder that the run did not export to.
    """
    place = Path(folder)
    files = files_of(place) if folder in export_folders(run) else {}
    if not files:
        raise RunError("This run has not exported to such a folder, or its files are gone.")
    # What nobody named has the name of its run.
    is_unnamed = place.name == run.export_path.name or place.name.startswith(run.id)
    name = as_file_name(shown_name(run)) if is_unnamed else place.name
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(name)}.zip"}
    return _Archive(_archive(place, name, list(files)), headers)


class _Archive(StreamingResponse):
    """Sends a ZIP file, and leaves no file open where nobody takes the rest."""

    def __init__(self, parts: Generator[bytes, None, None], headers: dict[str, str]):
        super().__init__(parts, media_type="application/zip", headers=headers)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._parts):
            await super().__call__(scope, receive, send)


class _Stream(io.RawIOBase):
    """Keeps what is put into it until that is taken. It cannot seek."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, content: bytes) -> int:  # type: ignore[override]
        self._parts.append(bytes(content))
        return len(content)

    def take(self) -> bytes:
        taken = b"".join(self._parts)
        self._parts.clear()
        return taken


def _archive(place: Path, folder: str, names: list[str]) -> Generator[bytes, None, None]:
    """Yields the ZIP file. Weights hardly get smaller, so they are stored as they are. A file that
    is gone meanwhile breaks the download off, so that nobody takes it for whole.
    """
    stream = _Stream()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(f"{folder}/{name}", _EPOCH)
            entry.external_attr = 0o600 << 16
            with (
                safe_files.open_to_read(place / name, place, _LARGEST) as file,
                archive.open(entry, "w", force_zip64=True) as written,
            ):
                while chunk := file.read(_CHUNK):
                    written.write(chunk)
                    yield stream.take()
            yield stream.take()
    yield stream.take()
