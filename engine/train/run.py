"""A run from its folder to its last record: the one way in for the command line and for the app.

`Run.execute` never raises for a run that fails: the cause becomes the run's last record, one
sentence.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import sys
import threading
import traceback

from engine.config.changes import Change
from engine.config.settings import TrainConfig
from engine.errors import ConfigError, GpuMemoryError, RamstreamError, RunError, first_line
from engine.files import file_size
from engine.fit.choose import Chosen
from engine.fit.memory_items import Item, PartName, items_of
from engine.runs.control import COMMANDS, CommandReader
from engine.runs.events import ControlReceived, LogLine, RunEnded, RunStarted, StateChanged
from engine.runs.folder import RunFolder, create_run, lasting_config, open_run
from engine.runs.listing import summarise
from engine.runs.recorder import RunRecorder
from engine.train.paused_calls import PausedCalls
from engine.train.webhook import message, tell

ENDINGS = ("stop", "discard")


class _GiveUp(Exception):
    """A stop or discard that came before the first step."""

    def __init__(self, command: str):
        self.command = command


class Run:
    """One run in this process, which owns the folder from here to the end of `execute` (or
    `close`).

    `request` may be called from any thread while `execute` runs. Raises RunError when another
    process has the run.
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
        self.paused = PausedCalls()
        """What other threads ask of the weights while the run is paused."""
        self._requests: queue.SimpleQueue[str | Change] = queue.SimpleQueue()
        self._chosen: Chosen | None = None
        self._early: list[str | Change] = []
        """Requests that were looked at and not obeyed yet: while the run was still being prepared,
        or waits for space.
        """
        self._asked_to_end: list[str] = []
        self._looking = threading.Lock()
        self.recorder.wait_for_disk_space(self._count_endings)

    def request(self, command: str | Change) -> None:
        """Ask for stop, discard, pause, resume or save, or for a change; obeyed at the next safe
        step.
        """
        if not isinstance(command, Change) and command not in COMMANDS:
            raise RunError(f"{command!r} is not a command; a run takes {', '.join(COMMANDS)}.")
        self._requests.put(command)

    def execute(self) -> RunEnded:
        """Run to the end and return the last record; the record and the folder are then free again."""
        with self._owned:
            ended = self._guarded()
            self.recorder.wait_for_disk_space(
                None
            )  # from here on, nothing is lost when the record takes no more
            try:
                self._tell(ended)
                self.recorder.emit(ended)
            # the record keeps what it has, and whoever waits here still learns the cause
            except RunError as error:
                return (
                    ended
                    if ended.state == "failed"
                    else RunEnded("failed", str(error), type(error).__name__)
                )
            return ended

    def _tell(self, ended: RunEnded) -> None:
        """Before the last record, so that a failure of the webhook is in the log."""
        with contextlib.suppress(
            ConfigError
        ):  # a configuration that does not load says so as the run's end
            address = self.folder.config.output.webhook
            problem = (
                tell(address, message(self.id, self.recorder.snapshot, ended)) if address else None
            )
            if problem is not None:
                with contextlib.suppress(
                    RunError
                ):  # a record without space for it may yet have some for the end
                    self.recorder.emit(LogLine("warning", problem))

    def close(self) -> None:
        """Give a run that is not going to be executed back."""
        self._owned.close()

    def _guarded(self) -> RunEnded:
        try:
            ended = self._train()
        except _GiveUp as error:
            again = "Stopped before it went on; nothing is lost and it can be resumed."
            ended = (
                RunEnded("discarded", "Stopped before the first step.")
                if error.command == "discard"
                else RunEnded(
                    "stopped",
                    again if self.resume else "Stopped before the first step; nothing was trained.",
                )
            )
        except Exception as error:
            self.recorder.wait_for_disk_space(None)
            ended = (
                self._discarded()
                if self.recorder.gave_up and self._asked_to_end[-1] == "discard"
                else self._failed(error)
            )
        if "torch" in sys.modules:  # after the error and its frames are gone
            from engine.runtime.open_backend import give_memory_back

            give_memory_back()
        return ended

    def _discarded(self) -> RunEnded:
        """What was asked for while the record waited for space."""
        shutil.rmtree(self.folder.checkpoints_path, ignore_errors=True)
        return RunEnded(
            "discarded",
            f"Stopped at step {self.recorder.snapshot.step} while the disk was full; its "
            "checkpoints were deleted as asked.",
        )

    def _failed(self, error: Exception) -> RunEnded:
        """One sentence for the person; the record keeps where the program, the device or the system
        is at fault.
        """
        told = error
        if not isinstance(error, RamstreamError) or isinstance(error, GpuMemoryError):
            from engine.train.explain import explained

            with contextlib.suppress(
                RunError
            ):  # a record that cannot be written may be the fault itself
                self.recorder.emit(LogLine("error", "".join(traceback.format_exception(error))))
            told = explained(error, self._gpu_items())
        if told is not None:
            return RunEnded("failed", str(told), type(told).__name__)
        kind, said = type(error).__name__, first_line(error)
        what = kind if said == kind else f"{kind}: {said}"
        return RunEnded(
            "failed",
            f"An error in the program ended the run ({what}); the log of the run has the details.",
            kind,
        )

    def _gpu_items(self) -> tuple[Item, ...]:
        """Of the plan, or of the report that came before it."""
        if self._chosen is not None:
            return self._chosen.gpu_items
        return items_of(self.recorder.snapshot.fit, PartName.GPU)

    def _train(self) -> RunEnded:
        self.recorder.emit(StateChanged("preparing"))
        config = self.folder.config
        # torch and transformers take seconds to import; a wrong preset should fail before that.
        from engine.train.explain import note_memory
        from engine.train.prepare import prepare, program_version
        from engine.train.trainer import Trainer, started_event

        prepared = prepare(config, self.folder, self.recorder, self.resume, self._check)
        self._chosen = prepared.chosen
        try:
            event: RunStarted = started_event(config, prepared, program_version(), os.getpid())
            self.recorder.emit(event)
            ended = Trainer(
                config, self.folder, self.recorder, prepared, self._next_commands, self.paused
            ).run()
        except BaseException as error:
            note_memory(error, prepared.planned.account.note)
            self.recorder.wait_for_disk_space(
                None
            )  # a lane that waits for space would be waited for
            # Lanes may still be at work on the planes: they must end before the planes go. On a
            # device that failed, both may fail too; the first error is the one that is told.
            for give_back in (prepared.engine.drain, prepared.close):
                with contextlib.suppress(Exception):
                    give_back()
            raise
        prepared.close()
        return ended

    def _next_commands(self) -> list[str | Change]:
        with self._looking:
            self._look()
            found, self._early = self._early, []
            return found

    def _count_endings(self) -> int:
        """How often it was asked to end so far, by any thread; nothing is taken away from the
        training loop.
        """
        with self._looking:
            self._look()
            return len(self._asked_to_end)

    def _look(self) -> None:
        found: list[str | Change] = []
        while not self._requests.empty():
            found.append(self._requests.get())
        found += self._reader.read_new()
        self._early += found
        self._asked_to_end += [command for command in found if command in ENDINGS]

    def _check(self) -> None:
        found = self._next_commands()
        for command in found:
            if command in ENDINGS:
                self.recorder.emit(ControlReceived(command))
                raise _GiveUp(command)
        with self._looking:
            self._early = found + self._early


