"""One of the two checkouts that are compared: a copy of it in a folder of its own, and how its
program is run.

Both copies lie in folders whose names are equally long, so that no text is cut or wrapped at
another place. Nothing of the program is imported: it is run as processes, as its users run it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

NOT_COPIED = {"runs", "tests", "docs", "shared", "venv", "build", "node_modules"}
"""Folders of a checkout, directly in it, that are no part of the program; nor is what begins with a
dot there.
"""
RUN_ID = re.compile(r"\d{8}-\d{6}-(?=[a-z0-9])")
LONGEST_SECONDS = 300.0
"""Of a command, or of what is waited for."""


@dataclass(frozen=True)
class Ended:
    """What a command did."""

    code: int
    out: str
    err: str


class Side:
    """A copy of a checkout. `program` is the copy, `work` the folder of its runs and of all that is
    written for it.
    """

    def __init__(self, checkout: Path, folder: Path):
        self.program, self.work, self.cache = folder / "program", folder / "work", folder / "cache"

        def ignored(folder: str, names: list[str]) -> set[str]:
            at_top = Path(folder) == checkout
            return {
                name
                for name in names
                if name == "__pycache__"
                or (at_top and (name in NOT_COPIED or name.startswith(".")))
            }

        shutil.copytree(checkout, self.program, ignore=ignored)
        self.work.mkdir()
        (folder / "home").mkdir()
        self.kept: dict[str, Any] = {}
        """What one area has made for others: by name."""
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "RAMSTREAM", "GRADIO", "HF_", "XDG_"))
        }
        self.environment |= {
            "RAMSTREAM_CACHE": str(self.cache),
            "HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(folder / "home" / "cache"),
            "HF_HOME": str(folder / "home" / "hub"),
            "HF_HUB_OFFLINE": "1",
            "NUMBA_CACHE_DIR": str(folder / "home" / "numba"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
            "TZ": "UTC",
            "PYTHONIOENCODING": "utf-8",
        }
        # Compiled modules of the program lie beside the copies: nothing is written into the
        # checkouts themselves.
        self._own = [
            (str(self.program), "PROGRAM"),
            (str(self.work), "WORK"),
            (str(self.cache), "CACHE"),
            (str(folder), "FOLDER"),
        ]

    def plain(self, text: str) -> str:
        """The text without what two runs of the same program never share: folders, times in names,
        and processes.
        """
        for path, name in self._own:
            text = text.replace(path, name)
        text = RUN_ID.sub("RUN-", text)
        text = re.sub(r"(127\.0\.0\.1|localhost|\[::1\]):\d{4,5}\b", r"\1:PORT", text)
        return re.sub(r"\bprocess \d+", "process N", text)

    def launch(
        self, *arguments: str, cwd: Path | None = None, environment: dict[str, str] | None = None
    ) -> Ended:
        """Run `launch.py` with these arguments to its end."""
        ended = subprocess.run(
            [sys.executable, str(self.program / "launch.py"), *arguments],
            cwd=cwd or self.program,
            env=self.environment | (environment or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LONGEST_SECONDS,
        )
        return Ended(
            ended.returncode,
            ended.stdout.decode(errors="replace"),
            ended.stderr.decode(errors="replace"),
        )

    def begin(
        self, *arguments: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start `launch.py`; its output is one pipe of text."""
        return subprocess.Popen(
            [sys.executable, "-u", str(self.program / "launch.py"), *arguments],
            cwd=self.program,
            env=self.environment | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    @contextlib.contextmanager
    def serve(self, runs: Path, *arguments: str, login: str = "") -> Iterator[Server]:
        """The app on a free port for as long as the context lasts; Ctrl-C ends it."""
        port = free_port()
        process = self.begin(
            "--no-browser",
            "--port",
            str(port),
            "--runs-dir",
            str(runs),
            *arguments,
            environment={"RAMSTREAM_LOGIN": login} if login else {},
        )
        server = Server(self, process, port)
        try:
            server.wait_until_open()
            yield server
        finally:
            server.end()


class Server:
    """The app as it is served by one process."""

    def __init__(self, side: Side, process: subprocess.Popen[str], port: int):
        self.side, self.process, self.port = side, process, port
        self.code: int | None = None
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def printed(self) -> str:
        return "".join(self._lines)

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.append(line)

    def wait_until_open(self) -> None:
        wait_for(
            lambda: self.process.poll() is not None or "Ctrl-C stops it" in self.printed,
            "the server to open",
        )
        if self.process.poll() is not None:
            raise RuntimeError(f"The server ended at once: {self.printed}")

    def end(self) -> None:
        """Ctrl-C, and a wait for the end; a server that does not end is killed, which is a
        difference.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.code = self.process.wait()
        self._reader.join(10)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> Answer:
        """One request on a connection of its own. `body` is sent as JSON, `raw` as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        sent = {"Host": f"127.0.0.1:{self.port}"}
        content = raw
        if body is not None:
            content = json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        if method == "POST" and content is None:
            content = b""
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in (sent | (headers or {})).items():
                connection.putheader(name, value)
            if content is not None and "Content-Length" not in (headers or {}):
                connection.putheader("Content-Length", str(len(content)))
            connection.endheaders(content)
            answer = connection.getresponse()
            return Answer(
                answer.status,
                [(name.lower(), value) for name, value in answer.getheaders()],
                answer.read(),
            )
        finally:
            connection.close()

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """The body of an answer as JSON values."""
        return json.loads(self.ask(method, path, body).body)


@dataclass(frozen=True)
class Answer:
    """What a request was answered."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")


def wait_for(
    condition: Any, what: str, seconds: float = LONGEST_SECONDS, pause: float = 0.05
) -> Any:
    """What `condition()` returns once it is true. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(pause)
    return found
