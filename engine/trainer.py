"""The training loop and its control: steps, evaluations, checkpoints, and obeying stop, discard, pause, resume, save.

Requests are looked at before each step is submitted; the step under way is always finished and home before anything is
saved. The loop runs on one thread; `StepFinished` comes from the HOST lane when a step is home.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from engine.checkpoint import write_checkpoint
from engine.check import in_seconds
from engine.config import OptimConfig, TrainConfig
from engine.data import batches, one_pass
from engine.dry_run import LEAST_STEPS, longest_batches
from engine.engine import Home
from engine.errors import HostMemoryError, NonFiniteError
from engine.events import (CheckpointWritten, ControlReceived, EvalFinished, ExactMatchMeasured, ExportWritten, LogLine,
                           MemorySampled, RunEnded, RunStarted, StateChanged, StepFinished, StepTimeline)
from engine.export import write_model
from engine.forecast import Forecast
from engine.generate import end_tokens, generate, longest_row
from engine.machine import GpuSampler
from engine.prepare import Prepared, Progress
from engine.recorder import RunRecorder
from engine.resumed import resume_state
from engine.runs import RunFolder
from engine.schedule import learning_rate
from engine.timeline import as_records, exposed_seconds
from engine.watch import LOOK_SECONDS, MemoryWatch

FLOPS_FORMULA = "6 x parameters that a token passes through x tokens (padding and recompute not counted) / seconds"
TIMELINES_KEPT = 500
SHOWN_SAMPLES = 8


class Discarded(Exception):
    """Raised inside the loop by a request to stop and discard."""


class Stopped(Exception):
    """Raised inside the loop by a request to stop."""


@dataclass
class _Counts:
    tokens: int
    loss_tokens: int


class Trainer:
    """Drives a prepared run to its end. `next_commands` returns the requests that came in since the last call."""

    def __init__(self, config: TrainConfig, folder: RunFolder, recorder: RunRecorder, prepared: Prepared,
                 next_commands: Callable[[], list[str]]):
        self.config, self.folder, self.recorder, self.p = config, folder, recorder, prepared
        self._next_commands = next_commands
        self._counts: dict[int, _Counts] = {}
        self._spans: list | None = None
        self._mark = 0.0
        self._memory_at = 0.0
        self._saved_step = prepared.step if prepared.step else None
        self._compiling_told = False
        self._timelines = len(recorder.snapshot.timeline_steps)
        self._gpu = GpuSampler() if prepared.backend.device.type != "cpu" else None
        self._watch = MemoryWatch(prepared.planned.account.ran_low)
        self._forecast = Forecast(prepared.planned.predicted, prepared.loading_peak,
                                  prepared.backend.memory if self._gpu is not None else None)
        self._ends = end_tokens(prepared.model.config, prepared.tokenizer, config.model.source)
        self._waiting: list[str] = []
        """Requests that came in between steps and can only be obeyed there."""
        self._optim = self._fitting_warm_up()
        if not len(prepared.data.eval) and (config.output.eval_every or config.output.exact_match_samples):
            recorder.emit(LogLine("warning", "No row is held out, so nothing is evaluated; raise data.eval_fraction, or set "
                                             "output.eval_every and output.exact_match_samples to 0."))

    # ------------------------------------------------------------------ the loop

    def run(self) -> RunEnded:
        """Train to the end, or to a request. Raises what the engine raises; then nothing of that step is applied."""
        with self._watch:
            return self._run()

    def _run(self) -> RunEnded:
        p, o = self.p, self.config.output
        step = p.step
        try:
            if step == 0:
                self._dry_run()
                self._exact_match("before", 0)
            self._state("running")
            self._start_clock()
            while step < p.total_steps:
                self._obey(step)
                self._submit(step + 1)
                step += 1
                if o.checkpoint_every and step % o.checkpoint_every == 0 and step < p.total_steps:
                    self._save(step)
                if o.eval_every and step % o.eval_every == 0 and step < p.total_steps:
                    self._evaluate(step)
            # Saved before anything else: an evaluation that fails or is interrupted costs nothing.
            self._save(step)
            self._evaluate(step)
            self._exact_match("after", step)
            if o.export:
                self._export(step)
            self._compare(step, "end")
            return RunEnded("finished", f"Finished all {step} steps.")
        except Stopped:
            self._state("stopping")
            p.engine.drain()
            if step == 0:
                return RunEnded("stopped", "Stopped before the first step; nothing was trained.")
            self._save(step)
            self._compare(step, "end")
            return RunEnded("stopped", f"Stopped and saved at step {step}; it can be resumed.")
        except HostMemoryError as error:
            self._state("stopping", "Host memory is nearly full, so the run is saved while that is possible.")
            p.engine.drain()
            self._save(step)
            self._compare(step, "end")
            kept = f"step {step} is saved" if step else "nothing was trained yet"
            return RunEnded("failed", f"{error}; {kept}, so free some memory or choose a smaller batch, and resume.",
                            "HostMemoryError")
        except Discarded:
            p.engine.drain()
            shutil.rmtree(self.folder.checkpoints_path, ignore_errors=True)
            return RunEnded("discarded", f"Stopped at step {step}; its checkpoints were deleted as asked.")
        finally:
            if not self._compiling_told:
                self._tell_compiling()
            if self._gpu is not None:
                self._gpu.close()

    def _fitting_warm_up(self) -> OptimConfig:
        """At most half of the steps: with a rate of 0 in the first step, a short run would learn nothing."""
        t, most = self.config.train, self.p.total_steps // 2
        if t.warmup_steps <= most:
            return t
        self.recorder.emit(LogLine("warning", f"train.warmup_steps {t.warmup_steps} is more than half of the "
                                              f"{self.p.total_steps} steps, so {most} are used."))
        return replace(t, warmup_steps=most)

    def _dry_run(self) -> None:
        """A step on the longest rows that changes nothing: what does not fit, or does not run, ends the run here."""
        p = self.p
        if p.total_steps < LEAST_STEPS:
            return
        progress = Progress(self.recorder, "dry_run")
        progress(0, 1, "One step on the longest rows")
        began = time.perf_counter()
        p.engine.dry_run(longest_batches(p.data.train, self.config.train.batch_size, p.chosen.micro_batch_size,
                                         self._pad_up_to), self._watch.check)
        seconds = time.perf_counter() - began
        progress(1, 1, "Done")
        compiled = p.chosen.choices.compiled
        self.recorder.emit(LogLine("info", f"A dry run of one step on the longest rows took {in_seconds(seconds)}"
                                           f"{', compiling included' if compiled else ''}."))
        self.recorder.emit(self._forecast.event(0, "dry_run", None if compiled else seconds))
        self._tell_compiling("the dry run")

    @property
    def _pad_up_to(self) -> int:
        return self.config.data.max_seq_len if self.p.chosen.choices.compiled else 0

    def _submit(self, step: int) -> None:
        t = self.config.train
        micro = batches(self.p.data.train, t.batch_size, self.p.chosen.micro_batch_size, t.seed,
                        self.config.data.shuffle, step, self._pad_up_to)
        self._counts[step] = _Counts(sum(b.tokens for b in micro), sum(b.loss_tokens for b in micro))
        self.p.engine.train_step(step, micro, learning_rate(self._optim, step, self.p.total_steps), self._on_home,
                                 self._watch.check)

    # ------------------------------------------------------------------ what a finished step leaves in the record

    def _on_home(self, home: Home) -> None:
        """On the HOST lane: the step's last update is applied, so reading its spans waits for nothing."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        counts = self._counts.pop(home.step)
        inline = self.p.backend.device.type == "cpu"
        exposed = exposed_seconds(home.spans, self._spans, inline, seconds)
        self._spans = home.spans
        flops = 6 * self.p.model.active_parameters * counts.tokens
        self.recorder.emit(StepFinished(
            step=home.step, loss=home.loss, grad_norm=home.grad_norm, learning_rate=home.learning_rate,
            tokens=counts.tokens, loss_tokens=counts.loss_tokens, seconds=seconds,
            tokens_per_second=counts.tokens / seconds, tflops=flops / seconds / 1e12,
            exposed={cause: round(value, 6) for cause, value in exposed.items()}))
        if self._forecast.step(seconds):
            self._compare(home.step, "running")
        if not self._compiling_told:
            self._tell_compiling()
        every = self.config.output.timeline_every
        if (home.step == 1 or home.step % every == 0) and self._timelines < TIMELINES_KEPT:
            self._timelines += 1
            self.recorder.emit(StepTimeline(home.step, as_records(home.spans)))
        if now - self._memory_at >= LOOK_SECONDS:
            self._memory_at = now
            self._sample_memory(home.step)

    def _compare(self, step: int, moment: str) -> None:
        """Predicted against measured, as far as it is known by now."""
        self.recorder.emit(self._forecast.event(step, moment))

    def _tell_compiling(self, where: str = "the first step") -> None:
        """What the first step, or the dry run before it, took besides its work."""
        self._compiling_told = True
        seconds, problems = self.p.engine.state.compiling
        if seconds:
            self.recorder.emit(LogLine("info", f"Compiling the blocks took {seconds:.0f} s of {where}."))
        for problem in problems:
            self.recorder.emit(LogLine("warning", f"A block could not be compiled and runs as it is, more slowly and with more "
                                                  f"memory ({problem}); with engine.kernels at eager the plan counts on that."))

    def _sample_memory(self, step: int) -> None:
        rss, available = self._watch.look()
        device = self.p.backend.memory()
        driver = self._gpu.sample() if self._gpu is not None else None
        self.recorder.emit(MemorySampled(
            step=step, host_rss=rss, host_pinned=self.p.store.pinned_bytes + self.p.engine.boundary_bytes
            if self._gpu is not None else 0, host_available=available, gpu_allocated=device["allocated"],
            gpu_reserved=device["reserved"], gpu_peak=device["peak"],
            gpu_driver=driver.used if driver else device["total"] - device["free"], gpu_total=device["total"]))

    def _start_clock(self) -> None:
        """Steps are timed from home to home; after a drain, from here."""
        self._mark = time.perf_counter()
        self._spans = None

    # ------------------------------------------------------------------ requests

    def _obey(self, step: int) -> None:
        waiting, self._waiting = self._waiting, []
        for command in waiting + self._commands():
            if command == "save":
                self._save(step)
            elif command == "pause":
                self._pause(step)

    def _commands(self) -> list[str]:
        """New requests, recorded; stop and discard are obeyed by leaving the loop, and so is a lack of memory."""
        self._watch.check()
        found = self._next_commands()
        for command in found:
            self.recorder.emit(ControlReceived(command))
            if command == "discard":
                raise Discarded
            if command == "stop":
                raise Stopped
        return found

    def _pause(self, step: int) -> None:
        self._state("pausing")
        self.p.engine.drain()
        self._state("paused", f"Paused after step {step}; the model stays in memory.")
        while True:
            commands = self._commands()
            if "save" in commands:
                self._save(step, "paused")
            if "resume" in commands:
                break
            time.sleep(0.1)
        self._state("running")
        self._start_clock()

    # ------------------------------------------------------------------ between steps, with everything home

    def _save(self, step: int, back_to: str = "running") -> None:
        p = self.p
        p.engine.drain()
        if step == self._saved_step or step == 0:
            self._start_clock()
            return
        self._state("saving")
        state = resume_state(self.config, p.data.fingerprint, p.chosen.rounding, p.total_steps)
        info = write_checkpoint(self.folder.checkpoints_path, step, p.store, state, self.config.output.keep_checkpoints,
                                Progress(self.recorder, "checkpoint"), p.model.persistent_buffers())
        self._saved_step = step
        self._forecast.checkpoint(info.bytes)
        self.recorder.emit(CheckpointWritten(step, str(info.path.relative_to(self.folder.path)), info.bytes,
                                             info.seconds))
        self._state(back_to)
        self._start_clock()

    def _evaluate(self, step: int) -> None:
        p = self.p
        p.engine.drain()
        if len(p.data.eval) and p.data.eval.loss_tokens:
            began = time.perf_counter()
            loss = p.engine.evaluate(self._interruptible(one_pass(p.data.eval, p.chosen.micro_batch_size)))
            if not loss == loss or loss in (float("inf"), float("-inf")):
                raise NonFiniteError(f"The evaluation loss after step {step} is not a finite number; start a new run with "
                                     "a lower train.learning_rate.")
            self.recorder.emit(EvalFinished(step, loss, p.data.eval.loss_tokens, time.perf_counter() - began))
        self._start_clock()

    def _interruptible(self, items: Iterable) -> Iterator:
        """`items`, with an eye on requests: stop and discard are obeyed at once, the others wait for the next step."""
        for item in items:
            self._waiting += self._commands()
            yield item

    def _exact_match(self, moment: str, step: int) -> None:
        prompts = self.p.data.eval_prompts(self.config.output.exact_match_samples)
        if not prompts:
            return
        progress = Progress(self.recorder, "sample")
        longest = max(prompt.answer_tokens for prompt in prompts)
        written = [0]

        def on_token(_: int, __: int) -> None:
            self._waiting += self._commands()
            written[0] += 1
            progress(min(written[0], longest * len(prompts)), longest * len(prompts), f"Answering, {moment} training")

        answers = generate(self.p.engine, [p.prompt_ids for p in prompts], longest + 4, self._ends, on_token=on_token,
                           max_length=longest_row(self.p.model.config))
        texts = [self.p.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]
        correct = sum(text == prompt.expected_text for text, prompt in zip(texts, prompts))
        samples = [{"prompt": prompt.prompt_text, "expected": prompt.expected_text, "answer": text}
                   for prompt, text in zip(prompts[:SHOWN_SAMPLES], texts)]
        self.recorder.emit(ExactMatchMeasured(step, moment, correct, len(prompts), samples))

    def _export(self, step: int) -> None:
        progress = Progress(self.recorder, "export")
        progress(0, 1, "Writing the model")
        size = write_model(self.p.model, self.p.store, self.p.tokenizer, self.config.model.source,
                           self.folder.export_path)
        progress(1, 1, "Written")
        self.recorder.emit(ExportWritten(step, str(self.folder.export_path.relative_to(self.folder.path)), size))

    def _state(self, state: str, reason: str = "") -> None:
        self.recorder.emit(StateChanged(state, reason))


def started_event(config: TrainConfig, prepared: Prepared, version: str, pid: int) -> RunStarted:
    """The record's description of the run, known once everything is prepared."""
    device = prepared.backend.device
    return RunStarted(
        name=config.name, pid=pid, device=device.type, device_name=prepared.backend.device_name,
        total_steps=prepared.total_steps, parameters=prepared.model.parameter_count,
        units=[unit.name for unit in prepared.model.units],
        resumed_step=prepared.step if prepared.step else None, program_version=version, flops_formula=FLOPS_FORMULA)
