"""Evaluation at the right moments, and what follows from it.

- Before the first step, the validation rows are evaluated, if they are evaluated during the run,
  and the validation and the fixed prompts are answered.
- After an evaluation, the best weights are kept (`engine.training.loop.best_weights`), and the run
  ends early if its patience is over.
- At the end, the weights that are exported are chosen: the best or the last. If they are the best,
  they are loaded into the planes once all else is saved. Validation prompts are answered with the
  exported weights, so that the results of a run are those of its export.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config.settings import TrainConfig
from engine.errors import CheckpointError
from engine.planning.layout.layout import WEIGHT_PLANES
from engine.runs.record.events import ExportWritten
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.record.validation import Score, ValidationScores
from engine.runs.summaries.exports import OTHER_TOKENS, NotedExport, note_export
from engine.text import counted
from engine.training.checkpoints.restore import load_checkpoint
from engine.training.export.export import TrainedModel, Written, adapters_alone, write_model
from engine.training.export.model_card import Exported, model_card
from engine.training.loop.best_weights import BestWeights
from engine.training.loop.evaluation import Evaluator
from engine.training.loop.explain import note_memory
from engine.training.loop.failures import Failure, failure_of
from engine.training.loop.measurements import Measurements
from engine.training.loop.oom_recovery import OomRecovery
from engine.training.loop.prepare import Prepared
from engine.training.loop.session import Session

Poll = Callable[[], None]


class EarlyStopping:
    """Evaluations, early stopping and export of one session of a run.

    Every submitted step must be applied where its methods are called. They call `poll` often, to
    check for requests; if `poll` raises an exception, the work ends.
    """

    def __init__(
        self,
        session: Session,
        prepared: Prepared,
        oom_recovery: OomRecovery,
        measurements: Measurements,
        gives_way: Callable[[], bool],
    ):
        self._session = session
        self._prepared = prepared
        self._measurements = measurements
        self._evaluator = Evaluator(session, prepared, oom_recovery)
        self.best = BestWeights(session, prepared, gives_way)
        self.unexported: Unexported | None = None
        """The last export, if it failed."""
        self._exported = 0
        output = session.config.output
        is_evaluated = output.eval_every or output.exact_match_samples
        if is_evaluated and not len(prepared.data.eval):
            is_alone = prepared.data.summary["train_examples"] <= 1
            more = "give more rows" if is_alone else "raise data.eval_fraction"
            session.log(
                "warning",
                f"There are no validation rows, so nothing is evaluated; {more}, or set "
                "output.eval_every and output.exact_match_samples to 0.",
            )
        elif output.best_by == "exact_match" and not prepared.data.eval_prompts(1):
            session.log(
                "warning",
                "No validation row has a prompt and an answer, so output.keep_best: exact_match "
                "compares nothing and the last weights are exported; set it to loss.",
            )

    @property
    def _snapshot(self) -> RunSnapshot:
        return self._session.recorder.snapshot

    # ------------------------------------------------------------------ during the run

    def before_first_step(self, poll: Poll) -> None:
        """Evaluates the weights with which the run begins, and answers prompts with them. Logs what
        the loss of steps has that validation losses lack.
        """
        self._report_losses()
        if self._session.config.output.eval_every:
            progress = self._session.progress("evaluate")
            progress(0, 1, "Evaluating before the first step")
            self._evaluator.measure_loss(0, poll)
            progress(1, 1, "Done")
            self._measurements.report_uncompiled("the evaluation before the first step")
        self._evaluator.measure_exact_match("before", 0, poll)
        self._evaluator.answer_prompts(0, poll)

    def _report_losses(self) -> None:
        smoothing = self._session.config.train.label_smoothing
        if smoothing:
            self._session.log(
                "info",
                f"The loss of steps is smoothed by {smoothing:g} (train.label_smoothing). "
                "Validation losses are not, so the two cannot be compared.",
            )
        if self._prepared.model.router_loss is not None:
            rows = counted(self._prepared.chosen.micro_batch_size, "row")
            self._session.log(
                "info",
                "The model's configuration asks for a loss that balances experts. It is taken of "
                f"micro-batches of {rows} (train.micro_batch_size); validation losses are without.",
            )

    def evaluate(self, step: int, poll: Poll, is_last: bool = False) -> None:
        """Evaluates the weights after `step`, and keeps them if they are the best."""
        self._evaluator.measure_loss(step, poll)
        self._measurements.report_uncompiled(f"the evaluation after step {step:,}")
        if self._session.config.output.best_by == "exact_match":
            self._evaluator.measure_exact_match("during", step, poll)
        self.best.take(step, is_last)
        self._evaluator.answer_prompts(step, poll)
        if not is_last:  # more of them are answered at the end
            self._evaluator.answer_few(step, poll)

    def is_spent(self, config: TrainConfig) -> bool:
        """Returns whether the run ends early: its patience is over."""
        patience = config.train.patience
        return patience > 0 and self._snapshot.validation.since_best >= patience

    def ended_early(self, step: int, total_steps: int) -> str:
        """Returns one sentence on why a run whose patience is over has ended after `step`."""
        validation = self._snapshot.validation
        were = counted(validation.since_best, "evaluation")
        were += " since was" if validation.since_best == 1 else " since were"
        what = "the validation loss" if validation.by == "loss" else "the share of right answers"
        best = validation.best
        when = "before training" if best is None else f"at step {best.step:,}"
        return (
            f"Ended early, after step {step:,} of {total_steps:,}: {what} was best {when}, and "
            f"{were} not better (train.patience)."
        )

    # ------------------------------------------------------------------ at the end

    def at_the_end(self, step: int, config: TrainConfig, poll: Poll) -> None:
        """Measures the weights that a run is to be known by, and exports them if it is to.

        Nothing may be saved after this: the planes may hold other weights than those of `step`.
        """
        self.best.finish(poll)
        chosen = _choice(self._snapshot, step, config)
        output = config.output
        if chosen.is_no_better and self.best.is_on and not output.export:
            none = _none_is_better(self._snapshot.validation)
            self._session.log("warning", f"No weights are kept as the best: {none}.")
        if not output.export and not output.exact_match_samples:
            return
        if chosen.step != step and not self._take_up(chosen.step, step):
            chosen = _Choice(step, "The weights of the last step are exported instead.")
        self._evaluator.measure_exact_match("after", chosen.step, poll)
        if output.export:
            self._session.log("warning" if chosen.is_no_better else "info", chosen.reason)
            self._exported = chosen.step
            self.export(config)

    def _take_up(self, step: int, last: int) -> bool:
        """Fills the weight planes with the best weights, those of `step`. Returns False if that
        failed, and the planes hold the weights of step `last` again.

        Raises CheckpointError if these are lost, too.
        """
        folder, best = self._session.folder, self.best.path_of(step)
        try:
            if best is None:
                raise CheckpointError(
                    f"The weights of step {step:,} are not in {folder.best_path}."
                )
            self._load(best)
        except CheckpointError as error:
            self._session.log("warning", f"The best weights cannot be read: {error}")
            if best is not None:  # some planes may have been filled
                self._load(folder.checkpoints_path / f"step-{last}")
            return False
        return True

    def _load(self, path: Path) -> None:
        prepared = self._prepared
        buffers = prepared.model.persistent_buffers()
        load_checkpoint(path, prepared.host_states, buffers, WEIGHT_PLANES)

    def export(self, config: TrainConfig) -> None:
        """Writes the chosen weights as a model. A failure is logged and kept in `unexported`; it
        does not fail the run, whose steps are all done.
        """
        step, folder = self._exported, self._session.folder
        progress = self._session.progress("export")
        progress(0, 1, "Writing the model")
        self.unexported = None
        try:
            written = self._write(step, config)
        except Exception as error:  # noqa: BLE001  whatever it is, the model is trained
            note_memory(error, self._prepared.planned.breakdown.note)
            failed = failure_of(error, self._prepared.chosen.gpu_items)
            if failed.trace:
                self._session.log("error", failed.trace)
            self.unexported = Unexported(step, failed)
            progress(1, 1, "Failed")
            return
        progress(1, 1, "Written")
        self._session.recorder.emit(
            ExportWritten(step, str(folder.export_path.relative_to(folder.path)), written.bytes)
        )
        if written.check:
            is_other = written.check.startswith(OTHER_TOKENS)
            self._session.log("warning" if is_other else "info", written.check)

    def _write(self, step: int, config: TrainConfig) -> Written:
        """Writes the model."""
        prepared, folder = self._prepared, self._session.folder
        trained = TrainedModel(
            prepared.model,
            prepared.host_states,
            prepared.tokenizer,
            config.model.source,
            config.output.export_dtype,
        )
        adapters = adapters_alone(config)
        ends = prepared.data.ends
        exported = Exported(
            step,
            trained.written_dtype,
            is_adapter=adapters is not None,
            whole_class=prepared.model.whole_class,
            ends=ends,
        )
        card = model_card(config, self._session.recorder.snapshot, exported)
        trained = replace(trained, card=card, adapters=adapters, ends=ends, data=config.data)
        written = write_model(trained, folder.export_path)
        path = str(folder.path.resolve() / folder.export_path.name)
        about = step, trained.written_dtype, adapters is not None, time.time(), "", written.check
        note_export(folder.root, NotedExport(folder.id, path, *about))
        return written


@dataclass(frozen=True)
class Unexported:
    """Weights of `step` whose export failed (`failed`)."""

    step: int
    failed: Failure


@dataclass(frozen=True)
class _Choice:
    """Weights that are exported at the end of a run, and the reason."""

    step: int
    reason: str
    is_no_better: bool = False
    """No evaluation after a step was better than that before the first one."""


def _choice(snapshot: RunSnapshot, step: int, config: TrainConfig) -> _Choice:
    """Returns which weights are exported after the last `step`."""
    validation = snapshot.validation
    best, kept, newest = validation.best, validation.kept, validation.newest
    last = "The weights of the last step are exported"
    if best is None and newest is not None:
        return _Choice(step, f"{last}, though {_none_is_better(validation)}.", is_no_better=True)
    if best is None or newest is None:
        what = "validation loss" if validation.by == "loss" else "answer to a validation prompt"
        return _Choice(step, f"{last}; no {what} says that others are better.")
    if config.output.export_from == "last":
        return _Choice(step, f"{last}, as output.export_from asks.")
    if kept is not None and kept.step < step and kept.is_better_than(newest, validation.by):
        newer = ""
        if not best.kept:
            newer = f" The best, {_in_short(best)} at step {best.step:,}, could not be kept."
        return _Choice(
            kept.step,
            f"The weights of step {kept.step:,} are exported: {_compared(kept, newest)}.{newer}",
        )
    if best.step == step:
        by_loss = best.by == "loss"
        better = "had a lower validation loss" if by_loss else "had more answers right"
        return _Choice(step, f"{last}: none {better}.")
    was = "the validation loss was lower" if best.by == "loss" else "more answers were right"
    return _Choice(step, f"{last}; {was} at step {best.step:,}, whose weights are not kept.")


def _none_is_better(validation: ValidationScores) -> str:
    """Returns a clause for the case that no evaluation was better than that before training."""
    before = validation.before
    assert before is not None  # the first one after it would be the best
    return f"no evaluation was better than that before training ({_score_text(before)})"


def _score_text(score: Score) -> str:
    loss = f"validation loss {score.loss:.4f}"
    return f"{_in_short(score)}, {loss}" if score.total else loss


def _in_short(score: Score) -> str:
    return f"{score.correct} of {score.total} exact" if score.total else f"{score.loss:.4f}"


def _compared(kept: Score, newest: Score) -> str:
    """Returns a clause on why the weights of `kept` are better than those of `newest`."""
    if not kept.total:
        return (
            f"their validation loss is {kept.loss:.4f}, and that of step {newest.step:,}, the "
            f"last, is {newest.loss:.4f}"
        )
    text = (
        f"they answer {kept.correct} of {kept.total} validation prompts exactly, and those of step "
        f"{newest.step:,}, the last, {newest.correct}"
    )
    if kept.share == newest.share:
        text += f", at a validation loss of {kept.loss:.4f} and {newest.loss:.4f}"
    return text
