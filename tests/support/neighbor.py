"""Another account of this machine, which asks a server: a process that runs as it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NEIGHBOR = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a program as another account"
)
# All modules are imported before: the account may not read them.
_PROGRAM = f"""
import encodings.idna, http.client, json, os, socket, sys
os.setgroups([])
os.setgid({NEIGHBOR})
os.setuid({NEIGHBOR})
lines = {{}}
for said in sys.stdin:
    asked = json.loads(said)
    line = lines.pop(asked["on"], None) or http.client.HTTPConnection(
        asked["host"], asked["port"], timeout=60, source_address=(asked["source"], 0)
    )
    try:
        line.request(asked["method"], asked["path"], asked["body"], asked["headers"])
        if asked["leaves"]:
            line.close()
            told = [0, [], ""]
        else:
            answer = line.getresponse()
            content = answer.read1(200) if asked["on"] else answer.read()
            told = [answer.status, answer.getheaders(), content.decode("latin-1")]
            if asked["on"]:
                lines[asked["on"]] = line
    except (OSError, http.client.HTTPException) as error:
        told = [-1, [], repr(error)]
    print(json.dumps(told), flush=True)
"""


class Neighbor:
    """Sends requests as the other account, one after the other."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def ask(
        self,
        port: int,
        path: str,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        body: str | None = None,
        host: str = "127.0.0.1",
        source: str | None = None,
        stays_as: str = "",
        leaves: bool = False,
    ) -> tuple[int, dict[str, str], str]:
        """Returns status, headers and body of an answer; the status is -1 without an answer.

        `stays_as` keeps the connection under a name, after the first bytes of the body; `leaves`
        closes it before any answer.
        """
        source = source or host
        asked: dict[str, Any] = {
            "port": port, "path": path, "method": method, "headers": headers or {}, "body": body,
            "host": host, "source": source, "on": stays_as, "leaves": leaves,
        }  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        status, pairs, content = json.loads(self._process.stdout.readline())
        return status, {name.lower(): value for name, value in pairs}, content


@contextmanager
def neighbor() -> Iterator[Neighbor]:
    """Yields the other account; it needs root."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Neighbor(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
