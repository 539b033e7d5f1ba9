"""A `Crew` is the processes that compute a run together with this one, which leads them.

- This process has rank 0 and the first device. It starts one process more for each further device
  of this machine, over a connection of its own (`engine.ranks.line`).
- It alone decides. The others do what it asks (`engine.ranks.messages`), and know no run, no data
  set and no settings of a run.
- Tensors pass between ranks by a process group of `torch.distributed`: NCCL between GPUs, gloo
  between processes on the CPU.
- Where a process ends, is silent or fails, the leader learns why, ends all others, and tells it in
  one sentence that names the rank. Nothing is left running: a process that follows ends when its
  connection does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from typing import Any, TypeVar

from torch import distributed

from engine.errors import RamstreamError, RankError, first_line
from engine.exchange.exchange import PATIENT_DAYS, ExchangeError, GroupExchange, reaching_others
from engine.host.shared_memory import OwnedMemory
from engine.machine.cgroups import private_memory
from engine.paths import PROGRAM_ROOT
from engine.ranks.line import Line, LostLineError
from engine.ranks.messages import (
    Applied,
    DeviceMemory,
    Done,
    End,
    Failed,
    Go,
    Open,
    ShardReply,
    Timeline,
)
from engine.ranks.remote_shards import RemoteShards

JOIN_SECONDS = 120
"""The processes must find each other within so many seconds."""
END_SECONDS = 10
"""A process that was asked to end has so many seconds."""
CAUSE_SECONDS = 3.0
"""The leader has so many seconds to find the cause where a process cannot reach the others."""
KNOWN_SECONDS = 5.0
"""Why a collective has failed is known within so many seconds, if another rank is the cause."""
HERE = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
"""Ranks of one machine use its loopback to meet, whatever networks it has. When a rank is lost,
torch would end the leader's process too, which has to tell of it and to save the run.
"""

R = TypeVar("R")


@dataclass(frozen=True)
class CrewPlan:
    """A `CrewPlan` says what a crew is made of."""

    ranks: int
    device: str
    """The ranks compute on this: `cpu` or `cuda`."""
    threads: int
    """Each rank may use this many cores."""
    memory_limit: int | None = None
    """The allocator of each device may take this many bytes; None where there is no limit."""


class Crew:
    """A `Crew` leads `plan.ranks` - 1 processes that it starts, over planes in `memory`. Raises
    RankError where one of them cannot be started. `log` gets the traceback of a process that
    failed.
    """

    def __init__(self, plan: CrewPlan, memory: OwnedMemory, log: Callable[[str], None]):
        self.plan = plan
        self._log = log
        self.memory = memory
        """The planes that all ranks share are in this memory."""
        self._known = threading.Event()
        self._problem = ""
        self._ending = False
        self._failing = threading.Lock()
        self._have_told: set[int] = set()
        """These ranks have told why they end."""
        self._applied: Counter[int] = Counter()
        self._timelines: defaultdict[int, dict[int, Timeline]] = defaultdict(dict)
        self._memory: dict[int, DeviceMemory] = {}
        self._is_sampled: Callable[[int], bool] = lambda _: False
        self._wrote = threading.Condition()
        self.shards = RemoteShards(plan.ranks, self._send_to, lambda: self._problem)
        """The shards of units that live on the other devices are reached through this."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Line] = []
        self._exchange: GroupExchange | None = None
        for name, value in HERE.items():
            os.environ.setdefault(name, value)
        try:
            for rank in range(1, plan.ranks):
                self._start(rank)
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def exchange(self) -> GroupExchange:
        """Returns what carries tensors between the ranks."""
        assert self._exchange is not None
        return self._exchange

    # ------------------------------------------------------------------ starting

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        path = os.pathsep.join(filter(None, (str(PROGRAM_ROOT), os.environ.get("PYTHONPATH"))))
        program = f"from engine.ranks.follower import main; main({theirs.fileno()})"
        try:
            process = subprocess.Popen(
                # -P keeps the working directory off the module path, as in `HelperProcess`.
                [sys.executable, "-P", "-c", program],
                # Ctrl-C in a terminal reaches the leader alone, which stops and saves the run.
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTHONPATH": path},
            )
        except OSError as error:
            ours.close()
            named = self._named(rank)
            raise RankError(f"{named} cannot be started ({first_line(error)}).") from error
        finally:
            theirs.close()
        self._processes.append(process)
        self._lines.append(
            Line(
                ours,
                lambda message: self._take(rank, message),
                lambda why: self._lost(rank, why),
            )
        )

    def _join(self) -> None:
        """Makes the process group of all ranks."""
        plan = self.plan
        store = distributed.TCPStore(
            "127.0.0.1", 0, plan.ranks, is_master=True, wait_for_workers=False
        )
        self.send(
            lambda rank: Open(
                plan.device, rank, plan.ranks, store.port, plan.threads, plan.memory_limit
            )
        )
        self.collect(Done)  # their devices are open
        try:
            self._exchange = join(plan.device, store, 0, plan.ranks)
        except ExchangeError as error:
            raise self.explained(error) from error
        self.collect(Done)

    # ------------------------------------------------------------------ asking

    def _send_to(self, rank: int, message: Any) -> None:
        try:
            self._lines[rank - 1].send(message)
        except LostLineError as error:
            raise self.explained(error) from error

    def send(self, message_for: Callable[[int], Any]) -> None:
        """Sends to each rank but this one what `message_for` returns for it. Raises RankError."""
        for rank in range(1, self.plan.ranks):
            self._send_to(rank, message_for(rank))

    def collect(self, kind: type[R]) -> list[R]:
        """Returns the answer of each rank but this one, in order. Raises RankError."""
        answers: list[R] = []
        for line in self._lines:
            try:
                answer = line.next()
            except LostLineError as error:
                raise self.explained(error) from error
            assert isinstance(answer, kind), answer
            answers.append(answer)
        return answers

    def ask(self, message: Any) -> None:
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
        """Returns the bytes of host memory that each other rank has for itself, by rank. Any thread
        may call this. What ranks share counts as the leader's, which has allocated it.
        """
        return {
            rank: private_memory(process.pid) for rank, process in enumerate(self._processes, 1)
        }

    # ------------------------------------------------------------------ what goes wrong

    @property
    def problem(self) -> str:
        """Returns why the ranks cannot go on, or "" if they can."""
        return self._problem

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
        return f"Rank {rank} of {self.plan.ranks}"

    def _take(self, rank: int, message: Any) -> bool:
        match message:
            case Applied(number, timeline, memory):
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
        process = self._processes[rank - 1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            why = _exit_in_words(process.wait(END_SECONDS if why == "it has ended" else 0.1))
        self._fail(f"{self._named(rank)} is lost: {why}.")

    def _fail(self, sentence: str) -> None:
        """Keeps the first problem, and ends all ranks but this one."""
        with self._failing:
            if self._problem or self._ending:
                return
            self._problem = sentence
        for process in self._processes:
            # A process that is stopped obeys this signal alone.
            process.kill()
        if self._exchange is not None:
            self._exchange.abort()
        self._known.set()
        with self._wrote:
            self._wrote.notify_all()

    def close(self) -> None:
        """Makes all ranks but this one end, and leaves their group. It may be called twice."""
        self._ending = True
        for line in self._lines:
            with contextlib.suppress(LostLineError):
                line.send(End())
        for process in self._processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for line in self._lines:
            line.close()
        self._exchange = None
        # The ranks may have met in part. After one was lost, the group cannot say goodbye to it.
        if distributed.is_initialized():
            with contextlib.suppress(RuntimeError):
                distributed.destroy_process_group()


def join(device: str, store: distributed.Store, rank: int, ranks: int) -> GroupExchange:
    """Joins the process group of a run, and returns its exchange. Every rank calls this. Raises
    ExchangeError where a rank does not come.
    """
    backend = "gloo" if device == "cpu" else "nccl"
    patience = timedelta(seconds=JOIN_SECONDS)
    with reaching_others():
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=ranks, timeout=patience
        )
        # Once they have met, ranks wait for each other as long as a run is paused.
        return GroupExchange(distributed.new_group(timeout=timedelta(days=PATIENT_DAYS)))


def _exit_in_words(code: int) -> str:
    """Returns how a process has ended, in words."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name
    if code == -signal.SIGKILL:
        return f"its process was killed ({name}), by a person, or by the system for lack of memory"
    return f"its process was ended by the signal {name}"
