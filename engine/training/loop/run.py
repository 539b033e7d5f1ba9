"""The execution of a run, from its folder to its last record.

Both the command line and the app use it. `Run.execute` never raises when a run fails: the run's
last record states the cause in one sentence.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine import safe_files
from engine.config.changes import Change
from engine.config.settings import TrainConfig
from engine.errors import ConfigError, GpuMemoryError, RamstreamError, RunError
from engine.machine.device import refuse_unasked_cpu
from engine.machine.read_machine import read_machine
from engine.machine.short_memory import Work, refuse_little_memory
from engine.paths import program_version
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.memory_items import Item, PartName, items_of
from engine.runs.record.control import COMMANDS, CommandReader
from engine.runs.record.events import (
    ControlReceived,
    LogLine,
    Record,
    RunEnded,
    RunStarted,
    StateChanged,
)
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder, lasting_config, open_run
from engine.runs.summaries.listing import summarize
from engine.runs.summaries.names import new_run
from engine.runs.trackers.attached import Attached
from engine.training.checkpoints.own_folders import refuse_links
from engine.training.checkpoints.saved_on_disk import saved_steps
from engine.training.loop.paused_calls import PausedCalls
from engine.training.loop.requests import Requests
from engine.training.loop.resume import lost_steps, train_on_text
from engine.training.loop.webhook import message, post

if TYPE_CHECKING:
    from engine.runtime.distributed.launched_group import LaunchedGroup

ENDINGS = ("stop", "discard")
"""Requests that end a run."""


class _GiveUp(Exception):
    """Raised for a stop or discard before the first step."""

    def __init__(self, command: str):
        self.command = command


class Run:
    """One run in this process, which owns the run's folder until `execute` (or `close`) ends.

    `request` may be called from any thread while `execute` runs. `before` are settings that are put
    back if the run is refused with those that it has now. Raises RunError when another process owns
    the run.
    """

    def __init__(self, folder: RunFolder, resume: bool, before: TrainConfig | None = None):
        self.folder = folder
        self.resume = resume
        self._before = before
        self.id = folder.id
        self._launched_group: LaunchedGroup | None = None
        self._owned = contextlib.ExitStack()
        with contextlib.ExitStack() as owned:
            owned.enter_context(folder.lock())
            self.recorder = RunRecorder(folder.path, folder.id)
            owned.callback(self.recorder.close)
            self._reader = CommandReader(folder)
            self._owned = owned.pop_all()
        self.paused = PausedCalls()
        """Gives other threads the weights while the run is paused."""
        self._requests: queue.SimpleQueue[str | Change] = queue.SimpleQueue()
        self._chosen: Chosen | None = None
        self._trackers: Attached | None = None
        self._early: list[str | Change] = []
        """Requests that were read but not obeyed yet: they came while the run was being prepared,
        or while it waited for space.
        """
        self._asked_to_end: list[str | Change] = []
        """All requests to end the run, obeyed or not."""
        self._is_urgent = False
        self._will_be_urgent = False
        self._polling = threading.Lock()
        self.recorder.wait_for_disk_space(self._count_endings)

    def compute_with(self, launched_group: LaunchedGroup) -> None:
        """Makes `launched_group` the processes that compute the run together with this one, which
        then starts none itself.
        """
        self._launched_group = launched_group

    @property
    def finishes_its_step(self) -> bool:
        """Whether a step under way is finished even where a stop is urgent: processes of other
        nodes hold shards of the planes, and compute until its end.
        """
        return self._launched_group is not None and self._launched_group.place.nodes > 1

    def request(self, command: str | Change) -> None:
        """Requests stop, discard, pause, resume or save, or a change.

        The run obeys before its next step. Raises RunError for an unknown command.
        """
        if not isinstance(command, Change) and command not in COMMANDS:
            raise RunError(f"{command!r} is not a command; a run takes {', '.join(COMMANDS)}.")
        self._requests.put(command)

    def stop(self, is_urgent: bool) -> None:
        """Requests a stop; a signal handler may call this. If it `is_urgent`, the process may soon
        be ended by force: the step under way is aborted, and the one before it saved, unless the
        run `finishes_its_step`.
        """
        self.request("stop")
        # It is set after the request, so that any thread that reads it finds the request.
        self._is_urgent = self._is_urgent or is_urgent

    def expect_stop(self) -> None:
        """Announces an urgent request to stop: the step that was finished last is saved, even while
        an op takes long. Any thread may call it.
        """
        self._will_be_urgent = True

    def follow(self, report: Callable[[str], None]) -> None:
        """Calls `report` with each line of the log from now on, and with the reason for each new
        state.
        """

        def report_record(record: Record) -> None:
            event = record.event
            if isinstance(event, LogLine) and event.level != "error":
                report(event.text)
            elif isinstance(event, StateChanged | RunEnded) and event.reason:
                report(event.reason)

        self.recorder.subscribe(report_record)

    def execute(self) -> RunEnded:
        """Runs to the end and returns the last event. The record is closed and the folder is free
        then.
        """
        with self._owned:
            ended = self._guarded()
            if self._trackers is not None:
                self._trackers.finish(ended.state_text)
            # From here on, nothing is lost if no further line can be recorded.
            self.recorder.wait_for_disk_space(None)
            try:
                self.recorder.check()
                self._notify(ended)
                self.recorder.emit(ended)
            except RunError as error:
                return self._unrecorded(ended, error)
            return ended

    def _unrecorded(self, ended: RunEnded, error: RunError) -> RunEnded:
        """Returns the last event of a run that could not be recorded, for the caller to report."""
        failed = RunEnded("failed", str(error), type(error).__name__)
        if not self.recorder.is_lost:
            # The record ends where it is.
            return ended if ended.state == "failed" else failed
        # All other failures follow from this. The record of a renamed folder has it, too.
        with contextlib.suppress(RunError):
            self.recorder.emit(failed)
        return failed

    def _notify(self, ended: RunEnded) -> None:
        """Notifies the webhook, if there is one, of how the run ended.

        This happens before the last record, so that the log contains a failure of the webhook.
        """
        try:
            address = self.folder.config.output.webhook
        except ConfigError:
            return  # the run ended for this very reason, and says so
        if not address:
            return
        problem = post(address, message(self.id, self.recorder.snapshot, ended))
        if problem is not None:
            # If there is no space for this line, there may still be space for the last one.
            with contextlib.suppress(RunError):
                self.recorder.emit(LogLine("warning", problem))

    def close(self) -> None:
        """Releases the folder of a run that will not be executed."""
        self._owned.close()

    def _guarded(self) -> RunEnded:
        """Trains; returns how the run ended, whatever happened."""
        try:
            ended = self._train()
        except _GiveUp as error:
            ended = self._given_up(error.command)
        except Exception as error:  # noqa: BLE001  every cause becomes the run's last record
            self.recorder.wait_for_disk_space(None)
            if self.recorder.gave_up and self._asked_to_end[-1] == "discard":
                ended = self._discarded()
            else:
                ended = self._failed(error)
        # The error's frames hold tensors; they are gone only after the except clause.
        if "torch" in sys.modules:
            from engine.runtime.device.open_backend import give_memory_back

            give_memory_back()
        return ended

    def _given_up(self, command: str) -> RunEnded:
        """Returns the last event of a run that was stopped or discarded before its first step."""
        if command == "discard":
            return RunEnded("discarded", "Stopped before the first step.")
        if self.resume:
            reason = "Stopped before it went on; nothing is lost and it can be resumed."
        else:
            reason = "Stopped before the first step; nothing was trained."
        return RunEnded("stopped", reason)

    def _discarded(self) -> RunEnded:
        """Deletes the checkpoints, as requested while the record waited for space; returns the last
        event.
        """
        self.folder.delete_weights()
        return RunEnded(
            "discarded",
            f"Stopped at step {self.recorder.snapshot.step} while the disk was full; its "
            "checkpoints were deleted as asked.",
        )

    def _failed(self, error: Exception) -> RunEnded:
        """Returns the last event of a run that failed, with one sentence for the user.

        The traceback is logged if the program, the device or the system is at fault.
        """
        if isinstance(error, RamstreamError) and not isinstance(error, GpuMemoryError):
            # A wrong preset is reported without the import of torch.
            return RunEnded("failed", str(error), type(error).__name__)
        from engine.training.loop.failures import failure_of

        failure = failure_of(error, self._gpu_items())
        # The failure may be that the record cannot be written.
        with contextlib.suppress(RunError):
            self.recorder.emit(LogLine("error", failure.trace))
        return failure.ended()

    def _gpu_items(self) -> tuple[Item, ...]:
        """Returns the GPU memory items of the plan, or of the fit report that came before it."""
        if self._chosen is not None:
            return self._chosen.gpu_items
        return items_of(self.recorder.snapshot.fit, PartName.GPU)

    def _train(self) -> RunEnded:
        finished = self.recorder.snapshot.step
        self.recorder.emit(StateChanged("preparing"))
        config = self.folder.config
        refuse_little_memory(Work.RUN)
        # torch and transformers take seconds to import; a wrong preset should fail before that.
        from engine.training.loop.explain import note_memory
        from engine.training.loop.prepare import prepare, started_event
        from engine.training.loop.session import Session
        from engine.training.loop.trainer import Trainer

        session = Session(config, self.folder, self.recorder, self._launched_group)
        try:
            prepared = prepare(session, self.resume, self._check)
        except RamstreamError:
            if self._before is not None:
                with contextlib.suppress(RunError):  # the refusal is what a person must read
                    self.folder.save_config(self._before)
            raise
        self._chosen = prepared.chosen
        try:
            event: RunStarted = started_event(config, prepared, program_version(), os.getpid())
            self.recorder.emit(event)
            if finished > prepared.step:
                self.recorder.emit(LogLine("warning", lost_steps(prepared.step, finished)))
            self._attach_trackers(config.output.trackers)
            requests = Requests(
                self._next_commands,
                self._count_endings,
                lambda: self._is_urgent,
                lambda: self._is_urgent or self._will_be_urgent,
            )
            ended = Trainer(session, prepared, requests, self.paused).run()
        except BaseException as error:
            note_memory(error, prepared.planned.breakdown.note)
            # While a lane waits for disk space, it cannot be drained.
            self.recorder.wait_for_disk_space(None)
            # Lanes may still be using the planes, so they must end before the planes are freed.
            # After a device error, both calls may fail as well; the first error is the one to
            # report.
            for give_back in (prepared.drain, prepared.close):
                with contextlib.suppress(Exception):
                    give_back()
            raise
        # After a failure, a device that is lost cannot be closed properly.
        is_troubled = ended.state == "failed" or ended.export_failed
        with contextlib.suppress(*([Exception] if is_troubled else [])):
            prepared.close()
        return ended

    def _attach_trackers(self, names: tuple[str, ...]) -> None:
        """Lets the trackers follow the record, from the start of the session to its end."""
        if names:
            self._trackers = Attached(self.folder, self.recorder, names)
            self._owned.callback(self._trackers.close)

    def _next_commands(self) -> list[str | Change]:
        """Returns the requests that were not obeyed yet, for the training loop to obey."""
        with self._polling:
            self._poll()
            found, self._early = self._early, []
            return found

    def _count_endings(self) -> int:
        """Returns how many requests to end the run have arrived so far.

        Any thread may call this; the requests are kept for the training loop.
        """
        with self._polling:
            self._poll()
            return len(self._asked_to_end)

    def _poll(self) -> None:
        """Reads new requests from this process and from others; the caller holds `_polling`."""
        found: list[str | Change] = []
        while not self._requests.empty():
            found.append(self._requests.get())
        found += self._reader.read_new()
        self._early += found
        self._asked_to_end += [command for command in found if command in ENDINGS]

    def _check(self) -> None:
        """Raises _GiveUp if the run is to end; other requests wait for the training loop."""
        found = self._next_commands()
        for command in found:
            if command in ENDINGS:
                self.recorder.emit(ControlReceived(command))
                raise _GiveUp(command)
        with self._polling:
            self._early = found + self._early


def start_run(config: TrainConfig, runs_dir: str | os.PathLike[str]) -> Run:
    """Creates a run folder and returns its run, ready to execute. Its name gets a number
    if another run has it.

    Local sources are saved as absolute paths, so that the run can be resumed from any working
    directory. Raises ConfigError where it would take the CPU unasked (`refuse_unasked_cpu`).
    """
    refuse_unasked_cpu(config, read_machine(runs_dir))
    folder = new_run(runs_dir, config)
    try:
        return Run(folder, resume=False)
    except RunError:
        # A folder without a record is not a run.
        safe_files.try_to_remove_tree(folder.path, folder.root)
        raise


def resume_run(runs_dir: str | os.PathLike[str], run_id: str, overrides: Sequence[str] = ()) -> Run:
    """Returns an earlier run, ready to continue from its newest checkpoint.

    It begins at the start if it never saved a checkpoint or never began to train. `overrides` such
    as ``train.nonfinite=skip`` become part of its settings, unless the run is refused with them.
    Raises RunError for a run that has
    finished, that kept weights alone, or whose settings this version cannot use, and ConfigError
    for a wrong override, and where the run would take the CPU unasked (`refuse_unasked_cpu`).
    """
    folder = open_run(runs_dir, run_id)
    refuse_links(folder)
    try:
        # Nothing is written to a run that this version cannot continue.
        config = folder.config
    except ConfigError as error:
        raise RunError(
            f"The settings of run {run_id} cannot be used by this version of Ramstream ({error}); "
            "use the version that wrote it, or mend its config.yaml."
        ) from None
    summary = summarize(folder)
    if summary is not None and summary.state == "unreadable":
        raise RunError(f"Run {run_id} cannot be resumed: {summary.reason}")
    if summary is not None and summary.state == "finished":
        steps = f"all its {summary.total_steps} steps"
        if summary.step < summary.total_steps:
            steps = f"early, after step {summary.step} of {summary.total_steps}"
        raise RunError(f"Run {run_id} has finished {steps}; start a new run to train further.")
    if saved_steps(folder.checkpoints_path).is_weights_alone:
        raise RunError(
            f"Run {run_id} kept weights alone (output.checkpoint: weights), so it cannot be "
            f"resumed; {train_on_text(run_id)}."
        )
    changed = lasting_config(config.with_overrides(overrides)) if overrides else None
    refuse_unasked_cpu(config if changed is None else changed, read_machine(runs_dir))
    has_record = safe_files.size_of(folder.events_path, folder.root) > 0
    run = Run(folder, has_record, config if overrides else None)
    if changed is not None:
        try:
            folder.save_config(changed)  # the run is ours now
        except RunError:
            run.close()
            raise
    return run
