"""Submits the steps of a run, and recovers from those that fail before their updates.

- A step whose loss is not finite is skipped, if the settings allow it.
- A step for which the GPU's memory does not last is planned anew with less
  (`engine.training.loop.oom_recovery`), at most three times.
- Every other failure is raised, and `Trainer` saves the last good step.
A step that failed may come to light only when a later one is submitted, or when the engine is
drained. In both cases the planes know which step they hold (`engine.runtime.host.plane_version`),
and the run continues from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from engine.config.settings import OptimConfig, TrainConfig
from engine.data.batches.rows import (
    MicroBatch,
    RowSet,
    batches,
    micro_batch,
    micro_batch_bounds,
    rows_of_step,
)
from engine.errors import NonFiniteError
from engine.runs.record.events import StepSkipped
from engine.text import counted, in_seconds
from engine.training.loop.explain import note_memory
from engine.training.loop.failures import Failure, FailureKind, failure_of
from engine.training.loop.lr_schedule import fitting_warm_up, learning_rate
from engine.training.loop.measurements import Measurements
from engine.training.loop.oom_recovery import OUT_OF_MEMORY, Moment, OomRecovery
from engine.training.loop.prediction_check import PredictionCheck
from engine.training.loop.prepare import Prepared
from engine.training.loop.reference_logps import with_kl_estimate
from engine.training.loop.session import Session

# ---------------------------------------------------------------------- skipping

# A step whose loss or gradient norm is not finite can be skipped (`train.nonfinite`).
#
# A skipped step counts as one of the run's steps: it has read its rows, and the schedule of the
# learning rate continues as if it had been applied. It changes no weight and no moment, and AdamW
# does not count it among its updates. torch's GradScaler does the same. The checkpoints keep the
# list of skipped steps, so a resumed run counts alike.


MOST_IN_A_ROW = 5
"""Number of skipped steps in a row after which the weights are at fault rather than the rows."""
MOST_SKIPPED = 100
"""Number of steps that a run skips, at most."""
_ROWS_SHOWN = 8


def refuse_further(error: NonFiniteError, step: int, skipped: Sequence[int]) -> None:
    """Raises NonFiniteError if step `step`, which failed with `error`, may not be skipped as well.

    `skipped` are the steps that were skipped before.
    """
    in_a_row = 0
    while step - 1 - in_a_row in skipped:
        in_a_row += 1
    if in_a_row >= MOST_IN_A_ROW:
        raise NonFiniteError(
            f"The {error.what} of step {step:,} is not a finite number, and the "
            f"{counted(in_a_row, 'step')} before it had to be skipped for the same reason, so the "
            "weights are at fault rather than the rows; start a new run with a lower "
            "train.learning_rate.",
            step,
            error.what,
        )
    if len(skipped) >= MOST_SKIPPED:
        raise NonFiniteError(
            f"The {error.what} of step {step:,} is not a finite number, and the run has skipped "
            f"{counted(len(skipped), 'step')} already, which is the most; look at the rows of "
            "skipped steps in the log, and start a new run without them.",
            step,
            error.what,
        )


def skipped_text(error: NonFiniteError, step: int, rows: Sequence[int], count: int) -> str:
    """Returns a sentence for the log. `count` is the number of steps that are skipped by now."""
    text = ", ".join(f"{row:,}" for row in rows[:_ROWS_SHOWN])
    more = f" and {len(rows) - _ROWS_SHOWN:,} more" if len(rows) > _ROWS_SHOWN else ""
    return (
        f"Step {step:,} is skipped without an update, since its {error.what} is not a finite "
        f"number. It read the training rows {text}{more}, counted from 0. That is "
        f"{counted(count, 'skipped step')} of at most {MOST_SKIPPED}."
    )


# ---------------------------------------------------------------------- step loop


# ---------------------------------------------------------------------- dry run

# A dry run is one step on the longest rows, taken before the first step.
#
# A run that would run out of memory then fails in its first minute.


LEAST_STEPS = 10
"""Number of steps below which a run has no dry run: it takes as long as a step, and such runs are
over soon anyway.
"""


def longest_batches(
    rows: RowSet, batch_size: int, micro_batch_size: int, pad_up_to: int = 0
) -> list[MicroBatch]:
    """Returns the micro-batches of a step on the longest rows, the largest shapes of any step.

    If there are too few rows, some are used more than once. `pad_up_to` is that of
    `engine.data.batches.rows.micro_batch`.
    """
    count = min(batch_size, len(rows))
    # Partitioning finds the longest rows of a large data set without sorting all of it.
    longest = np.argpartition(-rows.row_lengths, count - 1)[:count]
    longest = longest[np.argsort(-rows.row_lengths[longest], kind="stable")]
    repeats = -(-batch_size // count)
    chosen = np.repeat(longest, repeats)[:batch_size].tolist()
    return [
        micro_batch(rows, chosen[start:stop], pad_up_to)
        for start, stop in micro_batch_bounds(batch_size, micro_batch_size)
    ]


# ---------------------------------------------------------------------- step loop


class StepAborted(Exception):
    """Raised to abort a step before its updates, since a request to stop cannot wait for its
    end.
    """


class Steps:
    """The steps of a prepared run; `measurements` records them. `check` is called often until the
    updates of a step begin, and may raise to abort the step: HostMemoryError where host memory does
    not last, or `StepAborted`. `oom_recovery` plans a step with less for which the GPU's memory
    does not.
    """

    def __init__(
        self,
        session: Session,
        prepared: Prepared,
        measurements: Measurements,
        check: Callable[[], None],
        oom_recovery: OomRecovery,
    ):
        self._session = session
        self._prepared = prepared
        self._measurements = measurements
        self._check = check
        self._config = session.config
        self._done = prepared.step
        self._optim = self._fitting_warm_up()
        self._oom_recovery = oom_recovery

    @property
    def done(self) -> int:
        """Number of submitted steps; after `finish_submitted`, all of them are over."""
        return self._done

    def change(self, config: TrainConfig) -> None:
        """Takes the settings that hold from the next step on."""
        self._config = config
        self._optim = self._fitting_warm_up()

    def _fitting_warm_up(self) -> OptimConfig:
        """Returns the optimizer's settings, with a warm-up that was shortened if it had to be,
        which is logged.
        """
        fitting, warning = fitting_warm_up(self._config.train, self._prepared.total_steps)
        if warning:
            self._session.log("warning", warning)
        return fitting

    # ------------------------------------------------------------------ steps

    def dry_run(self, prediction_check: PredictionCheck, poll: Callable[[], None]) -> None:
        """Runs a step on the longest rows without changing the weights.

        A run that does not fit or cannot be computed fails here. `poll` is called often, and may
        end the work with an exception.
        """
        prepared = self._prepared
        if prepared.total_steps < LEAST_STEPS:
            return
        progress = self._session.progress("dry_run")
        progress(0, 1, "One step on the longest rows")
        began = time.perf_counter()
        self._try_a_step(poll)
        seconds = time.perf_counter() - began
        progress(1, 1, "Done")
        compiled = prepared.chosen.choices.kernels.compiled
        took = f"A dry run of one step on the longest rows took {in_seconds(seconds)}"
        self._session.log("info", f"{took}, compiling included." if compiled else f"{took}.")
        # A time that includes compiling does not predict the time of a step.
        self._session.recorder.emit(
            prediction_check.event(0, "dry_run", None if compiled else seconds)
        )
        self._measurements.report_compiling("the dry run")

    def _try_a_step(self, poll: Callable[[], None]) -> None:
        prepared = self._prepared
        while True:
            micro_batches = longest_batches(
                prepared.data.train,
                self._config.train.batch_size,
                prepared.chosen.micro_batch_size,
                self._pad_up_to,
            )
            try:
                prepared.engine.dry_run(micro_batches, poll)
                return
            except OUT_OF_MEMORY as error:
                failed = error
            self._oom_recovery.plan(Moment(0), failed)

    @property
    def _pad_up_to(self) -> int:
        return self._prepared.chosen.pad_up_to(self._config.data.max_seq_len)

    def advance(self) -> None:
        """Submits the next step. If a step has failed and the run has recovered, the planes hold
        step `done` afterwards, which was skipped or is the one before that which failed.
        """
        try:
            self._submit()
            return
        except Exception as error:  # noqa: BLE001  raised again, if the run cannot get over it
            failed = error
        self._recover(failed)

    def abort(self) -> None:
        """Aborts the step that was being submitted, of which nothing is applied."""
        self._measurements.forget(self._done + 1)

    def finish_submitted(self) -> None:
        """Waits until every submitted step is over. Recovers from steps that fail, if possible."""
        until = self._done
        while True:
            try:
                while self._done < until:
                    self._submit()
                self._prepared.drain()
                return
            except Exception as error:  # noqa: BLE001  as in `advance`
                failed = error
            self._recover(failed)

    def _submit(self) -> None:
        """Assembles the rows of the next step and submits the step to the engine."""
        prepared, train = self._prepared, self._config.train
        step, began = self._done + 1, time.perf_counter()
        micro_batches = batches(
            prepared.data.train,
            train.batch_size,
            prepared.chosen.micro_batch_size,
            step,
            self._pad_up_to,
        )
        ended = time.perf_counter()  # before the extra pass of KTO, which is no wait for data
        micro_batches = with_kl_estimate(prepared, micro_batches, step, self._check)
        self._measurements.submitted(step, micro_batches, began, ended)
        prepared.engine.train_step(
            step,
            micro_batches,
            learning_rate(self._optim, step, prepared.total_steps),
            self._measurements.on_applied,
            self._check,
        )
        self._done = step

    # ------------------------------------------------------------------ failures

    def failure(self, error: Exception) -> Failure:
        """Returns the failure that `error` stands for, once no lane works any more."""
        prepared = self._prepared
        note_memory(error, prepared.planned.breakdown.note)
        failure = failure_of(error, prepared.chosen.gpu_items)
        prepared.host_states.held.fail()
        is_finite = failure.kind != FailureKind.NON_FINITE
        # The first error counts. A lost device raises again; then, too, its lanes have ended.
        try:
            prepared.drain()
        except NonFiniteError:
            is_finite = False  # another error came to light before this one
        except Exception:  # noqa: BLE001  as above
            pass
        if not is_finite:
            prepared.host_states.held.abort()
        return failure

    def _recover(self, error: Exception) -> None:
        """Makes the run continue after a step that failed. Raises `error` where it cannot."""
        held = self._prepared.host_states.held
        if isinstance(error, NonFiniteError) and self._config.train.nonfinite == "skip":
            self.failure(error)
            step = held.step + 1
            refuse_further(error, step, held.skipped)
            self._skip(step, error)
        elif isinstance(error, OUT_OF_MEMORY):
            self.failure(error)
            if held.is_mixed:
                raise error
            step = held.step + 1
            self._oom_recovery.plan(Moment(step), error)
        else:
            raise error
        self._done = held.step
        self._measurements.forget(step)
        self._measurements.start_clock()

    def _skip(self, step: int, error: NonFiniteError) -> None:
        prepared, held = self._prepared, self._prepared.host_states.held
        rows = rows_of_step(prepared.data.train, self._config.train.batch_size, step)
        held.skip(step)
        self._session.recorder.emit(StepSkipped(step, error.what, rows))
        self._session.log("warning", skipped_text(error, step, rows, len(held.skipped)))
