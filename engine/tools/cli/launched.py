"""`launch.py train` as one of the processes that `torchrun` has started, on one node or several.

Rank 0 reads data, owns the run and decides. All others follow it, and end with its exit code, so
that torchrun starts all of them again after a failure (`--max-restarts`). A run that was started
again continues from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from engine import safe_files
from engine.config.settings import TrainConfig
from engine.config.tree import by_dotted_name
from engine.errors import ConfigError, RamstreamError
from engine.helper_process import start_ticks
from engine.runtime.collectives.rank import RankInfo
from engine.runtime.distributed.handshake import handshake
from engine.runtime.distributed.launched_group import LaunchedGroup, connect_to_rank_zero
from engine.runtime.distributed.messages import Handshake
from engine.runtime.distributed.torchrun import Launched, read_launched
from engine.runtime.distributed.worker import run as run_worker
from engine.tools.cli.train import TrainCommand, asked_run, show_run
from engine.training.loop.run import Run, resume_run

REFUSED_CODE = 2
"""Exit code of a process that may not take part, which stands for all bad input."""
OVER_FOR_GOOD = ("finished", "discarded")
"""States of a run that is not continued. One that was stopped is: torchrun stops all processes and
starts them again where a node joins.
"""
BEGUN_FOLDER = ".torchrun"
"""Folder beside the runs with the runs that torchrun has begun."""


def train_launched(command: TrainCommand, gpus: int | str | None = None) -> int:
    """Trains the run of the command as rank 0, or follows rank 0; returns the exit code. gpus: as
    the command line asks for them. Raises RankError where the processes cannot compute a run
    together.
    """
    launched = read_launched()
    processes = launched.place.local_world_size
    if gpus not in (None, processes):
        raise ConfigError(
            "--gpus",
            f"{gpus} are asked for, but torchrun has started {processes} processes on "
            "this node; leave --gpus out.",
        )
    command = command.with_overrides([f"engine.gpus={processes}"])
    handshake, problem = _handshake_of(launched.place, command)
    if launched.place.rank > 0:
        return _run_worker(launched, handshake)
    try:
        launched_group = LaunchedGroup(launched, handshake)
    except RamstreamError:
        if problem is not None:
            raise problem from None
        raise
    code = 1
    try:
        code = _run_rank_zero(launched, launched_group, command)
    except RamstreamError:
        code = REFUSED_CODE
        raise
    finally:
        launched_group.end(code)
    return code


def _run_worker(launched: Launched, handshake: Handshake) -> int:
    """Follows rank 0, and ends this process. Returns an exit code if rank 0 refuses."""
    # torchrun passes signals on to every process. Rank 0 obeys them, and ends this one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        connection = connect_to_rank_zero(launched, handshake)
    except RamstreamError as error:
        # Rank 0 reports it on its node.
        if launched.place.is_first_on_node and launched.place.node_rank > 0:
            print(f"ramstream: {error}", file=sys.stderr, flush=True)
        return REFUSED_CODE
    return run_worker(connection)


def _run_rank_zero(launched: Launched, launched_group: LaunchedGroup, command: TrainCommand) -> int:
    begun = _Begun(command.runs_dir, launched.run)
    run = begun.again(command) or asked_run(command)
    begun.note(run)
    run.compute_with(launched_group)
    code = show_run(run, command.runs_dir)
    if run.recorder.snapshot.state in OVER_FOR_GOOD:
        begun.forget()
        return 0  # torchrun would begin a run whose export failed anew
    return code


# ---------------------------------------------------------------------- settings


def _handshake_of(
    place: RankInfo, command: TrainCommand
) -> tuple[Handshake, RamstreamError | None]:
    """Returns who this process is, and what is wrong with its command line."""
    settings: dict[str, Any] = {"--resume": command.resume, "--from": command.start_from}
    try:
        if command.preset is None:
            settings["--set"] = command.overrides
        else:
            config = TrainConfig.load(command.preset, command.overrides)
            settings |= by_dotted_name(config.to_dict())
    except RamstreamError as error:
        return handshake(place, {}, str(error)), error
    return handshake(place, settings), None


# ---------------------------------------------------------------------- restarts


class _Begun:
    """The run that the torchrun of this process has begun."""

    def __init__(self, runs_dir: Path, name: str):
        self._runs_dir = runs_dir
        agent = os.getppid()
        written = f"{name} {agent} {start_ticks(agent)}"
        digest = hashlib.sha256(written.encode()).hexdigest()[:16]
        self._file = runs_dir / BEGUN_FOLDER / digest

    def again(self, command: TrainCommand) -> Run | None:
        """Returns the run that an earlier attempt has begun, ready to continue; None where there is
        none. Raises RunError where it cannot continue.
        """
        if not safe_files.is_file(self._file, self._runs_dir):
            return None
        ranks = [each for each in command.overrides if each.startswith("engine.gpus=")][-1:]
        run_id = safe_files.read_text(self._file, self._runs_dir).strip()
        return resume_run(self._runs_dir, run_id, ranks)

    def note(self, run: Run) -> None:
        # Without the file, a later attempt begins another run, and nothing is lost of this one.
        with contextlib.suppress(OSError):
            safe_files.make_folder(self._file.parent, self._runs_dir, exist_ok=True)
            safe_files.write_whole(self._file, run.id, self._runs_dir, durable=False)

    def forget(self) -> None:
        """Forgets the run, which has ended as it should."""
        with contextlib.suppress(OSError):
            safe_files.remove(self._file, self._runs_dir)
            self._file.parent.rmdir()  # if no other run is noted there
