"""Groups of real processes on the CPU, which train a tiny model, and faults of the workers."""

from __future__ import annotations

import contextlib
import os
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

from engine.config.adapters import Adapters
from engine.config.optimizers import OptimizerSettings
from engine.config.settings import ModelConfig
from engine.model.build.build import build_model
from engine.model.build.pretrained_files import load_config
from engine.model.build.units import StreamedModel
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.collectives.rank import RankInfo
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.distributed import plane_copies
from engine.runtime.distributed import processes as members
from engine.runtime.distributed.build_engine import RankZeroComponents, build_engines, sharing_with
from engine.runtime.distributed.handshake import handshake
from engine.runtime.distributed.launched_group import LaunchedGroup, connect_to_rank_zero
from engine.runtime.distributed.rank_zero_engine import RankZeroEngine
from engine.runtime.distributed.shared_secret import VARIABLE
from engine.runtime.distributed.torchrun import Launched
from engine.runtime.distributed.worker import run
from engine.runtime.distributed.worker_group import WorkerGroup, WorkerGroupPlan
from engine.runtime.host.host_states import HostStates
from engine.runtime.host.optimizers import host_optimizer
from engine.runtime.host.shared_memory import OwnedMemory
from engine.runtime.step.engine_settings import EngineSettings
from engine.training.weights.adapter_weights import initialize_adapters
from engine.training.weights.weights import load_pretrained
from tests.support.folders import make_model
from tests.support.forked_processes import (
    SERVES,
    ForkedProcess,
    fork_from_here,
    is_server,
    server,
)
from tests.support.ports import free_port
from tests.support.tiny import random_batches

PATIENCE = 90
"""A test gives up after so many seconds."""


@dataclass
class StartedGroup:
    """The workers of a test, and the engine of rank 0."""

    workers: WorkerGroup
    engine: RankZeroEngine
    model: StreamedModel
    host_states: HostStates
    logged: list[str]
    source: Path
    batches: int
    """A step has so many micro-batches, those of all ranks together."""

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self.workers._processes]

    def train(self, *numbers: int) -> None:
        for number in numbers:
            self.engine.train_step(number, random_batches(self.batches, seed=number), 3e-3)
        self.engine.drain()


