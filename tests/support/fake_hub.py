"""A Hugging Face hub on 127.0.0.1 that serves model folders as the real one does, slowly and
breaking off where asked, and that takes what is pushed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "acme/tiny"
"""Tests ask the hub for this model."""


class GivenUp(Exception):
    """Ends a download, as a person who gives it up does."""


COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE = 1 << 16
_API, _FILE = (
    re.compile(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?"),
    re.compile(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)"),
)


LARGE = (".safetensors", ".bin")
"""Weights are in files with these endings, which it keeps outside of git."""


@dataclass
class FakeHub:
    """`models`: folders by id. `gated`: ids whose files nobody may have. `pause`: seconds before
    each piece of weights. `silent`: ids about which it says nothing at all. `breaks_after`: bytes
    of weights in all after which connections break and no new one answers; None for never.
    `claimed`: sizes that the listing claims of files, in place of the real ones. `ignores_ranges`:
    whole files are sent.
    """

    models: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    pause: float = 0.0
    breaks_after: int | None = None
    claimed: dict[str, int] = field(default_factory=dict)
    ignores_ranges: bool = False
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path, and range asked for."""
    sent: int = 0
    """Bytes of weights."""
    port: int = 0
    writers: dict[str, str] = field(default_factory=dict)
    """Who may push, by token."""
    uploaded: dict[str, bytes] = field(default_factory=dict)
    """Contents outside of git, by SHA-256."""
    pushed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files of each repository, after its newest commit."""
    private: dict[str, bool] = field(default_factory=dict)
    room: int | None = None
    """So many contents are taken outside of git, and no more."""

    def variables(self, cache: Path) -> dict[str, str]:
        """The environment in which this is the hub."""
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "",
            "no_proxy": "127.0.0.1",
            "NO_PROXY": "127.0.0.1",
        }

    def weights_asked(self) -> list[str]:
        """The ranges in which weights were downloaded, "" where it was a whole file."""
        return [
            asked
            for method, path, asked in self.requests
            if method == "GET" and path.endswith(LARGE)
        ]

    @property
    def is_broken(self) -> bool:
        return self.breaks_after is not None and self.sent >= self.breaks_after

    def size(self, model: str) -> int:
        """Bytes of all its files."""
        return sum(path.stat().st_size for path in self.models[model].iterdir())


@contextmanager
def serve(hub: FakeHub):
    """The hub answers inside."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def content_name(path: Path) -> str:
    """SHA-256 of what the hub keeps outside of git, else git's SHA-1."""
    content = path.read_bytes()
    if path.suffix in LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def do_POST(self):
        body = self._body()
        path = self.path.partition("?")[0]
        self.hub.requests.append(("POST", path, ""))
        writer = self.hub.writers.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if writer is None:
            self._refuse(401, "RepoNotFound")
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or writer}/{asked['name']}"
            if name.partition("/")[0] != writer:
                self._refuse(403, "Forbidden")
                return
            is_private = asked.get("visibility") == "private" or asked.get("private") is True
            self.hub.private.setdefault(name, is_private)
            self._json({"url": f"http://127.0.0.1:{self.hub.port}/{name}"})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            kinds = {True: "lfs", False: "regular"}
            files = [
                {
                    "path": file["path"],
                    "uploadMode": kinds[file["path"].endswith(LARGE)],
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._json({"files": files})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._json({"objects": list(map(self._upload_of, json.loads(body)["objects"]))})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines() if line])
        else:
            self._refuse(404, "EntryNotFound")

    def do_PUT(self):
        content = self._body()
        if self.hub.room is not None and len(self.hub.uploaded) >= self.hub.room:
            self._refuse(403, "StorageFull")
            return
        self.hub.uploaded[self.path.rpartition("/")[2]] = content
        self._head(200, 0, {})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _json(self, answer):
        body = json.dumps(answer).encode()
        self._head(200, len(body), {"Content-Type": "application/json"})
        self.wfile.write(body)

    def _upload_of(self, asked):
        """The hub asks only for contents that it does not have."""
        if asked["oid"] in self.hub.uploaded:
            return asked
        href = f"http://127.0.0.1:{self.hub.port}/uploads/{asked['oid']}"
        return asked | {"actions": {"upload": {"href": href}}}

    def _commit(self, name, lines):
        files = self.hub.pushed.setdefault(name, {})
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploaded[value["oid"]]
        url = f"http://127.0.0.1:{self.hub.port}/{name}/commit/{COMMIT}"
        self._json({"success": True, "commitOid": COMMIT, "commitUrl": url})

    def _answer(self):
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if self.hub.is_broken:
            self.close_connection = True
            return
        found = _API.fullmatch(path) or _FILE.fullmatch(path)
        if found and found[1] in self.hub.silent:
            time.sleep(3600)
        if found := _API.fullmatch(path):
            self._listing(found[1])
        elif found := _FILE.fullmatch(path):
            self._file(found[1], found[2])
        else:
            self._refuse(404, "EntryNotFound")

    def _listing(self, model: str):
        folder = self.hub.models.get(model)
        if folder is None:
            self._refuse(401, "RepoNotFound")
            return
        files = []
        for path in sorted(folder.iterdir()):
            size, name = self.hub.claimed.get(path.name, path.stat().st_size), content_name(path)
            files.append(
                {"rfilename": path.name, "size": size, "blobId": name[:40]}
                | (
                    {"lfs": {"size": size, "sha256": name, "pointerSize": 135}}
                    if len(name) == 64
                    else {}
                )
            )
        body = json.dumps(
            {
                "_id": "0",
                "id": model,
                "modelId": model,
                "sha": COMMIT,
                "private": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": files,
            }
        ).encode()
        self._head(200, len(body), {"Content-Type": "application/json"})
        self.wfile.write(body)

    def _file(self, model: str, name: str):
        path = self.hub.models.get(model, Path("/nowhere")) / name
        if model in self.hub.gated:
            self._refuse(401, "GatedRepo")
        elif not path.is_file():
            self._refuse(404, "EntryNotFound")
        else:
            content = path.read_bytes()
            named = content_name(path)
            headers = {"ETag": f'"{named}"', "Accept-Ranges": "bytes"}
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(asked[1]) if asked and not self.hub.ignores_ranges else 0
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._head(206 if start else 200, len(content) - start, headers)
            if self.command == "GET":
                self._send(content[start:], path.suffix in LARGE)

    def _send(self, content: bytes, is_weights: bool):
        for start in range(0, len(content), PIECE):
            piece = content[start : start + PIECE]
            if is_weights:
                time.sleep(self.hub.pause)
                self.hub.sent += len(piece)
                if self.hub.is_broken:
                    self.close_connection = True
                    return
            try:
                self.wfile.write(piece)
            except OSError:  # who asked has gone
                self.close_connection = True
                return

    def _refuse(self, status: int, code: str):
        self._head(status, 0, {"X-Error-Code": code})

    def _head(self, status: int, length: int, headers: dict[str, str]):
        self.send_response(status)
        for name, value in {
            "X-Repo-Commit": COMMIT,
            "Content-Length": str(length),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
