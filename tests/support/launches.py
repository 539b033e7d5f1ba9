"""`torchrun` as a person starts it, once for each node. All nodes are this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import Event
from engine.runs.record.following import replay
from engine.runs.summaries.listing import list_runs
from engine.runtime.distributed.shared_secret import VARIABLE
from tests.support.folders import make_config
from tests.support.forked_processes import ForkedProcess, fork_from_here, forked_rank
from tests.support.killed import ONE_THREAD
from tests.support.ports import free_port
from tests.support.worker_groups import SECRET, is_running, wait_for_end

PATIENCE = 150
FORKING = "from tests.support.launches import torchrun_forks; torchrun_forks()"
NETWORK = {"GLOO_SOCKET_IFNAME": "lo", VARIABLE: SECRET}
SETTINGS = {
    "train.micro_batch_size": 1,
    "train.steps": 8,
    "output.checkpoint_every": 3,
    "output.keep_checkpoints": 9,
    "output.eval_every": 4,
}


class Launch:
    """A command of `launch.py train`, of which `torchrun` starts `ranks` on each node."""

    def __init__(
        self,
        nodes: int,
        ranks: int,
        arguments: list[list[str]],
        restarts: int = 0,
        start: type[subprocess.Popen] = ForkedProcess,
    ):
        """arguments: those of each node. start: what starts all processes."""
        port = free_port()
        program = ["-m", "torch.distributed.run"]
        if start is ForkedProcess:
            program = ["-c", FORKING]
        torchrun = [
            *(sys.executable, *program, f"--nnodes={nodes}"),
            *(f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={port}"),
            # The name of this node may not be known to its resolver.
            "--local-addr=127.0.0.1",
        ]
        self.agents = [
            start(
                [*torchrun, str(PROGRAM_ROOT / "launch.py"), "train", *own],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | ONE_THREAD | NETWORK | _gpus_of(host, ranks),
            )
            for host, own in enumerate(arguments)
        ]

    def ended(self) -> tuple[list[int], str, str]:
        """Returns the exit codes of all nodes, and what they wrote to stdout and stderr."""
        texts = [agent.communicate(timeout=PATIENCE) for agent in self.agents]
        outs, errs = zip(*texts)
        return [agent.returncode for agent in self.agents], "".join(outs), "".join(errs)

    def workers(self) -> dict[int, int]:
        """Returns the processes that torchrun has started, by rank."""
        found = {}
        for agent in self.agents:
            for pid in children_of(agent.pid):
                with contextlib.suppress(OSError):
                    rank = forked_rank(pid) or _variables(pid).get(b"RANK")
                    if rank is not None:
                        found[int(rank)] = pid
        return found

    def wait_for_step(self, runs: Path, step: int) -> None:
        until = time.monotonic() + PATIENCE
        while not (list_runs(runs) and list_runs(runs)[0].step >= step):
            assert all(agent.poll() is None for agent in self.agents), self.ended()
            assert time.monotonic() < until
            time.sleep(0.05)


def torchrun_forks() -> None:
    """Does what `torchrun` does, but for its processes, which are forked."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    fork_from_here()
    subprocess_handler.Popen = ForkedProcess
    run.main(sys.argv[1:])


def _gpus_of(host: int, ranks: int) -> dict[str, str]:
    """Each node has GPUs of its own, if this process sees some."""
    last = (host + 1) * ranks
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(last))))
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[host * ranks : last])}


def _variables(pid: int) -> dict[bytes, bytes]:
    values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(value.partition(b"=")[::2] for value in values)


@contextlib.contextmanager
def launch(nodes: int, ranks: int, arguments: list[list[str]], *how: Any) -> Iterator[Launch]:
    """Starts a command on each node, and checks that nothing is left. how: as for `Launch`."""
    found = Launch(nodes, ranks, arguments, *how)
    seen: set[int] = set()
    try:
        yield found
        seen |= set(found.workers().values())
    finally:
        for agent in found.agents:
            if agent.poll() is None:
                workers = children_of(agent.pid)
                agent.kill()
                agent.wait()
                for pid in filter(is_running, workers):
                    os.kill(pid, signal.SIGKILL)
    wait_for_end(*seen)


def children_of(pid: int) -> list[int]:
    """Returns the processes that a process has started."""
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        texts = [(task / "children").read_text().split() for task in tasks]
        return [int(child) for text in texts for child in text]
    return []


def preset_of(folder: Path, **values) -> str:
    """Writes a preset; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    make_config(folder, **SETTINGS | values).save(folder / "preset.yaml")
    return str(folder / "preset.yaml")


def events_in(runs: Path, kind: type) -> list[Event]:
    """Returns the events of one kind in the record of the only run in a folder."""
    (run,) = list_runs(runs)
    records = replay(runs / run.id / "events.jsonl")
    return [record.event for record in records if isinstance(record.event, kind)]


def planes_in(runs: Path, step: int) -> dict[str, np.ndarray]:
    """Returns the float32 planes of a checkpoint, by file."""
    (run,) = list_runs(runs)
    folder = runs / run.id / "checkpoints" / f"step-{step}"
    return {path.name: np.fromfile(path, np.float32) for path in folder.glob("*.planes")}
