"""Ports for servers of tests."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, COUNT = 20_000, 12_000
"""These ports lie below those that a system gives by itself to whoever asks for any port (from
32,768 on under Linux): no connection of another process takes one before a server does.
"""
_numbers = itertools.count()


def free_port() -> int:
    """Returns a port of this machine that nothing listens on. Each process begins at another
    place, and no port is returned twice.
    """
    begin = os.getpid() * 997
    while True:
        port = FIRST + (begin + next(_numbers)) % COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
