"""Nodes of a run know each other by a secret that whoever starts them gives to all of them. It
never passes over the network: each side proves that it has it by a code of random bytes that the
other side has just made.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping

from engine.errors import RankError
from engine.runtime.distributed.message_stream import CODE_BYTES, Keys, code

VARIABLE = "RAMSTREAM_SECRET"
LEAST_CHARACTERS = 32
PROOF_SECONDS = 20.0
"""Seconds within which a process must prove that it has the secret."""
_NONCE = 32


class UnknownPeerError(ConnectionError):
    """The other side does not have the secret."""


def read_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """Returns the secret of this run. Raises RankError where there is none, or one that can be
    guessed.
    """
    told = environment.get(VARIABLE, "")
    if len(told) >= LEAST_CHARACTERS:
        return told.encode(errors="surrogateescape")
    wrong = f"{VARIABLE} has {len(told)} characters" if told else f"{VARIABLE} is not set"
    raise RankError(
        f"{wrong}, and processes of several nodes know each other by it; make one by `export "
        f"{VARIABLE}=$(openssl rand -hex 32)`, and set the same on every node before torchrun."
    )


def admit(stream: socket.socket, secret: bytes) -> Keys:
    """Proves to a process that has come that this one is rank 0, once that has proved that it may
    come. Raises StrangerError where it cannot, and another OSError where it is silent or has ended.
    """
    until = time.monotonic() + PROOF_SECONDS
    ours = secrets.token_bytes(_NONCE)
    stream.sendall(ours)
    theirs, proof = _read(stream, _NONCE, until), _read(stream, CODE_BYTES, until)
    _check(code(secret, b"follows", ours, theirs), proof)
    stream.sendall(code(secret, b"rank 0", ours, theirs))
    return _keys(secret, ours, theirs, is_rank_zero=True)


def prove(stream: socket.socket, secret: bytes) -> Keys:
    """Proves to the process of rank 0 that this one may come, and has it prove that it is rank 0.
    Raises as `admit` does.
    """
    until = time.monotonic() + PROOF_SECONDS
    theirs, ours = _read(stream, _NONCE, until), secrets.token_bytes(_NONCE)
    stream.sendall(ours + code(secret, b"follows", theirs, ours))
    _check(code(secret, b"rank 0", theirs, ours), _read(stream, CODE_BYTES, until))
    return _keys(secret, theirs, ours, is_rank_zero=False)


def _check(own: bytes, found: bytes) -> None:
    if not secrets.compare_digest(own, found):
        raise UnknownPeerError(f"it has another {VARIABLE}, or none")


def _keys(secret: bytes, of_rank_zero: bytes, of_worker: bytes, is_rank_zero: bool) -> Keys:
    """Returns keys that this connection alone has."""
    down, up = (code(secret, way, of_rank_zero, of_worker) for way in (b"to worker", b"to rank 0"))
    return Keys(down, up) if is_rank_zero else Keys(up, down)


def _read(stream: socket.socket, size: int, until: float) -> bytes:
    found = b""
    while len(found) < size:
        stream.settimeout(max(0.001, until - time.monotonic()))
        came = stream.recv(size - len(found))
        if not came:
            raise ConnectionError("it has ended")
        found += came
    return found
