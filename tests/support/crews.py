"""Crews of real processes on the CPU, which train a tiny model, and faults of those that follow."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from engine.checkpoints.adapter_weights import initialise_adapters
from engine.checkpoints.weights import load_pretrained
from engine.config.adapters import Adapters
from engine.config.settings import ModelConfig
from engine.exchange.place import Place
from engine.host.host_adamw import AdamWSettings, HostAdamW
from engine.host.host_store import HostStore
from engine.host.shared_memory import OwnedMemory
from engine.model.build import build_model
from engine.model.pretrained_files import load_config
from engine.model.units import StreamedModel
from engine.plan.choices import PlanChoices, settled_of
from engine.ranks import members, plane_copies
from engine.ranks.build_engine import LeadersParts, build_engines, lead
from engine.ranks.crew import Crew, CrewPlan
from engine.ranks.follower import run
from engine.ranks.gathering import Gathering, follow
from engine.ranks.hello import hello
from engine.ranks.leading_engine import LeadingEngine
from engine.ranks.shared_secret import VARIABLE
from engine.ranks.torchrun import Launched
from engine.runtime.cpu_backend import CpuBackend
from engine.runtime.engine_settings import EngineSettings
from tests.support.folders import make_model
from tests.support.forked_processes import (
    SERVES,
    ForkedProcess,
    fork_from_here,
    is_server,
    server,
)
from tests.support.tiny import random_batches

PATIENCE = 90
"""A test gives up after so many seconds."""


@dataclass
class Led:
    """A crew, and the engine of the rank that leads it."""

    crew: Crew
    engine: LeadingEngine
    model: StreamedModel
    store: HostStore
    logged: list[str]
    source: Path
    batches: int
    """A step has so many micro-batches, those of all ranks together."""

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self.crew._members]

    def train(self, *numbers: int) -> None:
        for number in numbers:
            self.engine.train_step(number, random_batches(self.batches, seed=number), 3e-3)
        self.engine.drain()


@contextlib.contextmanager
def led(
    folder: Path, ranks: int = 2, batches: int = 4, hosts: int = 1, **choices: Any
) -> Iterator[Led]:
    """Gives a crew whose ranks train the model in `folder`, which is made if it is not there.
    hosts: so many have `ranks` ranks each, in processes that are gathered. Planes are divided among
    them where the choices have a `span`. Of the model, only the choices' `parts` are trained where
    they have any.
    """
    trained = choices.pop("parts", None)
    if not folder.exists():
        make_model(folder)
    settled = settled_of([f"block {number}" for number in range(3)], PlanChoices(**choices))
    how = ModelConfig(source=str(folder), dtype="float32", init="random")
    model = build_model(load_config(how.source), how, trained)
    backend, logged = CpuBackend(), []
    with contextlib.ExitStack() as parts:
        gathering = parts.enter_context(gathered(Place(0, ranks, hosts))) if hosts > 1 else None
        plan = CrewPlan(ranks, "cpu", 1, hosts=hosts)
        crew = Crew(plan, OwnedMemory(), logged.append, gathering)
        parts.callback(crew.close)
        store = HostStore(model.layouts, "float32", threads=1)
        parts.callback(store.close)
        span = choices.get("span", 1)
        lead(store, crew, span)
        store.settle(settled, backend)
        store.allocate_weights()
        load_pretrained(model, how.source, store)
        if isinstance(trained, Adapters):
            initialise_adapters(model, store, seed=7)
        store.allocate_states()
        settings = AdamWSettings(eps=1e-5)
        adamw = HostAdamW(store, settings, threads=1)
        parts.callback(adamw.close)
        own = batches // (hosts * ranks)
        of_copy = dict(ranks=ranks * span, hosts=hosts // span)
        planned = PlanChoices(micro_batches=own, **of_copy, **choices)
        engine = build_engines(
            crew,
            LeadersParts(model, store, backend, adamw),
            (how, settings),
            EngineSettings(planned, 24, 7, 1.0, 0),
        )
        parts.callback(engine.close)
        yield Led(crew, engine, model, store, logged, folder, batches)


@pytest.fixture(scope="module", autouse=True)
def forked_followers() -> Iterator[None]:
    """Forks the processes of ranks that the tests' own process leads, in the module that imports
    this fixture.
    """
    server()  # before tests plant faults into what starts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members, "subprocess", _forking)
        yield


FORK_RANKS = "from tests.support.crews import fork_ranks; fork_ranks()\n"
"""A program that leads ranks, and is forked itself, forks them if it begins with this line."""


def fork_ranks() -> None:
    fork_from_here()
    members.subprocess = _forking


_forking: Any = SimpleNamespace(
    Popen=ForkedProcess, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
)


# --------------------------------------------------------------------- other hosts

LOOPBACK = "127.0.0.1"
SECRET = "a secret that only the hosts of these tests have"
PIECE_BYTES = 5000
FOLLOWER = "from tests.support.crews import follow_as; follow_as({}, {}, {}, {})"


@contextlib.contextmanager
def gathered(place: Place) -> Iterator[Gathering]:
    """Gives the processes of all ranks but `place`, as torchrun would start them on its hosts. All
    hosts are this machine. Planes are sent to them in many pieces.
    """
    with (
        mock.patch.object(plane_copies, "PIECE_BYTES", PIECE_BYTES),
        mock.patch.dict(os.environ, {VARIABLE: SECRET}),
    ):
        yield from _gathered(place)


def _gathered(place: Place) -> Iterator[Gathering]:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    processes = [
        ForkedProcess(
            [sys.executable, "-c", FOLLOWER.format(rank, place.ranks, place.hosts, port)],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", VARIABLE: SECRET},
        )
        for rank in range(1, place.all_ranks)
    ]
    gathering = None
    try:
        gathering = Gathering(launched_as(place, port), hello(place, {}))
        yield gathering
    finally:
        if gathering is not None:
            gathering.end(0)
        for process in processes:
            try:
                process.wait(PATIENCE if gathering is not None else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def launched_as(place: Place, port: int) -> Launched:
    return Launched(place, LOOPBACK, port, has_store=False, run="a test")


def follow_as(rank: int, ranks: int, hosts: int, port: int) -> None:
    """Follows the leader of a test, as this rank."""
    place = Place(rank, ranks, hosts)
    plane_copies.PIECE_BYTES = PIECE_BYTES
    run(follow(launched_as(place, port), hello(place, {})))


# --------------------------------------------------------------------- who is left


def is_running(pid: int) -> bool:
    """Tells whether a process runs. One that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(*pids: int) -> None:
    """Returns once none of these processes runs."""
    until = time.monotonic() + PATIENCE
    while any(map(is_running, pids)):
        assert time.monotonic() < until, f"still there: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.05)


