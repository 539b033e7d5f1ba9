"""A run from its folder to its last record: the one way in for the command line and for the app.

`Run.execute` never raises for a run that fails: the cause becomes the run's last record, one sentence.
"""

from __future__ import annotations

import contextlib
import os
import queue
import traceback

from engine.config import TrainConfig
from engine.errors import RamstreamError, RunError
from engine.events import ControlReceived, LogLine, RunEnded, RunStarted, StateChanged
from engine.paths import lasting_source, lasting_sources
from engine.recorder import RunRecorder
from engine.runs import COMMANDS, CommandReader, RunFolder, create_run, open_run, summarise


class _GiveUp(Exception):
    """A stop or discard that came before the first step."""

    def __init__(self, command: str):
        self.command = command


class Run:
    """One run in this process, which owns the folder from here to the end of `execute` (or `close`).

    `request` may be called from any thread while `execute` runs. Raises RunError when another process has the run.
    """

    def __init__(self, folder: RunFolder, resume: bool):
        self.folder, self.resume = folder, resume
        self.id = folder.id
        self._owned = contextlib.ExitStack()
        with contextlib.ExitStack() as owned:
            owned.enter_context(folder.lock())
            self.recorder = RunRecorder(folder.path, folder.id)
            owned.callback(self.recorder.close)
            self._reader = CommandReader(folder)
            self._owned = owned.pop_all()
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._early: list[str] = []
        """Requests for the training loop that came in while the run was still being prepared."""

    def request(self, command: str) -> None:
        """Ask for stop, discard, pause, resume or save; obeyed at the next safe step."""
        if command not in COMMANDS:
            raise RunError(f"{command!r} is not a command; a run takes {', '.join(COMMANDS)}.")
        self._requests.put(command)

    def execute(self) -> RunEnded:
        """Run to the end and return the last record; the record and the folder are then free again."""
        with self._owned:
            ended = self._guarded()
            self.recorder.emit(ended)
            return ended

    def close(self) -> None:
        """Give a run that is not going to be executed back."""
        self._owned.close()

    def _guarded(self) -> RunEnded:
        try:
            return self._train()
        except _GiveUp as error:
            if error.command == "discard":
                return RunEnded("discarded", "Stopped before the first step.")
            return RunEnded("stopped", "Stopped before the first step; nothing was trained.")
        except RamstreamError as error:
            return RunEnded("failed", str(error), type(error).__name__)
        except MemoryError:
            return RunEnded("failed", "The host ran out of memory; choose a smaller model or batch, or free some memory.",
                            "MemoryError")
        except Exception as error:  # a fault of the program: the record keeps where, the person gets one sentence
            self.recorder.emit(LogLine("error", traceback.format_exc()))
            return RunEnded("failed", f"An error in the program ended the run ({type(error).__name__}: {error}); the log "
                                      "of the run has the details.", type(error).__name__)

    def _train(self) -> RunEnded:
        self.recorder.emit(StateChanged("preparing"))
        config = self.folder.config
        # torch and transformers take seconds to import; a wrong preset should fail before that.
        from engine.prepare import prepare, program_version
        from engine.trainer import Trainer, started_event

        prepared = prepare(config, self.folder, self.recorder, self.resume, self._check)
        try:
            event: RunStarted = started_event(config, prepared, program_version(), os.getpid())
            self.recorder.emit(event)
            return Trainer(config, self.folder, self.recorder, prepared, self._next_commands).run()
        except BaseException:
            # Lanes may still be at work on the planes: they must end before the planes go.
            try:
                prepared.engine.drain()
            except Exception:
                pass  # the first error is the one that is told
            raise
        finally:
            prepared.close()

    def _next_commands(self) -> list[str]:
        found, self._early = self._early, []
        while not self._requests.empty():
            found.append(self._requests.get())
        return found + self._reader.read_new()

    def _check(self) -> None:
        found = self._next_commands()
        for command in found:
            if command in ("stop", "discard"):
                self.recorder.emit(ControlReceived(command))
                raise _GiveUp(command)
        self._early = found


def start_run(config: TrainConfig, runs_dir: str | os.PathLike[str]) -> Run:
    """A new run folder, ready to execute. Local sources are kept as whole paths, so that the run can be resumed from
    anywhere."""
    lasting = {"model.source": lasting_source(config.model.source), "data.source": lasting_sources(config.data.source)}
    return Run(create_run(runs_dir, config.with_values(lasting)), resume=False)


def resume_run(runs_dir: str | os.PathLike[str], run_id: str) -> Run:
    """An earlier run, to go on from its newest checkpoint (from the start when it never saved one). Raises RunError for
    one that has finished."""
    folder = open_run(runs_dir, run_id)
    summary = summarise(folder)
    if summary is not None and summary.state == "finished":
        raise RunError(f"Run {run_id} has finished all its {summary.total_steps} steps; start a new run to train further.")
    return Run(folder, resume=True)
