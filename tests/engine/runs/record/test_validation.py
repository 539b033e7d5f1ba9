"""What the evaluations of a record add up to: the best, whether it is kept, the newest rows."""

from __future__ import annotations

from engine.runs.record.evaluations import RowLosses
from engine.runs.record.events import (
    BestKept,
    EvalFinished,
    ExactMatchMeasured,
    ExportWritten,
    Record,
    RunStarted,
)
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.record.validation import NEWEST_ROWS, Best, Score


def fold_of(*events) -> RunSnapshot:
    snapshot = RunSnapshot()
    for number, event in enumerate(events, 1):
        snapshot.apply(Record("run", number, 1000.0 + number, event))
    return snapshot


def evaluated(step: int, loss: float) -> EvalFinished:
    return EvalFinished(step, loss, 5, 0.1, [loss, 2 * loss], [3, 2])


OVERFITTED = [
    RunStarted(total_steps=60),
    evaluated(0, 5.0),
    evaluated(10, 3.0),
    BestKept(10, 3.0, "best/step-10"),
    evaluated(20, 1.0),
    BestKept(20, 1.0, "best/step-20"),
    evaluated(30, 1.0),
    evaluated(40, 2.0),
    evaluated(50, 2.5),
    evaluated(60, 2.75),
]


def test_the_best_is_the_first_of_the_lowest_after_a_step():
    snapshot = fold_of(*OVERFITTED)
    assert snapshot.best == Best(20, 1.0, kept=True) and snapshot.validation.since_best == 4
    assert snapshot.validation.before == Score(0, 5.0)
    assert list(snapshot.evals.step) == [0, 10, 20, 30, 40, 50, 60]


def test_nothing_is_the_best_that_is_no_better_than_before_training():
    """A run with learning rate 5 had a star at 86.4, where it had begun with 6.07."""
    losses = {0: 6.07, 75: 334.0, 150: 239.0, 225: 86.4, 300: 6.07}
    validation = fold_of(
        RunStarted(total_steps=450), *(evaluated(step, loss) for step, loss in losses.items())
    ).validation
    assert validation.best is None and validation.since_best == 4
    assert validation.newest == Score(300, 6.07)
    later = fold_of(
        RunStarted(total_steps=450), evaluated(0, 6.07), evaluated(75, 9.0), evaluated(150, 6.0)
    )
    assert later.best == Best(150, 6.0) and later.validation.since_best == 0
    resumed = fold_of(
        RunStarted(total_steps=450),
        evaluated(0, 6.07),
        evaluated(75, 9.0),
        evaluated(150, 6.0),
        RunStarted(total_steps=450, resumed_step=100),
    )
    assert resumed.best is None and resumed.validation.since_best == 1


def test_the_rows_of_the_newest_evaluations_the_best_and_the_first_are_held():
    rows = fold_of(*OVERFITTED).eval_rows
    assert list(rows) == [0, 20, 30, 40, 50, 60] and len(rows) == NEWEST_ROWS + 2
    assert rows[50] == RowLosses((2.5, 5.0), (3, 2))


def test_a_best_whose_weights_could_not_be_kept():
    snapshot = fold_of(*OVERFITTED, evaluated(70, 0.75))
    assert snapshot.best == Best(70, 0.75) and snapshot.validation.kept == Score(20, 1.0)
    snapshot = fold_of(*OVERFITTED, evaluated(70, 0.75), BestKept(70, 0.75))
    assert snapshot.best == Best(70, 0.75, kept=True)


def test_a_resume_goes_back_to_the_best_before_it():
    """The weights of step 10 are gone, since those of step 20 took their place."""
    snapshot = fold_of(*OVERFITTED, RunStarted(total_steps=60, resumed_step=15))
    assert snapshot.best == Best(10, 3.0) and snapshot.validation.kept is None
    assert list(snapshot.eval_rows) == [0]  # a snapshot holds those of the newest alone
    snapshot = fold_of(*OVERFITTED, RunStarted(total_steps=60, resumed_step=40))
    assert snapshot.best == Best(20, 1.0, kept=True) and snapshot.validation.since_best == 2
    assert list(snapshot.eval_rows) == [0, 20, 30, 40]


