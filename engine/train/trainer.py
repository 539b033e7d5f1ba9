"""A `Trainer` runs the training loop and obeys the requests to it.

- Before the first step, a dry run uses the longest rows, and the held-out and the fixed prompts are
  answered.
- Before each step is submitted, the loop obeys the new requests: pause, save, or a change of
  settings. A stop, a discard or a lack of host memory ends the loop at once.
- A submitted step is executed while the loop submits the next one. The HOST lane records its
  `StepFinished` when it is applied.
- The engine is drained, so that every submitted step is applied, before anything is saved or
  evaluated and before a pause.
- At the end, the run is saved first, so that a failed or interrupted evaluation loses nothing.
- If the disk is full when a checkpoint is written, the run is paused until there is space or a
  request ends the wait.

The loop runs on one thread. `engine.train.evaluation` evaluates, and `engine.train.observe` records
the steps.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable

from engine.checkpoints.checkpoint import Contents, write_checkpoint
from engine.checkpoints.export import TrainedModel, write_model
from engine.config.changes import CHANGE, Change
from engine.config.settings import OptimConfig
from engine.data.rows import batches
from engine.errors import DiskFullError, HostMemoryError, RunError
from engine.runs.events import (
    CheckpointWritten,
    ControlReceived,
    ExportWritten,
    RunEnded,
    RunState,
    SettingsChanged,
    StateChanged,
)
from engine.train.disk_space import DiskSpaceWatch, wait_in_words
from engine.train.dry_run import LEAST_STEPS, longest_batches
from engine.train.evaluation import Evaluator
from engine.train.forecast import Forecast
from engine.train.memory_watch import MemoryWatch
from engine.train.observe import Observer
from engine.train.paused_calls import PausedCalls
from engine.train.prepare import Prepared
from engine.train.resume import resume_state
from engine.train.schedule import fitting_warm_up, learning_rate
from engine.train.session import Session
from engine.words import in_seconds

_PAUSE_LOOK_SECONDS = 0.1
"""A paused run checks for requests each time this many seconds have passed."""


class Discarded(Exception):
    """A request to discard the run leaves the training loop as this exception."""


class Stopped(Exception):
    """A request to stop the run leaves the training loop as this exception."""


class Trainer:
    """A `Trainer` executes a prepared run to its end.

    `next_commands` returns the requests that arrived since its last call. `paused` lets other
    threads use the weights while the run is paused.
    """

    def __init__(
        self,
        session: Session,
        prepared: Prepared,
        next_commands: Callable[[], list[str | Change]],
        paused: PausedCalls,
    ):
        recorder = session.recorder
        self.config = session.config
        """These are the current settings; a change during the run replaces them."""
        self.folder = session.folder
        self.recorder = recorder
        self.prepared = prepared
        self._session = session
        self._next_commands = next_commands
        self._paused = paused
        self._step = prepared.step
        """This many steps have been submitted; after a drain, all of them are applied."""
        self._saved_step = prepared.step or None
        self._watch = MemoryWatch(prepared.planned.account.ran_low)
        self._forecast = Forecast(
            prepared.planned.predicted,
            prepared.loading_peak,
            prepared.backend.memory if prepared.backend.device.type != "cpu" else None,
        )
        self._observer = Observer(session, prepared, self._watch, self._forecast)
        # A wait for disk space does not count as part of a step's time.
        recorder.call_after_wait(self._observer.start_clock)
        self._evaluator = Evaluator(session, prepared)
        self._waiting: list[str] = []
        """These requests arrived during long work and are obeyed before the next step."""
        self._asked: list[Change] = []
        """These changes are made before the next step."""
        self._optim = self._fitting_warm_up()
        output = session.config.output
        is_evaluated = output.eval_every or output.exact_match_samples
        if is_evaluated and not len(prepared.data.eval):
            session.log(
                "warning",
                "No row is held out, so nothing is evaluated; raise data.eval_fraction, or set "
                "output.eval_every and output.exact_match_samples to 0.",
            )

    # ------------------------------------------------------------------ the loop

    def run(self) -> RunEnded:
        """Runs the training loop to its end, or to a request.

        Exceptions from the engine are raised unchanged; no part of the failed step is applied then.
        """
        with self._watch:
            return self._run()

    def _run(self) -> RunEnded:
        try:
            try:
                return self._to_the_end()
            except Stopped:
                return self._stop()
        except HostMemoryError as error:
            return self._give_way(error)
        except Discarded:
            self.prepared.engine.drain()
            shutil.rmtree(self.folder.checkpoints_path, ignore_errors=True)
            return RunEnded(
                "discarded", f"Stopped at step {self._step}; its checkpoints were deleted as asked."
            )
        finally:
            # The record outlives its run, and a listener would keep everything that was allocated
            # alive.
            self.recorder.call_after_wait(None)
            self._observer.close()

    def _to_the_end(self) -> RunEnded:
        output = self.config.output
        if self._step == 0:
            self._dry_run()
            self._evaluator.measure_exact_match("before", 0, self._look)
            self._evaluator.answer_prompts(0, self._look)
        self._state("running")
        self._observer.start_clock()
        while self._step < self.prepared.total_steps:
            self._obey(self._step)
            self._submit(self._step + 1)
            self._step += 1
            if self._step >= self.prepared.total_steps:
                break
            if output.checkpoint_every and self._step % output.checkpoint_every == 0:
                self._save(self._step)
            if output.eval_every and self._step % output.eval_every == 0:
                self._evaluate(self._step)
        # The run is saved before an evaluation can fail or be interrupted.
        step = self._step
        self._save(step)
        self._evaluate(step)
        self._evaluator.measure_exact_match("after", step, self._look)
        if output.export:
            self._export(step)
        self._observer.compare(step, "end")
        return RunEnded("finished", f"Finished all {step} steps.")

    def _stop(self) -> RunEnded:
        step = self._step
        self._state("stopping")
        self.prepared.engine.drain()
        # A resume uses the changes that were requested before the stop.
        self._make_changes(step)
        if step == 0:
            return RunEnded("stopped", "Stopped before the first step; nothing was trained.")
        self._save(step, "stopping")
        self._observer.compare(step, "end")
        return RunEnded("stopped", f"Stopped and saved at step {step}; it can be resumed.")

    def _give_way(self, error: HostMemoryError) -> RunEnded:
        """Saves and ends the run while there is memory for that, without waiting for anything."""
        step = self._step
        self.recorder.wait_for_disk_space(None)
        self._state(
            "stopping", "Host memory is nearly full, so the run is saved while that is possible."
        )
        self.prepared.engine.drain()
        self._save(step, "stopping", waits=False)
        self._observer.compare(step, "end")
        kept = f"step {step} is saved" if step else "nothing was trained yet"
        return RunEnded(
            "failed",
            f"{error}; {kept}, so free some memory or choose a smaller batch, and resume.",
            "HostMemoryError",
        )

    def _fitting_warm_up(self) -> OptimConfig:
        """Returns the optimizer's settings; the log says if the warm-up had to be shortened."""
        fitting, warning = fitting_warm_up(self.config.train, self.prepared.total_steps)
        if warning:
            self._session.log("warning", warning)
        return fitting

    def _dry_run(self) -> None:
        """Runs a step on the longest rows without changing the weights.

        A run that does not fit or cannot be computed fails here.
        """
        prepared = self.prepared
        if prepared.total_steps < LEAST_STEPS:
            return
        progress = self._session.progress("dry_run")
        progress(0, 1, "One step on the longest rows")
        began = time.perf_counter()
        micro_batches = longest_batches(
            prepared.data.train,
            self.config.train.batch_size,
            prepared.chosen.micro_batch_size,
            self._pad_up_to,
        )
        prepared.engine.dry_run(micro_batches, self._watch.check)
        seconds = time.perf_counter() - began
        progress(1, 1, "Done")
        compiled = prepared.chosen.choices.compiled
        took = f"A dry run of one step on the longest rows took {in_seconds(seconds)}"
        self._session.log("info", f"{took}, compiling included." if compiled else f"{took}.")
        # A time that includes compiling does not predict the time of a step.
        self.recorder.emit(self._forecast.event(0, "dry_run", None if compiled else seconds))
        self._observer.tell_compiling("the dry run")

    @property
    def _pad_up_to(self) -> int:
        """Returns the length that rows may be padded to, since a block is compiled for few
        lengths.
        """
        return self.config.data.max_seq_len if self.prepared.chosen.choices.compiled else 0

    def _submit(self, step: int) -> None:
        """Assembles the rows of a step and submits the step to the engine."""
        train, began = self.config.train, time.perf_counter()
        micro_batches = batches(
            self.prepared.data.train,
            train.batch_size,
            self.prepared.chosen.micro_batch_size,
            step,
            self._pad_up_to,
        )
        self._observer.submitted(step, micro_batches, began)
        self.prepared.engine.train_step(
            step,
            micro_batches,
            learning_rate(self._optim, step, self.prepared.total_steps),
            self._observer.on_applied,
            self._watch.check,
        )

    # ------------------------------------------------------------------ requests

    def _obey(self, step: int) -> None:
        """Obeys the new requests, before the next step is submitted."""
        waiting, self._waiting = self._waiting, []
        commands = waiting + self._commands()
        self._make_changes(step)
        for place, command in enumerate(commands):
            if command == "save":
                self._save(step)
            # A pause that was followed by a resume is ignored.
            elif command == "pause" and "resume" not in commands[place:]:
                self._pause(step)

    def _make_changes(self, step: int) -> None:
        asked, self._asked = self._asked, []
        for change in asked:
            self._change(change, step)

    def _change(self, change: Change, step: int) -> None:
        """Makes a change that takes effect with the next step.

        If the change cannot be made, the log says so, and the run continues unchanged.
        """
        try:
            config = change.applied(self.config, step)
            self.folder.save_config(config)
        except RunError as error:
            self._session.log("warning", f"The change that was asked for was not made: {error}")
            return
        told = change.in_words(self.config, config, self.prepared.total_steps)
        self.config = config
        if "train.steps" in change.values and config.train.steps is not None:
            self.prepared.change_total_steps(config.train.steps)
        self._optim = self._fitting_warm_up()
        self.recorder.emit(
            SettingsChanged(step + 1, dict(change.values), self.prepared.total_steps)
        )
        self._session.log("info", f"From step {step + 1:,} on: {told}.")

    def _commands(self) -> list[str]:
        """Records the new requests and returns those that the caller must obey.

        Changes wait until they can be made. Stop, discard and a lack of memory end the loop with an
        exception.
        """
        self._watch.check()
        found: list[str] = []
        for command in self._next_commands():
            if isinstance(command, Change):
                self.recorder.emit(ControlReceived(CHANGE, dict(command.values)))
                self._asked.append(command)
                continue
            self.recorder.emit(ControlReceived(command))
            if command == "discard":
                raise Discarded
            if command == "stop":
                raise Stopped
            found.append(command)
        return found

    def _pause(self, step: int) -> None:
        self._state("pausing")
        self.prepared.engine.drain()
        with self._paused.opened():
            self._state("paused", f"Paused after step {step}; the model stays in memory.")
            while True:
                commands = self._commands()
                self._make_changes(step)
                if "save" in commands:
                    self._save(step, "paused")
                if "resume" in commands + self._waiting:
                    break
                self._paused.serve(self.prepared, _PAUSE_LOOK_SECONDS)
        self._state("running")
        self._observer.start_clock()

    # ------------------------------------------------------------------ between steps

    def _save(self, step: int, back_to: RunState = "running", waits: bool = True) -> None:
        """Writes a checkpoint, unless this step has one, then sets the state to `back_to`.

        If the disk has no space, this method waits until there is some or, if `waits` is False,
        raises DiskFullError.
        """
        prepared = self.prepared
        prepared.engine.drain()
        if step == self._saved_step or step == 0:
            self._observer.start_clock()
            return
        while True:
            self._state("saving")
            try:
                state = resume_state(
                    self.config,
                    prepared.data.fingerprint,
                    prepared.chosen.rounding,
                    prepared.total_steps,
                )
                info = write_checkpoint(
                    self.folder.checkpoints_path,
                    step,
                    Contents(prepared.store, state, prepared.model.persistent_buffers()),
                    self.config.output.keep_checkpoints,
                    self._session.progress("checkpoint"),
                )
                break
            except DiskFullError as lacks:
                if not waits:
                    raise
                self._wait_for_disk_space(lacks, step, back_to == "stopping")
        self._saved_step = step
        self._forecast.checkpoint(info.bytes)
        self.recorder.emit(
            CheckpointWritten(
                step, str(info.path.relative_to(self.folder.path)), info.bytes, info.seconds
            )
        )
        self._state(back_to)
        self._observer.start_clock()

    def _wait_for_disk_space(self, lacks: DiskFullError, step: int, is_stopping: bool) -> None:
        """Pauses until the disk has space for the checkpoint of `step`, or a person asks to try
        again.

        A stop is obeyed by the caller, which then needs this checkpoint as well. If the wait is
        part of such a stop (`is_stopping`), another stop ends the run without the checkpoint.
        """
        self._state(
            "paused",
            wait_in_words(lacks, step, is_stopping),
            "stop" if is_stopping else "checkpoint",
        )
        space = DiskSpaceWatch(lacks)
        with contextlib.nullcontext() if self._paused.is_open else self._paused.opened():
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
                self._paused.serve(self.prepared, _PAUSE_LOOK_SECONDS)
        self._session.log(
            "info",
            f"There is room on the disk again: the run waited {space.seconds:,.0f} s for it.",
        )
        if is_stopping:
            self._make_changes(step)

    def _evaluate(self, step: int) -> None:
        """Evaluates the weights after `step`, once every submitted step is applied."""
        self.prepared.engine.drain()
        self._evaluator.measure_loss(step, self._look)
        self._evaluator.answer_prompts(step, self._look)
        self._observer.start_clock()

    def _look(self) -> None:
        """Obeys stop and discard during long work; other requests wait for the next step."""
        self._waiting += self._commands()

    def _export(self, step: int) -> None:
        progress = self._session.progress("export")
        progress(0, 1, "Writing the model")
        prepared = self.prepared
        trained = TrainedModel(
            prepared.model, prepared.store, prepared.tokenizer, self.config.model.source
        )
        size = write_model(trained, self.folder.export_path)
        progress(1, 1, "Written")
        self.recorder.emit(
            ExportWritten(step, str(self.folder.export_path.relative_to(self.folder.path)), size)
        )

    def _state(self, state: RunState, reason: str = "", lacks_space_for: str = "") -> None:
        self.recorder.emit(StateChanged(state, reason, lacks_space_for))