@contextlib.contextmanager
def started_group(
    folder: Path, ranks: int = 2, batches: int = 4, nodes: int = 1, **choices: Any
) -> Iterator[StartedGroup]:
    """Gives a group whose ranks train the model in `folder`, which is made if it is not there.
    nodes: so many have `ranks` ranks each, in processes that torchrun would start. Planes are
    divided among them where the choices have several `nodes_per_replica`. Of the model, only the
    choices' `parts` are trained where they have any.
    """
    trained = choices.pop("parts", None)
    if not folder.exists():
        make_model(folder)
    gpu_resident = (
        PlanChoices()
        .changed(**choices)
        .placement.gpu_resident([f"block {number}" for number in range(3)])
    )
    how = ModelConfig(source=str(folder), dtype="float32", init="random")
    model = build_model(load_config(how.source), how, trained)
    backend, logged = CpuBackend(), []
    with contextlib.ExitStack() as parts:
        launched_group = (
            parts.enter_context(launched_workers(RankInfo(0, ranks, nodes))) if nodes > 1 else None
        )
        plan = WorkerGroupPlan(ranks, "cpu", 1, nodes=nodes)
        workers = WorkerGroup(plan, OwnedMemory(), logged.append, launched_group)
        parts.callback(workers.close)
        nodes_per_replica = choices.get("nodes_per_replica", 1)
        units = [unit.name for unit in model.units]
        sharing = sharing_with(workers, units, nodes_per_replica)
        states = HostStates(model.layouts, "float32", threads=1, sharing=sharing)
        parts.callback(states.close)
        states.placement.arrange(gpu_resident, backend)
        states.allocate_weights()
        load_pretrained(model, how.source, states)
        if isinstance(trained, Adapters):
            initialize_adapters(model, states, seed=7)
        states.allocate_states()
        settings = OptimizerSettings(eps=1e-5)
        optimizer = host_optimizer(states, settings, threads=1)
        parts.callback(optimizer.close)
        own = batches // (nodes * ranks)
        of_replica = dict(ranks=ranks * nodes_per_replica, replicas=nodes // nodes_per_replica)
        planned = PlanChoices().changed(micro_batches=own, **of_replica, **choices)
        engine = build_engines(
            workers,
            RankZeroComponents(model, states, backend, optimizer),
            how,
            settings,
            EngineSettings(planned, 24, 7, 1.0, 0),
        )
        parts.callback(engine.close)
        yield StartedGroup(workers, engine, model, states, logged, folder, batches)


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    """Forks the workers of the tests' own process, which is rank 0, in the module that imports
    this fixture.
    """
    server()  # before tests plant faults into what starts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members, "subprocess", _forking)
        yield


FORK_RANKS = "from tests.support.worker_groups import fork_ranks; fork_ranks()\n"
"""A program that is rank 0, and is forked itself, forks them if it begins with this line."""


def fork_ranks() -> None:
    fork_from_here()
    members.subprocess = _forking


_forking: Any = SimpleNamespace(
    Popen=ForkedProcess, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
)


# --------------------------------------------------------------------- other nodes

LOOPBACK = "127.0.0.1"
SECRET = "a secret that only the nodes of these tests have"
CHUNK_BYTES = 5000
WORKER = "from tests.support.worker_groups import work_as; work_as({}, {}, {}, {})"


@contextlib.contextmanager
def launched_workers(place: RankInfo) -> Iterator[LaunchedGroup]:
    """Gives the processes of all ranks but `place`, as torchrun would start them on its nodes. All
    nodes are this machine. Planes are sent to them in many chunks.
    """
    with (
        mock.patch.object(plane_copies, "CHUNK_BYTES", CHUNK_BYTES),
        mock.patch.dict(os.environ, {VARIABLE: SECRET}),
    ):
        yield from _gathered(place)


def _gathered(place: RankInfo) -> Iterator[LaunchedGroup]:
    port = free_port()
    processes = [
        ForkedProcess(
            [
                sys.executable,
                "-c",
                WORKER.format(rank, place.local_world_size, place.nodes, port),
            ],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", VARIABLE: SECRET},
        )
        for rank in range(1, place.world_size)
    ]
    launched_group = None
    try:
        launched_group = LaunchedGroup(launched_as(place, port), handshake(place, {}))
        yield launched_group
    finally:
        if launched_group is not None:
            launched_group.end(0)
        for process in processes:
            try:
                process.wait(PATIENCE if launched_group is not None else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def launched_as(place: RankInfo, port: int) -> Launched:
    return Launched(place, LOOPBACK, port, has_store=False, run="a test")


def work_as(rank: int, ranks: int, nodes: int, port: int) -> None:
    """Follows rank 0 of a test, as this rank."""
    place = RankInfo(rank, ranks, nodes)
    plane_copies.CHUNK_BYTES = CHUNK_BYTES
    run(connect_to_rank_zero(launched_as(place, port), handshake(place, {})))


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


def workers_of(pid: int) -> list[int]:
    """Returns the workers of a process, in the order of ranks."""
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
    return is_forked or b"engine.runtime.distributed.worker" in command


# --------------------------------------------------------------------- faults

FAULT = """
import os
from tests.support.worker_groups import break_workers
break_workers({rank}, {message!r}, {deed!r})
"""


def plant(patch: pytest.MonkeyPatch, folder: Path, rank: int, message: str, deed: str) -> None:
    """Makes workers that start from now on break at a message of this kind: `deed`, a statement
    of Python, is done by the rank instead of what rank 0 asks for.
    """
    folder.mkdir(exist_ok=True)
    # Python runs this file when it starts.
    text = FAULT.format(rank=rank, message=message, deed=deed)
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def break_workers(rank: int, kind: str, deed: str) -> None:
    """Breaks the worker that this process is, if it gets this rank."""
    from engine.runtime.distributed.worker import Worker

    own, plain = [], Worker._do

    def do(self: Worker, message: Any) -> None:
        if type(message).__name__ == "Open":
            own.append(message.place.rank)
        if type(message).__name__ == kind and own == [rank]:
            exec(deed, {"os": os, "worker": self, "message": message})
        plain(self, message)

    Worker._do = do  # type: ignore[method-assign]
