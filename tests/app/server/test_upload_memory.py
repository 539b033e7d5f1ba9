"""A large file passes through a real server without staying in its memory."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from tests.support.browser import Server
from tests.support.over_sockets import heard, opened
from tests.support.ports import free_port

ONE = "0123456789abcdef"
PIECE = os.urandom(1 << 20)
MIB = 1 << 20
FILE_MIB = 512
MOST_MIB = 64
"""An upload of any size takes at most this much memory of the server."""


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path, free_port())
    server.start()
    yield server
    server.end()


@pytest.mark.slow("it starts a server and streams 512 MiB, for 5 seconds")
def test_512_mib_are_streamed_within_64_mib_of_memory(server):
    process = psutil.Process(server.process.pid)
    before = most = process.memory_info().rss
    began = time.monotonic()
    with opened(server.port) as line:
        line.sendall(
            f"PUT /api/uploads/{ONE}?name=large.parquet HTTP/1.1\r\n"
            f"Host: 127.0.0.1:{server.port}\r\nContent-Type: application/octet-stream\r\n"
            f"Content-Length: {FILE_MIB * MIB}\r\nConnection: close\r\n\r\n".encode()
        )
        for number in range(FILE_MIB):
            line.sendall(PIECE)
            if number % 4 == 0:
                most = max(most, process.memory_info().rss)
        answer = heard(line)
    took = time.monotonic() - began
    most = max(most, process.memory_info().rss)
    print(f"{FILE_MIB} MiB in {took:.1f} s, {(most - before) / MIB:.1f} MiB of memory")
    assert answer.status == 200, answer
    kept = server.runs / ".uploads" / ONE / "large.parquet"
    assert kept.stat().st_size == FILE_MIB * MIB
    with kept.open("rb") as file:
        file.seek(-len(PIECE), os.SEEK_END)
        assert file.read() == PIECE
    kept.unlink()  # the folders of the latest tests are kept
    assert most - before < MOST_MIB * MIB
