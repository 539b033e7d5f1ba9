"""`Steps` submits the steps of a run, and gets over those that fail before their updates.

- A step whose loss is not finite is skipped, if the settings say so (`engine.train.skipping`).
- A step for which the GPU's memory does not last is planned anew with less
  (`engine.train.replanning`), at most three times.
- Every other failure is raised, and `Trainer` saves the last good step.

A step that failed may come to light only when a later one is submitted, or when the engine is
drained. In both cases the planes say which step they hold (`engine.host.held_step`), and the run
goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.config.settings import OptimConfig, TrainConfig
from engine.data.rows import batches, rows_of_step
from engine.errors import NonFiniteError
from engine.memory.explain import note_memory
from engine.runs.events import StepSkipped
from engine.train.dry_run import LEAST_STEPS, longest_batches
from engine.train.failures import Failure, FailureKind, failure_of
from engine.train.forecast import Forecast
from engine.train.observe import Observer
from engine.train.prepare import Prepared
from engine.train.references import with_divergence
from engine.train.replanning import OUT_OF_MEMORY, Moment, Replanner
from engine.train.schedule import fitting_warm_up, learning_rate
from engine.train.session import Session
from engine.train.skipping import refuse_further, skipped_in_words
from engine.words import in_seconds


class StepGivenUp(Exception):
    """A step is given up before its updates, since a request to stop cannot wait for its end."""


class Steps:
    """The `Steps` of a prepared run; `observer` records them. `check` is called often until the
    updates of a step begin, and may raise to give the step up: HostMemoryError where host memory
    does not last, or `StepGivenUp`. `replanner` plans a step with less for which the GPU's does
    not.
    """

    def __init__(
        self,
        session: Session,
        prepared: Prepared,
        observer: Observer,
        check: Callable[[], None],
        replanner: Replanner,
    ):
        self._session = session
        self._prepared = prepared
        self._observer = observer
        self._check = check
        self._config = session.config
        self._done = prepared.step
        self._optim = self._fitting_warm_up()
        self._replanner = replanner

    @property
    def done(self) -> int:
        """Returns how many steps are submitted; after `settle`, all of them are over."""
        return self._done

    def change(self, config: TrainConfig) -> None:
        """Takes the settings that hold from the next step on."""
        self._config = config
        self._optim = self._fitting_warm_up()

    def _fitting_warm_up(self) -> OptimConfig:
        """Returns the optimizer's settings; the log says if the warm-up had to be shortened."""
        fitting, warning = fitting_warm_up(self._config.train, self._prepared.total_steps)
        if warning:
            self._session.log("warning", warning)
        return fitting

    # ------------------------------------------------------------------ steps

    def dry_run(self, forecast: Forecast, look: Callable[[], None]) -> None:
        """Runs a step on the longest rows without changing the weights.

        A run that does not fit or cannot be computed fails here. `look` is called often, and may
        end the work with an exception.
        """
        prepared = self._prepared
        if prepared.total_steps < LEAST_STEPS:
            return
        progress = self._session.progress("dry_run")
        progress(0, 1, "One step on the longest rows")
        began = time.perf_counter()
        self._try_a_step(look)
        seconds = time.perf_counter() - began
        progress(1, 1, "Done")
        compiled = prepared.chosen.choices.compiled
        took = f"A dry run of one step on the longest rows took {in_seconds(seconds)}"
        self._session.log("info", f"{took}, compiling included." if compiled else f"{took}.")
        # A time that includes compiling does not predict the time of a step.
        self._session.recorder.emit(forecast.event(0, "dry_run", None if compiled else seconds))
        self._observer.tell_compiling("the dry run")

    def _try_a_step(self, look: Callable[[], None]) -> None:
        prepared = self._prepared
        while True:
            micro_batches = longest_batches(
                prepared.data.train,
                self._config.train.batch_size,
                prepared.chosen.micro_batch_size,
                self._pad_up_to,
            )
            try:
                prepared.engine.dry_run(micro_batches, look)
                return
            except OUT_OF_MEMORY as error:
                failed = error
            self._replanner.plan(Moment(0), failed)

    @property
    def _pad_up_to(self) -> int:
        return self._prepared.chosen.pad_up_to(self._config.data.max_seq_len)

    def advance(self) -> None:
        """Submits the next step. If a step has failed and the run got over it, the planes hold step
        `done` afterwards, which was skipped or is the one before that which failed.
        """
        try:
            self._submit()
            return
        except Exception as error:  # noqa: BLE001  raised again, if the run cannot get over it
            failed = error
        self._get_over(failed)

    def give_up(self) -> None:
        """Gives up the step that was being submitted, of which nothing is applied."""
        self._observer.forget(self._done + 1)

    def settle(self) -> None:
        """Waits until every submitted step is over. Steps that fail are got over, if possible."""
        until = self._done
        while True:
            try:
                while self._done < until:
                    self._submit()
                self._prepared.drain()
                return
            except Exception as error:  # noqa: BLE001  as in `advance`
                failed = error
            self._get_over(failed)

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
        micro_batches = with_divergence(prepared, micro_batches, step, self._check)
        self._observer.submitted(step, micro_batches, began, ended)
        prepared.engine.train_step(
            step,
            micro_batches,
            learning_rate(self._optim, step, prepared.total_steps),
            self._observer.on_applied,
            self._check,
        )
        self._done = step

    # ------------------------------------------------------------------ failures

    def failure(self, error: Exception) -> Failure:
        """Returns the failure that `error` stands for, once no lane works any more."""
        prepared = self._prepared
        note_memory(error, prepared.planned.account.note)
        failure = failure_of(error, prepared.chosen.gpu_items)
        prepared.store.held.fail()
        is_finite = failure.kind != FailureKind.NON_FINITE
        # The first error counts. A lost device raises again; then, too, its lanes have ended.
        try:
            prepared.drain()
        except NonFiniteError:
            is_finite = False  # another error came to light before this one
        except Exception:  # noqa: BLE001  as above
            pass
        if not is_finite:
            prepared.store.held.give_up()
        return failure

    def _get_over(self, error: Exception) -> None:
        """Makes the run go on after a step that failed. Raises `error` where it cannot."""
        held = self._prepared.store.held
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
            self._replanner.plan(Moment(step), error)
        else:
            raise error
        self._done = held.step
        self._observer.forget(step)
        self._observer.start_clock()

    def _skip(self, step: int, error: NonFiniteError) -> None:
        prepared, held = self._prepared, self._prepared.store.held
        rows = rows_of_step(prepared.data.train, self._config.train.batch_size, step)
        held.skip(step)
        self._session.recorder.emit(StepSkipped(step, error.what, rows))
        self._session.log("warning", skipped_in_words(error, step, rows, len(held.skipped)))