def start_run(config: TrainConfig, runs_dir: str | os.PathLike[str]) -> Run:
    """A new run folder, ready to execute. Local sources are kept as whole paths, so that the run
    can be resumed from anywhere.
    """
    folder = create_run(runs_dir, lasting_config(config))
    try:
        return Run(folder, resume=False)
    except RunError:
        shutil.rmtree(folder.path, ignore_errors=True)  # a folder without a record is no run
        raise


def resume_run(runs_dir: str | os.PathLike[str], run_id: str) -> Run:
    """An earlier run, to go on from its newest checkpoint (from the start when it never saved one,
    or is a folder that was made and never began). Raises RunError for one that has finished.
    """
    folder = open_run(runs_dir, run_id)
    try:
        folder.config
    except (
        ConfigError
    ) as error:  # before anything is written to a run that this version cannot go on with
        raise RunError(
            f"The settings of run {run_id} cannot be used by this version of Ramstream ({error}); "
            "use the version that wrote it, or mend its config.yaml."
        ) from None
    summary = summarise(folder)
    if summary is not None and summary.state == "finished":
        raise RunError(
            f"Run {run_id} has finished all its {summary.total_steps} steps; start a new run to "
            "train further."
        )
    return Run(folder, resume=file_size(folder.events_path) > 0)
