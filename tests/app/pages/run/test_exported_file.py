"""Downloads of exported files: whole, in ranges, and as long as the file is the same."""

from __future__ import annotations

import asyncio
import io
import os
import zipfile
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from app.pages.run import exported_archive
from app.pages.run.exported_file import OpenedFile
from app.server.compressed import Compressed
from engine import safe_files

CONTENT = bytes(range(256)) * 9000


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model é.gguf"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def ask(path):
    """Returns a function that asks for the file as a browser does, which leaves nothing open."""
    opened = []

    async def file(_):
        opened.append(safe_files.open_to_read(path, path.parent))
        answer = OpenedFile(opened[-1], path.name)
        path.with_name("next").write_bytes(b"of another export")
        path.with_name("next").rename(path)  # what was opened is sent
        return answer

    app = Starlette(
        routes=[Route("/api/runs/{run_id}/file", file)], middleware=[Middleware(Compressed)]
    )

    async def send(method, headers):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, "/api/runs/a/file", headers=headers)

    def ask(method="GET", seconds=1e9, **headers):
        path.write_bytes(CONTENT)
        os.utime(path, (seconds, seconds))
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        before = len(os.listdir("/proc/self/fd"))
        answer = asyncio.run(send(method, sent))
        assert opened[-1].closed and len(os.listdir("/proc/self/fd")) == before
        return answer

    return ask


def test_a_broken_download_goes_on_where_the_file_is_the_same(ask):
    whole = ask()
    assert whole.content == CONTENT and whole.headers["accept-ranges"] == "bytes"
    assert whole.headers["content-length"] == str(len(CONTENT))
    assert "content-encoding" not in whole.headers
    assert "model%20%C3%A9.gguf" in whole.headers["content-disposition"]
    etag = whole.headers["etag"]
    rest = ask(range="bytes=1000000-", if_range=etag)
    assert rest.status_code == 206 and rest.content == CONTENT[1_000_000:]
    assert rest.headers["content-range"] == f"bytes 1000000-{len(CONTENT) - 1}/{len(CONTENT)}"
    # A file that was written anew is sent from its beginning.
    anew = ask(range="bytes=1000000-", if_range=etag, seconds=1.5e9)
    assert anew.status_code == 200 and anew.content == CONTENT
    assert anew.headers["etag"] != etag


def test_ranges_are_those_that_are_asked_for(ask):
    assert ask(range="bytes=-5").content == CONTENT[-5:]
    assert ask(range="bytes=7-9").content == CONTENT[7:10]
    beyond = ask(range=f"bytes={len(CONTENT)}-")
    assert beyond.status_code == 416
    assert beyond.headers["content-range"].endswith(f"*/{len(CONTENT)}")
    head = ask("HEAD")
    assert head.status_code == 200 and head.content == b""
    assert head.headers["content-length"] == str(len(CONTENT))


def test_a_folder_comes_whole_as_it_is_and_what_is_broken_off_leaves_nothing_open(
    path, monkeypatch
):
    run = SimpleNamespace(id="r", export_path=path.parent / "export")
    monkeypatch.setattr(exported_archive, "export_folders", lambda _: [str(path.parent)])

    async def archive(_):
        return exported_archive.exported_archive(run, str(path.parent))

    routes = [Route("/api/runs/{run_id}/archive", archive)]
    app = Starlette(routes=routes, middleware=[Middleware(Compressed)])

    async def fetch():
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        return await client.get("/api/runs/a/archive")

    whole = asyncio.run(fetch())
    assert "content-encoding" not in whole.headers
    with zipfile.ZipFile(io.BytesIO(whole.content)) as files:
        assert files.testzip() is None
        assert files.read(f"{path.parent.name}/{path.name}") == CONTENT

    async def gone(message):
        if message["type"] == "http.response.body":
            raise OSError("The browser is gone.")

    before = len(os.listdir("/proc/self/fd"))
    answer = asyncio.run(archive(None))
    with pytest.raises(ClientDisconnect):
        asyncio.run(answer({"type": "http", "asgi": {"spec_version": "2.4"}}, None, gone))
    assert len(os.listdir("/proc/self/fd")) == before
