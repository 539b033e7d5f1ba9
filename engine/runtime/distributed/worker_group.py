"""The processes that compute a run together with this one, which is rank 0.

- This process has rank 0 and the first device. It starts one process more for each further device
  of this machine, over a connection of its own (`engine.runtime.distributed.connection`).
- It alone decides. The others do what it asks (`engine.runtime.distributed.messages`), and know no
  run, no data set and no settings of a run.
- Tensors pass between ranks by a process group of `torch.distributed`: NCCL between GPUs, gloo
  between processes on the CPU.
- Where a process ends, is silent or fails, rank 0 learns why, ends all others, and tells it in
  one sentence that names the rank. Nothing is left running: a worker ends when its
  connection does.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import distributed

from engine.errors import RamstreamError, RankError, first_line
from engine.runtime.collectives.network_rate import (
    ENOUGH_SECONDS,
    FIRST_BYTES,
    MOST_BYTES,
    TIMES,
    gather_seconds,
    received_by_node,
)
from engine.runtime.collectives.process_groups import CollectiveError, ProcessGroupCollectives
from engine.runtime.collectives.rank import RankInfo
from engine.runtime.distributed.connection import ConnectionLostError, MonitoredConnection
from engine.runtime.distributed.launched_group import LaunchedGroup
from engine.runtime.distributed.messages import (
    DeviceMemory,
    Done,
    Failed,
    Gather,
    Go,
    Message,
    Open,
    OptimizerStep,
    ShardReply,
    Timeline,
)
from engine.runtime.distributed.processes import StartedProcess, WorkerProcess
from engine.runtime.distributed.remote_shards import RemoteShards
from engine.runtime.distributed.rendezvous import InMemory, Rendezvous, join, prepare_rendezvous
from engine.runtime.host.shared_memory import OwnedMemory

CAUSE_SECONDS = 3.0
"""Seconds that rank 0 has to find the cause where a process cannot reach the others."""
KNOWN_SECONDS = 5.0
"""Seconds within which it is known why a collective has failed, if another rank is the cause."""

R = TypeVar("R")


@dataclass(frozen=True)
class WorkerGroupPlan:
    """Plan of a group of workers."""

    ranks: int
    """Number of ranks on each node."""
    device: str
    """The ranks compute on this: `cpu` or `cuda`."""
    threads: int
    """Number of cores that each rank may use."""
    memory_limit: int | None = None
    """Bytes that the allocator of each device may take; None where there is no limit."""
    nodes: int = 1

    @property
    def place(self) -> RankInfo:
        """`RankInfo` of rank 0."""
        return RankInfo(0, self.ranks, self.nodes)


class WorkerGroup:
    """Starts and asks all processes of a plan but this one, over planes in `memory`. It starts them
    on this node, unless torchrun has (`launched_group`). Raises RankError where one of them cannot
    be started. `log` gets the traceback of a process that failed.
    """

    def __init__(
        self,
        plan: WorkerGroupPlan,
        memory: OwnedMemory,
        log: Callable[[str], None],
        launched_group: LaunchedGroup | None = None,
    ):
        self.plan = plan
        self.place = plan.place
        self._log = log
        self.memory = memory
        """The planes that all ranks share are in this memory."""
        self._known = threading.Event()
        self._problem = ""
        self._ending = False
        self._is_abandoned = False
        self._failing = threading.Lock()
        self._have_told: set[int] = set()
        """Ranks that have reported why they end."""
        self._applied: Counter[int] = Counter()
        self._timelines: defaultdict[int, dict[int, Timeline]] = defaultdict(dict)
        self._memory: dict[int, DeviceMemory] = {}
        self._is_sampled: Callable[[int], bool] = lambda _: False
        self._wrote = threading.Condition()
        self.shards = RemoteShards(self.place, self._send_to, lambda: self._problem)
        """The shards of units that live on the other devices are reached through this."""
        self._processes: list[WorkerProcess] = []
        self._lines: list[MonitoredConnection] = []
        self._collectives: ProcessGroupCollectives | None = None
        self._rendezvous: InMemory | None = None
        prepare_rendezvous(plan.nodes)
        try:
            self._connect(self._start() if launched_group is None else launched_group.processes)
            self._join(launched_group)
        except BaseException:
            self.close()
            raise

    @property
    def collectives(self) -> ProcessGroupCollectives:
        """Collectives that carry tensors between the ranks."""
        assert self._collectives is not None
        return self._collectives

    # ------------------------------------------------------------------ starting

    def _start(self) -> Sequence[WorkerProcess]:
        for rank in range(1, self.plan.ranks):
            try:
                self._processes.append(StartedProcess())
            except OSError as error:
                named = self._named(rank)
                raise RankError(f"{named} cannot be started ({first_line(error)}).") from error
        return self._processes

    def _connect(self, processes: Sequence[WorkerProcess]) -> None:
        self._processes = list(processes)
        for rank, process in enumerate(processes, 1):
            self._lines.append(self._connection_to(rank, process))

    def _connection_to(self, rank: int, process: WorkerProcess) -> MonitoredConnection:
        return process.connect(
            lambda message: self._take(rank, message), lambda why: self._lost(rank, why)
        )

    def _join(self, launched_group: LaunchedGroup | None) -> None:
        """Makes the process group of all ranks."""
        plan, place = self.plan, self.place
        rendezvous: Rendezvous
        if launched_group is not None and launched_group.network is not None:
            rendezvous, c10d_store = launched_group.network
        else:
            rendezvous = self._rendezvous = InMemory.made(place.world_size)
            c10d_store = rendezvous.store()
        self.send(
            lambda rank: Open(
                plan.device, place.of(rank), rendezvous, plan.threads, plan.memory_limit
            )
        )
        self.collect(Done)  # their devices are open
        try:
            self._collectives = join(plan.device, c10d_store, place)
        except CollectiveError as error:
            raise self.explained(error) from error
        self.collect(Done)

    def network_rate(self, device: torch.device) -> float:
        """Returns how many bytes a second a node receives from the others, while it sends as many.
        That is measured on `device` with all ranks, in less than a second where the network is
        fast. Raises RankError.
        """
        size, seconds = FIRST_BYTES, self._gather_seconds(device, FIRST_BYTES)
        while seconds < ENOUGH_SECONDS and size < MOST_BYTES:
            size *= 4
            seconds = self._gather_seconds(device, size)
        return received_by_node(self.collectives, size) / seconds

    def _gather_seconds(self, device: torch.device, size: int) -> float:
        found = []
        for _ in range(TIMES):
            self.send(lambda _: Gather(size))
            try:
                found.append(gather_seconds(self.collectives, device, size))
            except CollectiveError as error:
                raise self.explained(error) from error
            self.collect(Done)
        return min(found)

    # ------------------------------------------------------------------ asking

    def _send_to(self, rank: int, message: Message) -> None:
        try:
            self._lines[rank - 1].send(message)
        except ConnectionLostError as error:
            raise self.explained(error) from error

    def send(self, message_for: Callable[[int], Message]) -> None:
        """Sends to each rank but this one what `message_for` returns for it. Raises RankError."""
        for rank in range(1, self.place.world_size):
            self._send_to(rank, message_for(rank))

    def send_to(self, ranks: Sequence[int], message: Message) -> None:
        """Sends a message to some ranks. Raises RankError."""
        for rank in ranks:
            self._send_to(rank, message)

    def collect(self, kind: type[R]) -> list[R]:
        """Returns the answer of each rank but this one, in order. Raises RankError."""
        return self.collect_from(range(1, self.place.world_size), kind)

    def collect_from(self, ranks: Sequence[int], kind: type[R]) -> list[R]:
        """Returns the answers of some ranks, in order. Raises RankError."""
        answers: list[R] = []
        for rank in ranks:
            try:
                answer = self._lines[rank - 1].next()
            except ConnectionLostError as error:
                raise self.explained(error) from error
            assert isinstance(answer, kind), answer
            answers.append(answer)
        return answers

    def ask(self, message: Message) -> None:
        """Sends a message to each rank but this one, and waits until it is done. Raises
        RankError.
        """
        self.send(lambda _: message)
        self.collect(Done)

    def go(self, step: int) -> None:
        """Lets the other ranks write `step` into the planes."""
        self.send(lambda _: Go(step))

    def wait_for_applied(self, step: int) -> None:
        """Returns once the other ranks have written `step` into the planes. Raises RankError."""
        with self._wrote:
            self._wrote.wait_for(lambda: self._problem or self._applied[step] == len(self._lines))
            del self._applied[step]
        if self._problem:
            raise RankError(self._problem)

    # ------------------------------------------------------------------ what ranks report

    def sample(self, is_sampled: Callable[[int], bool]) -> None:
        """Has the ranks report when the ops ran, for each step for which `is_sampled` is True."""
        self._is_sampled = is_sampled

    def wants_timeline(self, step: int) -> bool:
        """Returns whether the ranks report when the ops of `step` run."""
        return self._is_sampled(step)

    def take_timelines(self, step: int) -> dict[int, Timeline]:
        """Returns when the ops of an applied step ran on the other ranks, by rank, and keeps it no
        longer. Nothing is there of a step for which `wants_timeline` was false.
        """
        with self._wrote:
            return dict(sorted(self._timelines.pop(step, {}).items()))

    def device_memory(self) -> dict[int, DeviceMemory]:
        """Returns what the other ranks hold of their devices, by rank, as they said last."""
        with self._wrote:
            return dict(sorted(self._memory.items()))

    def host_memory(self) -> dict[int, int]:
        """Returns the bytes of this node's memory that each other rank on it has for itself, by
        rank. Any thread may call this. What ranks share counts as rank 0's, which has allocated
        it.
        """
        return {
            rank: process.host_memory()
            for rank, process in enumerate(self._processes, 1)
            if process.is_here
        }

    # ------------------------------------------------------------------ what goes wrong

    @property
    def problem(self) -> str:
        """Why the ranks cannot continue, or "" if they can."""
        return self._problem

    @property
    def is_abandoned(self) -> bool:
        """Whether the others wait in a step that this rank has given up."""
        return self._is_abandoned

    @property
    def compute(self) -> bool:
        """Whether the others compute what they are asked to."""
        return not (self._problem or self._is_abandoned)

    def abandon(self) -> None:
        """Leaves the others in the step under way, whose updates they do not begin without a word
        from this rank. They still answer about the planes on their devices, and can be ended.
        """
        self._is_abandoned = True

    def explained(self, error: BaseException) -> RankError:
        """Returns the error that says which rank is the cause of `error`. If no other rank is, it
        is this one, and the others are ended: they wait for it.
        """
        if isinstance(error, RankError):
            return error
        if not self._known.wait(KNOWN_SECONDS):
            own = isinstance(error, RamstreamError)
            text = str(error) if own else f"{type(error).__name__}: {first_line(error)}."
            self._fail(f"{self._named(0)} failed: {text}")
        return RankError(self._problem)

    def _named(self, rank: int) -> str:
        host = self._processes[rank - 1].host_name if 0 < rank <= len(self._processes) else ""
        return f"Rank {rank} of {self.place.world_size}" + (f", on {host}," if host else "")

    def _take(self, rank: int, message: Message) -> bool:
        match message:
            case OptimizerStep(number, timeline, memory):
                with self._wrote:
                    if timeline is not None:
                        self._timelines[number][rank] = timeline
                    if memory is not None:
                        self._memory[rank] = memory
                    self._applied[number] += 1
                    self._wrote.notify_all()
                return True
            case ShardReply():
                self.shards.take(rank, message)
                return True
            case Failed():
                self._told(rank, message)
                return True
        return False

    def _told(self, rank: int, failed: Failed) -> None:
        """Takes from a process why it ends."""
        self._have_told.add(rank)
        sentence = f"{self._named(rank)} failed: {failed.sentence}"
        if failed.by_others:
            threading.Thread(target=self._fail_later, args=(sentence,), daemon=True).start()
            return
        try:
            if failed.trace:
                self._log(failed.trace)
        finally:  # the log may be full
            self._fail(sentence)

    def _fail_later(self, sentence: str) -> None:
        if not self._known.wait(CAUSE_SECONDS):
            self._fail(sentence)

    def _lost(self, rank: int, why: str) -> None:
        """Finds out why a process is lost. The thread that reads from it calls this."""
        if self._ending or self._problem or rank in self._have_told:
            return
        cause = self._processes[rank - 1].why_lost(why)
        self._fail(f"{self._named(rank)} is lost: {cause}.")

    def _fail(self, sentence: str) -> None:
        """Keeps the first problem, and ends all ranks but this one."""
        with self._failing:
            if self._problem or self._ending:
                return
            self._problem = sentence
        for process in self._processes:
            process.kill()
        if self._collectives is not None:
            self._collectives.abort()
        self._known.set()
        with self._wrote:
            self._wrote.notify_all()

    def close(self) -> None:
        """Makes the ranks that this one has started end, and leaves the group. It may be called
        twice.
        """
        self._ending = True
        for process in self._processes:
            process.say_goodbye()
        for process in self._processes:
            process.part()
        self.shards.close()
        if self._collectives is not None:
            self._collectives.close()
        self._collectives = None
        # The ranks may have met in part. After one was lost, the group cannot say goodbye to it.
        if distributed.is_initialized():
            with contextlib.suppress(RuntimeError):
                distributed.destroy_process_group()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._rendezvous = None
