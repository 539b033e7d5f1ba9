"""The training loop, and the requests to it.

- Before the first step, a dry run uses the longest rows, and the weights with which the run begins
  are evaluated; so are the reference log-probabilities of pairs
  (`engine.training.loop.reference_logps`).
- Before each step is submitted, the loop obeys the new requests: pause, save, or a change of
  settings. A stop, a discard or a lack of host memory ends the loop at once.
- A step that fails before its updates is skipped or planned with less, where that helps. Else the
  last good step is saved, and the run ends (`engine.training.loop.failures`). An evaluation for
  which the GPU's memory does not last is planned with less and repeated
  (`engine.training.loop.oom_recovery`).
- A stop by Ctrl-C or on the page finishes the step. One that may be followed by force (SIGTERM)
  aborts the step that is being submitted, and saves the one before it, on the CPU even while a
  long op keeps it from being aborted (`engine.training.loop.early_save`). Ranks of several nodes
  finish it.
- A submitted step is executed while the loop submits the next one. The HOST lane records its
  `StepFinished` when it is applied.
- A checkpoint that falls due is written while steps continue (`engine.training.loop.saving`).
- The engine is drained, so that every submitted step is applied, before an evaluation, a pause and
  the last checkpoint.
- After an evaluation, the best weights are kept, and the run ends early if its patience is over
  (`engine.training.loop.early_stopping`).
- At the end, the run is saved first, so that a failed or interrupted evaluation loses nothing.
- If the disk is full when a checkpoint is written, the run is paused until there is space or a
  request ends the wait.
The loop runs on one thread. `engine.training.loop.measurements` records the steps.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from engine.config.changes import CHANGE, Change
from engine.errors import (
    CheckpointError,
    DiskFullError,
    HostMemoryError,
    RamstreamError,
    RunError,
)
from engine.runs.record.before_training import worse_text
from engine.runs.record.events import (
    ControlReceived,
    RunEnded,
    RunState,
    SettingsChanged,
    StateChanged,
)
from engine.runtime.distributed.rank_samples import fullest_gpu
from engine.training.loop.disk_space import DiskSpaceWatch, wait_text
from engine.training.loop.early_save import EarlySave
from engine.training.loop.early_stopping import EarlyStopping
from engine.training.loop.measurements import Measurements
from engine.training.loop.memory_watch import MemoryWatch
from engine.training.loop.oom_recovery import OomRecovery
from engine.training.loop.paused_calls import PausedCalls
from engine.training.loop.prediction_check import PredictionCheck
from engine.training.loop.prepare import Prepared
from engine.training.loop.reference_logps import compute_reference_logps
from engine.training.loop.requests import Requests
from engine.training.loop.saving import Saver
from engine.training.loop.session import Session
from engine.training.loop.step_loop import StepAborted, Steps

_PAUSE_POLL_SECONDS = 0.1
"""Seconds between two checks for requests in a paused run."""


class Discarded(Exception):
    """Raised in the training loop for a request to discard the run."""


class Stopped(Exception):
    """Raised in the training loop for a request to stop the run."""


class Trainer:
    """Executes a prepared run to its end.

    `paused` lets other threads use the weights while the run is paused.
    """

    def __init__(
        self,
        session: Session,
        prepared: Prepared,
        requests: Requests,
        paused: PausedCalls,
    ):
        recorder = session.recorder
        self.config = session.config
        """Current settings; a change during the run replaces them."""
        self.folder = session.folder
        self.recorder = recorder
        self.prepared = prepared
        self._session = session
        self._requests = requests
        self._paused = paused
        breakdown = prepared.planned.breakdown
        self._watch = MemoryWatch(breakdown.ran_low, breakdown.of_ranks)
        self._prediction_check = PredictionCheck(
            prepared.planned.predicted,
            prepared.loading_peak,
            fullest_gpu(prepared.backend, prepared.workers),
            breakdown.of_ranks,
        )
        self._saver = Saver(session, prepared, self._prediction_check, self._asks_to_end)
        self._measurements = Measurements(session, prepared, self._watch, self._prediction_check)
        # A wait for disk space does not count as part of a step's time.
        recorder.call_after_wait(self._measurements.start_clock)
        self._early_save = EarlySave(requests.will_be_urgent, self._begin_early)
        oom_recovery = OomRecovery(session, prepared, self._saver.take_rounding)
        self._oom_recovery = oom_recovery
        self._early_stopping = EarlyStopping(
            session, prepared, oom_recovery, self._measurements, lambda: self._watch.is_low
        )
        self._waiting: list[str] = []
        """Requests that arrived during long work and are obeyed before the next step."""
        self._asked: list[Change] = []
        """Changes that are made before the next step."""
        self._steps = Steps(session, prepared, self._measurements, self._check_step, oom_recovery)
        self._has_given_up = False

    # ------------------------------------------------------------------ the loop

    def run(self) -> RunEnded:
        """Runs the training loop to its end, or to a request.

        Exceptions from the engine are raised unchanged; no part of the failed step is applied then.
        """
        with self._watch, self._early_save if self._computes_here else contextlib.nullcontext():
            return self._run()

    @property
    def _computes_here(self) -> bool:
        """Whether the thread of this loop computes every op of a step itself. Elsewhere it submits
        them, and can abort a step at any time.
        """
        return self.prepared.backend.device.type == "cpu" and self.prepared.workers is None

    def _run(self) -> RunEnded:
        try:
            try:
                return self._to_the_end()
            except StepAborted:
                self._steps.abort()
                with contextlib.suppress(Stopped):
                    self._new_requests()
                return self._stop()
            except Stopped:
                return self._stop()
        except (RunError, CheckpointError):
            raise  # the record or a checkpoint cannot be written, so nothing more can be saved
        except Discarded:
            self._saver.cancel()
            self._early_stopping.best.cancel()
            with contextlib.suppress(Exception):  # a step that failed no longer counts either
                self.prepared.drain()
            self.folder.delete_weights()
            return RunEnded(
                "discarded",
                f"Stopped at step {self._steps.done}; its checkpoints were deleted as asked.",
            )
        except Exception as error:  # noqa: BLE001  the last good step is saved whatever the cause
            return self._failed(error)
        finally:
            self._saver.close()
            self._early_stopping.best.close()
            # The record outlives its run, and a listener would keep everything that was allocated
            # alive.
            self.recorder.call_after_wait(None)
            self._measurements.close()

    def _to_the_end(self) -> RunEnded:
        output = self.config.output
        if self._steps.done == 0:
            self._steps.dry_run(self._prediction_check, self._poll)
        compute_reference_logps(self._session, self.prepared, self._oom_recovery, self._poll)
        if self._steps.done == 0:
            self._early_stopping.before_first_step(self._poll)
        # A session may have been killed after this evaluation, before its weights were kept.
        self._early_stopping.best.take(self._steps.done)
        self._state("running")
        self._measurements.start_clock()
        attended = self._steps.done
        while not self._is_at_end:
            self._attend_to_checkpoint(self._steps.done)
            self._obey(self._steps.done)
            if self._is_at_end:  # a change has lowered the number of steps
                break
            with self._early_save.lends(self._steps.done):
                self._steps.advance()
            step = self._steps.done
            # What falls due after a step does so once, also where the step was skipped.
            if step <= attended or step >= self.prepared.total_steps:
                continue
            attended = step
            if output.checkpoint_every and step % output.checkpoint_every == 0:
                self._save_async(step)
            if output.eval_every and step % output.eval_every == 0:
                self._evaluate(step)
        # The run is saved before an evaluation can fail or be interrupted.
        step = self._steps.done
        self._steps.finish_submitted()
        self._attend_to_checkpoint(step, to_its_end=True)
        self._save(step)
        self._evaluate(step, is_last=True)
        self._early_stopping.at_the_end(step, self.config, self._poll)
        unkept = self._keep_unexported(step)
        self._measurements.compare(step, "end")
        kept, unexported = self._saver.kept, self._early_stopping.unexported
        if unexported is not None and not unkept and kept.kind == "none":
            kept = replace(kept, kind="weights")
        ended = kept.when_finished(step)
        if step < self.prepared.total_steps:
            why = self._early_stopping.ended_early(step, self.prepared.total_steps)
            ended = kept.when_ended_early(why)
        if unexported is None:
            return RunEnded("finished", self._with_what_it_reached(ended))
        failed = unexported.failed
        text = kept.when_unexported(ended, unexported.step, failed.sentence, unkept)
        return RunEnded(
            "finished", self._with_what_it_reached(text), failed.error_type, failed.sentence
        )

    def _keep_unexported(self, step: int) -> str:
        """Makes sure that a model whose export failed can be exported again: a run that writes no
        checkpoints has it in memory alone. Where the disk lacks space, the run is paused until
        there is some, and exports again. Returns why the weights could not be kept, or "".
        """
        while (unexported := self._early_stopping.unexported) is not None:
            try:
                self._saver.keep_weights(unexported.step, self.config)
            except DiskFullError as lacks:
                self._wait_for_disk_space(lacks, step, is_stopping=False)
                self._state("running")
                self._early_stopping.export(self.config)
            except CheckpointError as error:
                return str(error)
            else:
                break
        return ""

    @property
    def _is_at_end(self) -> bool:
        """Whether no step follows."""
        is_done = self._steps.done >= self.prepared.total_steps
        return is_done or self._early_stopping.is_spent(self.config)

    def _stop(self) -> RunEnded:
        step = self._steps.done
        self._state("stopping", self._saver.while_stopping)
        self._saver.cancel(but_of=step)  # the last step is saved instead
        self._steps.finish_submitted()
        # A resume uses the changes that were requested before the stop.
        self._make_changes(step)
        if step == 0:
            return RunEnded("stopped", "Stopped before the first step; nothing was trained.")
        self._report_unwritten(step)
        self._save(step, "stopping")
        self._early_stopping.best.finish(self._poll_while_saving)
        self._measurements.compare(step, "end")
        ended = self._saver.kept.when_stopped(step)
        return RunEnded("stopped", self._with_what_it_reached(ended))

    def _report_unwritten(self, step: int) -> None:
        """Logs what is about to be written of `step`, and about how long that takes: who stops a
        run may end its process by force soon.
        """
        text = self._saver.saving_text(step, self.config)
        if text:
            self._session.log("info", text)

    def _with_what_it_reached(self, ended: str) -> str:
        """Returns how the run ended, with a warning if it made the model worse."""
        return f"{ended} {worse_text(self.recorder.snapshot)}".rstrip()

    # ------------------------------------------------------------------ failures

    def _failed(self, error: Exception) -> RunEnded:
        """Saves the last good step, if the planes are whole, without waiting for anything; returns
        how the run ended.
        """
        self.recorder.wait_for_disk_space(None)
        if isinstance(error, HostMemoryError):
            # An update may be waiting for the disk, and memory is needed now.
            self._saver.cancel()
            self._early_stopping.best.cancel()
        failure = self._steps.failure(error)
        if failure.trace:
            self._session.log("error", failure.trace)
        held = self.prepared.host_states.held
        self._saver.finish_or_cancel(held.step, not held.is_mixed)
        problem = ""
        if not held.is_mixed and not self._saver.has(held.step):
            self._state("stopping", "The run failed; its last good step is being saved.")
            try:
                self._write(held.step, "stopping", waits=False)
            except RamstreamError as unsaved:
                problem = str(unsaved)
        with contextlib.suppress(Exception):  # a lost device does not report its memory
            self._measurements.compare(held.step, "end")
        return failure.ended(self._saver.kept.after_failure(held, problem))

    # ------------------------------------------------------------------ requests

    def _obey(self, step: int) -> None:
        """Obeys the new requests, before the next step is submitted."""
        waiting, self._waiting = self._waiting, []
        commands = waiting + self._commands()
        self._make_changes(step)
        if "stop" in commands:
            raise Stopped
        for place, command in enumerate(commands):
            if command == "save":
                self._save_async(step)
            # A pause that was followed by a resume is ignored.
            elif command == "pause" and "resume" not in commands[place:]:
                self._pause(step)

    def _make_changes(self, step: int) -> None:
        asked, self._asked = self._asked, []
        for change in asked:
            self._change(change, step)

    def _change(self, change: Change, step: int) -> None:
        """Makes a change that takes effect with the next step.

        If the change cannot be made, that is logged, and the run continues unchanged.
        """
        try:
            config = change.applied(self.config, step)
            self.folder.save_config(config)
        except RunError as error:
            self._session.log("warning", f"The change that was asked for was not made: {error}")
            return
        text = change.as_text(self.config, config, self.prepared.total_steps)
        self.config = config
        if "train.steps" in change.values and config.train.steps is not None:
            self.prepared.change_total_steps(config.train.steps)
        self._steps.change(config)
        self.recorder.emit(
            SettingsChanged(step + 1, dict(change.values), self.prepared.total_steps)
        )
        self._session.log("info", f"From step {step + 1:,} on: {text}.")

    def _commands(self) -> list[str]:
        """Returns the new requests that the caller must obey. A lack of memory ends the loop with
        an exception, and so does a folder that is gone.
        """
        self.recorder.check()
        self._watch.check()
        return self._new_requests()

    def _new_requests(self) -> list[str]:
        """Records the new requests and returns those that the caller must obey.

        Changes wait until they can be made. Stop and discard end the loop with an exception.
        """
        found: list[str] = []
        for command in self._requests.take():
            if isinstance(command, Change):
                self.recorder.emit(ControlReceived(CHANGE, dict(command.values)))
                self._asked.append(command)
                continue
            self.recorder.emit(ControlReceived(command))
            if command == "discard":
                raise Discarded
            if command == "stop":
                raise Stopped
            if command == "save" and self.config.output.checkpoint == "none":
                self._session.log("warning", "Nothing was saved, as output.checkpoint is none.")
                continue
            found.append(command)
        return found

    def _pause(self, step: int) -> None:
        self._state("pausing")
        self._steps.finish_submitted()
        with self._paused.opened():
            self._state("paused", f"Paused after step {step}; the model stays in memory.")
            while True:
                commands = self._commands()
                self._make_changes(step)
                if "save" in commands:
                    self._save(step, "paused")
                if "resume" in commands + self._waiting:
                    break
                self._paused.serve(self.prepared, _PAUSE_POLL_SECONDS)
        self._state("running")
        self._measurements.start_clock()

    # ------------------------------------------------------------------ between steps

    def _save(self, step: int, back_to: RunState = "running", waits: bool = True) -> None:
        """Writes a checkpoint, unless this step has one, then sets the state to `back_to`.

        If the disk has no space, this method waits until there is some or, if `waits` is False,
        raises DiskFullError.
        """
        self._steps.finish_submitted()
        with contextlib.suppress(DiskFullError):  # the last step is saved in its place
            self._saver.finish(self._poll_while_saving)
        self._write(step, back_to, waits)

    def _write(self, step: int, back_to: RunState, waits: bool) -> None:
        """Writes a checkpoint as `_save` does; the planes must hold `step`."""
        while not self._saver.has(step):
            self._state("saving")
            try:
                self._saver.save(step, self.config, self._poll_while_saving if waits else None)
                self._state(back_to)
            except DiskFullError as lacks:
                if not waits:
                    raise
                self._wait_for_disk_space(lacks, step, back_to == "stopping")
        self._measurements.start_clock()

    def _save_async(self, step: int) -> None:
        """Begins a checkpoint of `step`, which was submitted last, while steps continue."""
        if not self._saver.begin(step, self.config):
            self._save(step)

    def _attend_to_checkpoint(self, step: int, to_its_end: bool = False) -> None:
        """Attends to the checkpoint that is written while steps continue, or waits for its end.

        If the disk had no space for it, training stands still until the last step is saved.
        """
        self._early_stopping.best.poll()
        try:
            if to_its_end:
                self._saver.finish(self._poll)
            else:
                self._saver.poll(step, self.config)
        except DiskFullError as lacks:
            then = f"Training stands still until step {step:,} is saved."
            self._session.log("warning", f"{lacks} {then}")
            self._save(step)

    def _wait_for_disk_space(self, lacks: DiskFullError, step: int, is_stopping: bool) -> None:
        """Pauses until the disk has space for the checkpoint of `step`, or a person asks to try
        again.

        A stop is obeyed by the caller, which then needs this checkpoint as well. If the wait is
        part of such a stop (`is_stopping`), another stop ends the run without the checkpoint.
        """
        # It takes calls before others read that it is paused.
        with contextlib.nullcontext() if self._paused.is_open else self._paused.opened():
            self._state(
                "paused",
                wait_text(lacks, step, is_stopping),
                "stop" if is_stopping else "checkpoint",
            )
            space = DiskSpaceWatch(lacks)
            while not space.found():
                try:
                    commands = self._commands()
                except Stopped:
                    if not is_stopping:
                        raise
                    # A second stop that arrives immediately repeats the same request, from a second
                    # person or a second click.
                    if not space.is_new:
                        raise lacks from None
                    continue
                self._waiting += [command for command in commands if command in ("pause", "resume")]
                if "resume" in commands or "save" in commands:
                    return
                self._paused.serve(self.prepared, _PAUSE_POLL_SECONDS)
        self._session.log(
            "info",
            f"There is room on the disk again: the run waited {space.seconds:,.0f} s for it.",
        )
        if is_stopping:
            self._make_changes(step)

    def _evaluate(self, step: int, is_last: bool = False) -> None:
        """Evaluates the weights after `step`, once every submitted step is applied."""
        self._steps.finish_submitted()
        with self._early_save.lends(step):
            self._early_stopping.evaluate(step, self._poll, is_last)
        self._measurements.start_clock()

    def _poll(self) -> None:
        """Obeys stop and discard during long work; other requests wait for the next step."""
        self._waiting += self._commands()
        if "stop" in self._waiting:
            raise Stopped

    def _poll_while_saving(self) -> None:
        """Obeys a discard. Other requests wait, and so does a lack of memory: they need the
        checkpoint, too.
        """
        try:
            self._waiting += self._new_requests()
        except Stopped:
            self._waiting.append("stop")

    def _check_step(self) -> None:
        """Aborts a step before its updates: where memory is low, and where a request to stop is
        urgent.
        """
        self._watch.check()
        if self._requests.is_urgent() and not self._has_given_up:
            self._has_given_up = True  # a step before it that has to be repeated is not given up
            raise StepAborted

    def _begin_early(self, step: int) -> bool:
        return self._saver.begin_early(step, self.config)

    def _asks_to_end(self) -> bool:
        """Returns whether the run is asked to end, or memory is low. Any thread may call it."""
        return self._watch.is_low or self._requests.count_endings() > 0

    def _state(self, state: RunState, reason: str = "", lacks_space_for: str = "") -> None:
        self.recorder.emit(StateChanged(state, reason, lacks_space_for))
