"""The training loop and its control: steps, evaluations, checkpoints, and obeying stop, discard,
pause, resume, save.

Requests are looked at before each step is submitted; the step under way is always finished and
applied before anything is saved. The loop runs on one thread; `StepFinished` comes from the HOST
lane when a step is applied.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from engine.checkpoints.checkpoint import Contents, write_checkpoint
from engine.checkpoints.export import TrainedModel, write_model
from engine.config.changes import CHANGE, Change
from engine.config.settings import OptimConfig, TrainConfig
from engine.data.rows import batches, one_pass
from engine.errors import DiskFullError, HostMemoryError, NonFiniteError, RunError
from engine.fit.cost import MEASURED_FLOPS_FORMULA
from engine.runs.events import (
    CheckpointWritten,
    ControlReceived,
    EvalFinished,
    ExactMatchMeasured,
    ExportWritten,
    LogLine,
    RunEnded,
    RunStarted,
    SettingsChanged,
    StateChanged,
)
from engine.runs.folder import RunFolder
from engine.runs.recorder import RunRecorder
from engine.runtime.generate import AnswerLimits, end_tokens, longest_row
from engine.train.disk_space import DiskSpaceWatch, wait_in_words
from engine.train.dry_run import LEAST_STEPS, longest_batches
from engine.train.forecast import Forecast
from engine.train.memory_watch import MemoryWatch
from engine.train.observe import Observer
from engine.train.paused_calls import PausedCalls
from engine.train.prepare import Prepared, RecordedProgress
from engine.train.prompts import FixedPrompts
from engine.train.resume import resume_state
from engine.train.schedule import learning_rate
from engine.words import in_seconds

SHOWN_SAMPLES = 8


class Discarded(Exception):
    """Raised inside the loop by a request to stop and discard."""


class Stopped(Exception):
    """Raised inside the loop by a request to stop."""


class Trainer:
    """Drives a prepared run to its end. `next_commands` returns the requests that came in since the
    last call; `paused` are what others ask of the weights while the run is paused.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        recorder: RunRecorder,
        prepared: Prepared,
        next_commands: Callable[[], list[str | Change]],
        paused: PausedCalls,
    ):
        self.config, self.folder, self.recorder, self.p = config, folder, recorder, prepared
        self._next_commands, self._paused = next_commands, paused
        self._step = prepared.step
        """Steps that were submitted; after a drain they are applied."""
        self._saved_step = prepared.step or None
        self._watch = MemoryWatch(prepared.planned.account.ran_low)
        self._forecast = Forecast(
            prepared.planned.predicted,
            prepared.loading_peak,
            prepared.backend.memory if prepared.backend.device.type != "cpu" else None,
        )
        self._observer = Observer(config, recorder, prepared, self._watch, self._forecast)
        recorder.call_after_wait(self._observer.start_clock)  # after a wait for space on the disk
        self._ends = end_tokens(prepared.model.config, prepared.tokenizer, config.model.source)
        o = config.output
        self._prompts = FixedPrompts(
            o.sample_prompts,
            o.sample_tokens,
            config.data,
            prepared.model,
            prepared.tokenizer,
            self._ends,
        )
        self._waiting: list[str] = []
        """Requests that came in between steps and can only be obeyed there."""
        self._asked: list[Change] = []
        """Changes that are made before the next step."""
        self._optim = self._fitting_warm_up()
        if not len(prepared.data.eval) and (
            config.output.eval_every or config.output.exact_match_samples
        ):
            recorder.emit(
                LogLine(
                    "warning",
                    "No row is held out, so nothing is evaluated; raise data.eval_fraction, or set "
                    "output.eval_every and output.exact_match_samples to 0.",
                )
            )

    # ------------------------------------------------------------------ the loop

    def run(self) -> RunEnded:
        """Train to the end, or to a request. Raises what the engine raises; then nothing of that
        step is applied.
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
            self.p.engine.drain()
            shutil.rmtree(self.folder.checkpoints_path, ignore_errors=True)
            return RunEnded(
                "discarded", f"Stopped at step {self._step}; its checkpoints were deleted as asked."
            )
        finally:
            self.recorder.call_after_wait(
                None
            )  # a record outlives its run, and would keep all that was allocated for it
            self._observer.close()

    def _to_the_end(self) -> RunEnded:
        p, o = self.p, self.config.output
        if self._step == 0:
            self._dry_run()
            self._exact_match("before", 0)
            self._answer_prompts(0)
        self._state("running")
        self._observer.start_clock()
        while self._step < p.total_steps:
            self._obey(self._step)
            self._submit(self._step + 1)
            self._step += 1
            is_last = self._step >= p.total_steps
            if o.checkpoint_every and self._step % o.checkpoint_every == 0 and not is_last:
                self._save(self._step)
            if o.eval_every and self._step % o.eval_every == 0 and not is_last:
                self._evaluate(self._step)
        # Saved before anything else: an evaluation that fails or is interrupted costs nothing.
        step = self._step
        self._save(step)
        self._evaluate(step)
        self._exact_match("after", step)
        if o.export:
            self._export(step)
        self._observer.compare(step, "end")
        return RunEnded("finished", f"Finished all {step} steps.")

    def _stop(self) -> RunEnded:
        step = self._step
        self._state("stopping")
        self.p.engine.drain()
        self._make_changes(
            step
        )  # those that were asked for before the stop: a resume goes on with them
        if step == 0:
            return RunEnded("stopped", "Stopped before the first step; nothing was trained.")
        self._save(step, "stopping")
        self._observer.compare(step, "end")
        return RunEnded("stopped", f"Stopped and saved at step {step}; it can be resumed.")

    def _give_way(self, error: HostMemoryError) -> RunEnded:
        """Save and end while there is memory for that, without waiting for anything."""
        step = self._step
        self.recorder.wait_for_disk_space(None)
        self._state(
            "stopping", "Host memory is nearly full, so the run is saved while that is possible."
        )
        self.p.engine.drain()
        self._save(step, "stopping", waits=False)
        self._observer.compare(step, "end")
        kept = f"step {step} is saved" if step else "nothing was trained yet"
        return RunEnded(
            "failed",
            f"{error}; {kept}, so free some memory or choose a smaller batch, and resume.",
            "HostMemoryError",
        )

    def _fitting_warm_up(self) -> OptimConfig:
        """At most half of the steps: with a rate of 0 in the first step, a short run would learn
        nothing.
        """
        t, most = self.config.train, self.p.total_steps // 2
        if t.warmup_steps <= most:
            return t
        self.recorder.emit(
            LogLine(
                "warning",
                f"train.warmup_steps {t.warmup_steps} is more than half of the "
                f"{self.p.total_steps} steps, so {most} are used.",
            )
        )
        return replace(t, warmup_steps=most)

    def _dry_run(self) -> None:
        """A step on the longest rows that changes nothing: what does not fit, or does not run, ends
        the run here.
        """
        p = self.p
        if p.total_steps < LEAST_STEPS:
            return
        progress = RecordedProgress(self.recorder, "dry_run")
        progress(0, 1, "One step on the longest rows")
        began = time.perf_counter()
        p.engine.dry_run(
            longest_batches(
                p.data.train,
                self.config.train.batch_size,
                p.chosen.micro_batch_size,
                self._pad_up_to,
            ),
            self._watch.check,
        )
        seconds = time.perf_counter() - began
        progress(1, 1, "Done")
        compiled = p.chosen.choices.compiled
        self.recorder.emit(
            LogLine(
                "info",
                f"A dry run of one step on the longest rows took {in_seconds(seconds)}"
                f"{', compiling included' if compiled else ''}.",
            )
        )
        self.recorder.emit(self._forecast.event(0, "dry_run", None if compiled else seconds))
        self._observer.tell_compiling("the dry run")

    @property
    def _pad_up_to(self) -> int:
        return self.config.data.max_seq_len if self.p.chosen.choices.compiled else 0

    def _submit(self, step: int) -> None:
        t, began = self.config.train, time.perf_counter()
        micro = batches(
            self.p.data.train,
            t.batch_size,
            self.p.chosen.micro_batch_size,
            step,
            self._pad_up_to,
        )
        self._observer.submitted(step, micro, began)
        self.p.engine.train_step(
            step,
            micro,
            learning_rate(self._optim, step, self.p.total_steps),
            self._observer.on_applied,
            self._watch.check,
        )

    # ------------------------------------------------------------------ requests

    def _obey(self, step: int) -> None:
        waiting, self._waiting = self._waiting, []
        commands = waiting + self._commands()
        self._make_changes(step)
        for place, command in enumerate(commands):
            if command == "save":
                self._save(step)
            elif command == "pause" and "resume" not in commands[place:]:
                self._pause(step)

    def _make_changes(self, step: int) -> None:
        asked, self._asked = self._asked, []
        for change in asked:
            self._change(change, step)

    def _change(self, change: Change, step: int) -> None:
        """From the next step on. What cannot be changed is told in the log, and the run goes on as
        it was.
        """
        try:
            config = change.applied(self.config, step)
            self.folder.save_config(config)
        except RunError as error:
            self.recorder.emit(
                LogLine("warning", f"The change that was asked for was not made: {error}")
            )
            return
        told = change.in_words(self.config, config, self.p.total_steps)
        self.config = config
        if "train.steps" in change.values:
            self.p.change_total_steps(config.train.steps)
        self._optim = self._fitting_warm_up()
        self.recorder.emit(SettingsChanged(step + 1, dict(change.values), self.p.total_steps))
        self.recorder.emit(LogLine("info", f"From step {step + 1:,} on: {told}."))

    def _commands(self) -> list[str]:
        """New requests, recorded. Changes wait until they can be made; stop and discard are obeyed
        by leaving the loop, and so is a lack of memory.
        """
        self._watch.check()
        found = self._next_commands()
        for command in found:
            if isinstance(command, Change):
                self.recorder.emit(ControlReceived(CHANGE, dict(command.values)))
                self._asked.append(command)
                continue
            self.recorder.emit(ControlReceived(command))
            if command == "discard":
                raise Discarded
            if command == "stop":
                raise Stopped
        return [command for command in found if isinstance(command, str)]

    def _pause(self, step: int) -> None:
        self._state("pausing")
        self.p.engine.drain()
        with self._paused.opened():
            self._state("paused", f"Paused after step {step}; the model stays in memory.")
            while True:
                commands = self._commands()
                self._make_changes(step)
                if "save" in commands:
                    self._save(step, "paused")
                if "resume" in commands + self._waiting:
                    break
                self._paused.serve(self.p, 0.1)
        self._state("running")
        self._observer.start_clock()

    # ------------------------------------------------------------------ between steps, with everyth

    def _save(self, step: int, back_to: str = "running", waits: bool = True) -> None:
        """`back_to`: the state before. Without space on the disk it `waits` until there is some, or
        raises DiskFullError.
        """
        p = self.p
        p.engine.drain()
        if step == self._saved_step or step == 0:
            self._observer.start_clock()
            return
        while True:
            self._state("saving")
            try:
                state = resume_state(
                    self.config, p.data.fingerprint, p.chosen.rounding, p.total_steps
                )
                info = write_checkpoint(
                    self.folder.checkpoints_path,
                    step,
                    Contents(p.store, state, p.model.persistent_buffers()),
                    self.config.output.keep_checkpoints,
                    RecordedProgress(self.recorder, "checkpoint"),
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
        """Paused, until the disk has space for the checkpoint of `step` or somebody asks to try
        again. A stop is obeyed by the caller, which needs that checkpoint too; a further one, when
        that waits (`is_stopping`), ends the run without it.
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
                    if (
                        not space.is_new
                    ):  # else it is the same request once more: of two people, or of a second click
                        raise lacks from None
                    continue
                self._waiting += [command for command in commands if command in ("pause", "resume")]
                if "resume" in commands or "save" in commands:
                    return
                self._paused.serve(self.p, 0.1)
        self.recorder.emit(
            LogLine(
                "info",
                f"There is room on the disk again: the run waited {space.seconds:,.0f} s for it.",
            )
        )
        if is_stopping:
            self._make_changes(step)

    def _evaluate(self, step: int) -> None:
        p = self.p
        p.engine.drain()
        if len(p.data.eval) and p.data.eval.loss_tokens:
            began = time.perf_counter()
            loss = p.engine.evaluate(
                self._interruptible(one_pass(p.data.eval, p.chosen.micro_batch_size))
            )
            if not loss == loss or loss in (float("inf"), float("-inf")):
                raise NonFiniteError(
                    f"The evaluation loss after step {step} is not a finite number; start a new "
                    "run with a lower train.learning_rate."
                )
            self.recorder.emit(
                EvalFinished(step, loss, p.data.eval.loss_tokens, time.perf_counter() - began)
            )
        self._answer_prompts(step)
        self._observer.start_clock()

    def _answer_prompts(self, step: int) -> None:
        answered = self._prompts.answer(
            self.p.sampler, step, RecordedProgress(self.recorder, "prompts"), self._look
        )
        if answered is not None:
            self.recorder.emit(answered)

    def _look(self) -> None:
        """For requests, within long work: stop and discard are obeyed at once, the others wait for
        the next step.
        """
        self._waiting += self._commands()

    def _interruptible(self, items: Iterable) -> Iterator:
        for item in items:
            self._look()
            yield item

    def _exact_match(self, moment: str, step: int) -> None:
        prompts = self.p.data.eval_prompts(self.config.output.exact_match_samples)
        if not prompts:
            return
        progress = RecordedProgress(self.recorder, "sample")
        longest = max(prompt.answer_tokens for prompt in prompts)
        written = [0]

        def on_token(_: int, __: int) -> None:
            self._look()
            written[0] += 1
            progress(
                min(written[0], longest * len(prompts)),
                longest * len(prompts),
                f"Answering, {moment} training",
            )

        answers = self.p.sampler.generate(
            [p.prompt_ids for p in prompts],
            AnswerLimits(longest + 4, self._ends, longest_row(self.p.model.config)),
            on_token=on_token,
        )
        texts = [self.p.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]
        correct = sum(text == prompt.expected_text for text, prompt in zip(texts, prompts))
        samples = [
            {"prompt": prompt.prompt_text, "expected": prompt.expected_text, "answer": text}
            for prompt, text in zip(prompts[:SHOWN_SAMPLES], texts)
        ]
        self.recorder.emit(ExactMatchMeasured(step, moment, correct, len(prompts), samples))

    def _export(self, step: int) -> None:
        progress = RecordedProgress(self.recorder, "export")
        progress(0, 1, "Writing the model")
        trained = TrainedModel(
            self.p.model, self.p.store, self.p.tokenizer, self.config.model.source
        )
        size = write_model(trained, self.folder.export_path)
        progress(1, 1, "Written")
        self.recorder.emit(
            ExportWritten(step, str(self.folder.export_path.relative_to(self.folder.path)), size)
        )

    def _state(self, state: str, reason: str = "", lacks_space_for: str = "") -> None:
        self.recorder.emit(StateChanged(state, reason, lacks_space_for))


def started_event(config: TrainConfig, prepared: Prepared, version: str, pid: int) -> RunStarted:
    """The record's description of the run, known once everything is prepared."""
    device = prepared.backend.device
    return RunStarted(
        name=config.name,
        pid=pid,
        device=device.type,
        device_name=prepared.backend.device_name,
        total_steps=prepared.total_steps,
        parameters=prepared.model.parameter_count,
        units=[unit.name for unit in prepared.model.units],
        resumed_step=prepared.step or None,
        program_version=version,
        flops_formula=MEASURED_FLOPS_FORMULA,
        ceiling_tflops=(prepared.planned.ceiling or 0.0) / 1e12,
    )