def test_a_run_that_begins_at_the_start_again_is_evaluated_again():
    snapshot = fold_of(*OVERFITTED, RunStarted(total_steps=60))
    assert not len(snapshot.evals) and snapshot.best is None
    snapshot = fold_of(*OVERFITTED, RunStarted(total_steps=60), evaluated(0, 0.5))
    assert list(snapshot.evals.step) == [0]


def test_records_of_earlier_versions_have_a_best_without_rows():
    snapshot = fold_of(RunStarted(), EvalFinished(4, 1.0, 5), EvalFinished(8, 2.0, 5))
    assert snapshot.best == Best(4, 1.0) and snapshot.eval_rows == {}
    assert snapshot.exported_step is None
    assert fold_of(RunStarted(), ExportWritten(4)).exported_step == 4


# ---------------------------------------------------------------------- by exact match


def asked(step: int, correct: int, moment: str = "during") -> ExactMatchMeasured:
    return ExactMatchMeasured(step, moment, correct, 10)


BY_ANSWERS = [
    RunStarted(total_steps=50, best_by="exact_match"),
    evaluated(0, 4.0),
    asked(0, 2, "before"),
    evaluated(10, 1.0),
    asked(10, 3),
    evaluated(20, 2.0),
    asked(20, 6),
    BestKept(20, 2.0, "best/step-20", correct=6, total=10),
    evaluated(30, 1.5),
    asked(30, 6),
    evaluated(40, 1.75),
    asked(40, 6),
    evaluated(50, 1.5),
    asked(50, 5),
]


def test_the_best_by_exact_match_has_the_lowest_loss_of_those_with_the_most_answers():
    """The lowest loss is that of step 10, and the first of the most answers are those of 20."""
    validation = fold_of(*BY_ANSWERS).validation
    assert validation.best == Best(30, 1.5, 6, 10) and validation.best.by == "exact_match"
    assert validation.since_best == 2 and validation.kept == Score(20, 2.0, 6, 10)
    assert validation.newest == Score(50, 1.5, 5, 10)
    # Prompts that are asked at the end, of weights that were compared, count no second time.
    again = fold_of(*BY_ANSWERS, asked(30, 6, "after")).validation
    assert again == validation


def test_answers_before_training_are_compared_too():
    begun = [RunStarted(total_steps=50, best_by="exact_match"), evaluated(0, 4.0)]
    worse = fold_of(*begun, asked(0, 9, "before"), evaluated(10, 1.0), asked(10, 8)).validation
    assert worse.best is None and worse.since_best == 1
    # As many are answered, and the loss is lower.
    equal = fold_of(*begun, asked(0, 9, "before"), evaluated(10, 1.0), asked(10, 9)).validation
    assert equal.best == Best(10, 1.0, 9, 10)


def test_an_evaluation_counts_once_its_prompts_are_answered():
    validation = fold_of(*BY_ANSWERS, evaluated(60, 0.5)).validation
    assert validation.best.step == 30 and validation.newest.step == 50
    validation = fold_of(*BY_ANSWERS, evaluated(60, 0.5), asked(60, 7)).validation
    assert validation.best == Best(60, 0.5, 7, 10) and validation.since_best == 0


def test_a_resume_compares_by_what_it_asks_for():
    """One that asks for the loss finds it in all evaluations. One that asks for exact match finds
    none where no prompt was asked.
    """
    on = RunStarted(total_steps=60, resumed_step=40, best_by="exact_match")
    validation = fold_of(*BY_ANSWERS, on).validation
    assert validation.best == Best(30, 1.5, 6, 10) and validation.since_best == 1
    by_loss = fold_of(*BY_ANSWERS, RunStarted(total_steps=60, resumed_step=50)).validation
    assert by_loss.best == Best(10, 1.0) and by_loss.best.by == "loss"
    assert by_loss.kept == Score(20, 2.0) and by_loss.since_best == 4
    by_answers = fold_of(*OVERFITTED, RunStarted(resumed_step=60, best_by="exact_match"))
    assert by_answers.best is None and by_answers.validation.newest is None
    kept = by_answers.validation.kept
    assert kept == Score(20, 1.0) and Score(70, 9.0, 0, 10).is_better_than(kept, "exact_match")