def followers_of(pid: int) -> list[int]:
    """Returns the processes that follow the one that leads, in the order of ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and _follows(entry):
                found.append(int(entry.name))
    return sorted(found)


def _follows(process: Path) -> bool:
    """Tells whether a process follows, or was forked to follow."""
    command = (process / "cmdline").read_bytes()
    is_forked = SERVES in command and not is_server(int(process.name))
    return is_forked or b"engine.ranks.follower" in command


# --------------------------------------------------------------------- faults

FAULT = """
import os
from tests.support.crews import break_followers
break_followers({rank}, {message!r}, {deed!r})
"""


def plant(patch: pytest.MonkeyPatch, folder: Path, rank: int, message: str, deed: str) -> None:
    """Makes followers that start from now on break at a message of this kind: `deed`, a statement
    of Python, is done by the rank instead of what the leader asks for.
    """
    folder.mkdir(exist_ok=True)
    # Python runs this file when it starts.
    text = FAULT.format(rank=rank, message=message, deed=deed)
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def break_followers(rank: int, kind: str, deed: str) -> None:
    """Breaks the follower that this process is, if it gets this rank."""
    from engine.ranks.follower import Follower

    own, plain = [], Follower._do

    def do(self: Follower, message: Any) -> None:
        if type(message).__name__ == "Open":
            own.append(message.place.rank)
        if type(message).__name__ == kind and own == [rank]:
            exec(deed, {"os": os, "follower": self, "message": message})
        plain(self, message)

    Follower._do = do  # type: ignore[method-assign]
