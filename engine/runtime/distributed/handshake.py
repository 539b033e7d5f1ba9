"""Every process that `torchrun` has started tells rank 0 who it is. That compares what
all of them tell with what it knows of itself: they must run the same program with the same
settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from engine.paths import PROGRAM_ROOT
from engine.runtime.collectives.rank import RankInfo
from engine.runtime.distributed.messages import Handshake

PACKAGES = ("torch", "transformers", "numpy")
"""The versions of these decide what is computed."""
_MISSING = "nothing"


def handshake(place: RankInfo, settings: Mapping[str, Any], problem: str = "") -> Handshake:
    """Returns who this process is."""
    return Handshake(
        place,
        socket.gethostname(),
        os.getpid(),
        program_digest(),
        {"Python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        # As plain data, as which the other side gets them: a list for a tuple.
        msgspec.json.decode(msgspec.json.encode(dict(settings), enc_hook=str)),
        problem,
    )


def program_digest() -> str:
    """Returns a digest of the engine's sources."""
    found = hashlib.sha256()
    for path in sorted(PROGRAM_ROOT.glob("engine/**/*.py")):
        found.update(str(path.relative_to(PROGRAM_ROOT)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _MISSING


def why_refused(rank_zero: Handshake, others: Iterable[Handshake]) -> str:
    """Returns in one sentence why these processes cannot compute a run together, or ""."""
    for other in others:
        problem = _difference(rank_zero, other)
        if problem:
            rank = f"Rank {other.place.rank} of {rank_zero.place.world_size}, on {other.host_name},"
            return f"{rank} {problem}"
    return ""


def _difference(rank_zero: Handshake, other: Handshake) -> str:
    if other.problem:
        return f"cannot use its command line: {other.problem}"
    ours, theirs = rank_zero.place, other.place
    if theirs.local_world_size != ours.local_world_size:
        return (
            f"is one of {theirs.local_world_size} on its node, but the node of rank 0 has "
            f"{ours.local_world_size}; give torchrun the same --nproc-per-node on every node."
        )
    for name, version_here in rank_zero.versions.items():
        there = other.versions.get(name, _MISSING)
        if there != version_here:
            return (
                f"has {name} {there}, but rank 0 has {version_here}; install the same on every "
                "node."
            )
    if other.program != rank_zero.program:
        return "has another version of Ramstream than rank 0; bring the same sources to every node."
    for name in sorted({*rank_zero.settings, *other.settings}):
        own, found = (each.settings.get(name) for each in (rank_zero, other))
        if own != found:
            return (
                f"was started with {name} at {_said(found)}, but rank 0 with {_said(own)}; use the "
                "same preset and command line on every node."
            )
    return ""


def _said(value: Any) -> str:
    return json.dumps(value, default=str)
