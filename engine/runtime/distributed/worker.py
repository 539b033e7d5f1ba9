"""A worker: it computes its shard of a run, as rank 0 asks it to."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import traceback
from typing import Any, NoReturn

import torch

from engine.errors import NonFiniteError, RamstreamError, first_line
from engine.runtime.collectives.network_rate import gather_seconds
from engine.runtime.collectives.process_groups import CollectiveError, ProcessGroupCollectives
from engine.runtime.device.backend import Backend
from engine.runtime.device.open_backend import open_backend
from engine.runtime.distributed.connection import ConnectionLostError, MonitoredConnection
from engine.runtime.distributed.message_stream import Connection
from engine.runtime.distributed.messages import (
    Accompany,
    Build,
    CloseEngine,
    Done,
    Drain,
    DryRun,
    End,
    Evaluate,
    Failed,
    Gather,
    Go,
    Losses,
    MakePlanes,
    Message,
    Open,
    PlanesMade,
    RequestPlanes,
    ShardMessage,
    Train,
)
from engine.runtime.distributed.remote_shards import OwnNodeShards, answer
from engine.runtime.distributed.rendezvous import join, prepare_rendezvous
from engine.runtime.distributed.reporter import Reporter
from engine.runtime.distributed.versions import WorkerVersion
from engine.runtime.distributed.worker_states import Opener, WorkerStates
from engine.runtime.host.device_planes import DevicePlanes
from engine.runtime.host.host_optimizer import HostOptimizer
from engine.runtime.host.optimizers import host_optimizer
from engine.runtime.step.engine_settings import AppliedStep, EngineSettings
from engine.runtime.step.streaming_engine import StreamingEngine

LOST_CODE = 3
"""The process ends with this exit code when rank 0 is lost."""


class Worker:
    """One rank of a run, other than rank 0."""

    def __init__(self, connection: Connection):
        self._held = WorkerVersion()
        # Whatever this process waits for, nobody is left who needs it.
        self._connection = MonitoredConnection(
            connection, self._take, lambda _: os._exit(LOST_CODE), False
        )
        self._on_device: DevicePlanes | None = None
        self._parts: OwnNodeShards | None = None
        self._backend: Backend | None = None
        self._collectives: ProcessGroupCollectives | None = None
        self._opener: Opener | None = None
        self._opened: WorkerStates | None = None
        self._optimizer: HostOptimizer | None = None
        self._engine: StreamingEngine | None = None
        self._reporter: Reporter | None = None
        self._is_new = True

    def serve(self) -> NoReturn:
        """Does what rank 0 asks, until it asks to end."""
        while True:
            self._do(self._connection.next())

    def fail(self, error: BaseException) -> None:
        """Tells rank 0 why this process ends."""
        own = isinstance(error, RamstreamError)
        trace = "" if own else "".join(traceback.format_exception(error))
        text = str(error) if own else f"{type(error).__name__}: {first_line(error)}."
        self._connection.send(Failed(text, trace, isinstance(error, CollectiveError)))

    def _take(self, message: Message) -> bool:
        if isinstance(message, Go):
            self._held.go(message.number)
            return True
        if isinstance(message, Drain):
            self._held.end_waits()  # the thread that drains may be waiting itself
            return False
        if isinstance(message, ShardMessage):
            self._answer(message)
            return True
        if isinstance(message, End):
            # The thread that computes may wait for others in a step that rank 0 has given up.
            os._exit(message.code)
        return False

    def _answer(self, message: ShardMessage) -> None:
        """Does what rank 0 asks of the shards on this device, in the thread that reads."""
        assert self._on_device is not None and self._parts is not None  # the device is open
        try:
            self._connection.send(answer(self._on_device, self._parts, message))
        except BaseException as error:  # noqa: BLE001  told to rank 0, whatever it is
            self.fail(error)
            os._exit(1)

    def _do(self, message: Message) -> None:
        match message:
            case Open():
                self._open(message)
            case Gather(size):
                assert self._backend is not None and self._collectives is not None
                gather_seconds(self._collectives, self._backend.device, size)
                self._connection.send(Done())
            case MakePlanes():
                self._hold(message)
            case RequestPlanes():
                assert self._parts is not None  # rank 0 has had the device opened
                self._connection.send(PlanesMade(self._parts.planes))
            case Build():
                self._build(message)
            case CloseEngine():
                self._close_engine()
            case Train():
                self._train(message)
            case DryRun(shard):
                self.engine.dry_run_shard(shard)
                self._connection.send(Done())
            case Evaluate(batches):
                self._evaluate(batches)
            case Accompany(groups):
                self.engine.passes.accompany(groups)
                self._connection.send(Done())
            case Drain():
                # Rank 0 has met the same numbers that are not finite, and tells of them.
                with contextlib.suppress(NonFiniteError):
                    self.engine.drain()
                self.reporter.drained()
                self._connection.send(Done())

    @property
    def engine(self) -> StreamingEngine:
        assert self._engine is not None  # rank 0 has had it built
        return self._engine

    @property
    def reporter(self) -> Reporter:
        assert self._reporter is not None  # rank 0 has had the device opened
        return self._reporter

    def _open(self, message: Open) -> None:
        place = message.place
        prepare_rendezvous(place.nodes)
        backend = open_backend(message.device, place.local_rank)
        self._backend = backend
        self._reporter = Reporter(backend, tells_node_memory=place.node_rank > 0)
        if message.memory_limit is not None:
            backend.limit_memory(message.memory_limit)
        self._on_device = DevicePlanes(backend)
        self._parts = OwnNodeShards(message.threads)
        self._opener = Opener(place, backend, self._on_device, message.threads, self._held)
        c10d_store = message.rendezvous.store()
        self._connection.send(Done())
        self._collectives = join(message.device, c10d_store, place)
        self._connection.send(Done())

    def _hold(self, message: MakePlanes) -> None:
        assert self._opener is not None  # rank 0 has had the device opened
        self._opened, planes = WorkerStates.made(self._opener, message.held)
        self._connection.send(PlanesMade(planes))

    def _build(self, message: Build) -> None:
        assert self._opener is not None and self._collectives is not None
        opener, backend = self._opener, self._opener.backend
        if backend.device.type == "cpu":
            torch.set_num_threads(message.torch_threads)
        if self._opened is None:
            self._opened = WorkerStates.opened(opener, message.held, message.planes)
        opened = self._opened
        if message.choices.sharding.replicas > 1:
            opened.fill(self._collectives, backend.device)
        states = opened.host_states
        self._optimizer = host_optimizer(states, message.optimizer, opener.threads)
        settings = EngineSettings(
            message.choices,
            message.tokens,
            message.loss_chunk,
            message.max_grad_norm,
            message.seed,
            self._collectives.spanning(message.choices.sharding.nodes_per_replica),
            message.regularization,
        )
        self._engine = StreamingEngine(opened.model, states, backend, settings, self._optimizer)
        self._is_new = True
        self._connection.send(Done())

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._optimizer is not None:
            self._optimizer.close()
        if self._opened is not None:
            self._opened.close()
        self._engine = self._optimizer = self._opened = None
        gc.collect()
        if self._backend is not None:
            self._backend.reset_peak()
        self._connection.send(Done())

    def _train(self, message: Train) -> None:
        if self._is_new:
            self.reporter.drained()
        if self._is_new or self._held.skipped != message.skipped:
            self._held.restore(message.number - 1, message.skipped)
            self._is_new = False
        self._held.expect()

        def tell(applied: AppliedStep) -> None:
            self._connection.send(self.reporter.applied(applied, message.has_timeline))

        # Rank 0 has met the same numbers that are not finite, and tells of them.
        with contextlib.suppress(NonFiniteError):
            self.engine.train_shard(message.number, message.shard, message.learning_rate, tell)

    def _evaluate(self, batches: Any) -> None:
        losses = self.engine.losses_of(batches)
        totals = tuple(total.item() for total, _ in losses)
        positions = tuple(each.cpu().numpy() for _, each in losses)
        self._connection.send(Losses(totals, positions))


def main(descriptor: int) -> None:
    """Runs the process of one rank. The connection to rank 0 has this file descriptor."""
    # Rank 0 may have been started in the background with signals ignored; a worker ends by
    # its connection alone.
    run(Connection(socket.socket(fileno=descriptor)))


def run(connection: Connection) -> NoReturn:
    """Does what rank 0 at the other end of the connection asks, and ends the process."""
    worker = Worker(connection)
    try:
        worker.serve()
    except BaseException as error:  # noqa: BLE001  told to rank 0, whatever it is
        with contextlib.suppress(ConnectionLostError):
            worker.fail(error)
    # Threads may still wait in a collective, and have nothing left to do.
    os._exit(1)
