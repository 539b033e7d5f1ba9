"""Evaluate answers whether training helped: yes, no, or why nobody can tell."""

from __future__ import annotations

import pytest

from app.pages.run.did_it_help import did_it_help
from app.pages.run.evaluation_details import evaluation_details, figure_row
from app.session.session import Session
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.evaluation_figures import AHEAD, LOSS, RIGHT, Figure, Interval
from engine.runs.summaries.evaluation_results import (
    Began,
    LossMeasured,
    Wanted,
    append_evaluation,
)
from tests.support.sessions import finished_run


def loss(base, trained, interval, count=38):
    return Figure(LOSS, "loss", base, trained, interval, False, count, "rows")


def right(base, trained, interval, count=38):
    return Figure(RIGHT, "share", base, trained, interval, True, count, "prompts")


FELL, ROSE, GAINED = Interval(-2.0, -1.0), Interval(0.5, 1.5), Interval(0.8, 1.0)
BY_CHANCE = Interval(-0.1, 0.1)


@pytest.mark.parametrize(
    ("figures", "word", "tone", "said"),
    [
        (
            [loss(2, 1, FELL), right(0, 0.9, GAINED)],
            "Yes, against the base model",
            "good",
            "trained 90 %.",
        ),
        (
            [loss(2, 1, FELL), right(0, 0, BY_CHANCE)],
            "Yes, against the base model",
            "good",
            "No answer is right yet.",
        ),
        (
            [loss(2, 3, ROSE), right(0, 0.9, GAINED)],
            "Yes, against the base model",
            "calm",
            "But worse: Validation loss.",
        ),
        (
            [loss(2, 3, ROSE), right(0, 0, BY_CHANCE)],
            "No, against the base model",
            "bad",
            "Try a lower learning rate",
        ),
        ([loss(2, 2, BY_CHANCE)], "Cannot tell yet", "calm", "With 38 rows"),
        ([loss(6, 0.1, None, 2)], "Cannot tell yet", "calm", "Only 2 validation rows: "),
        ([loss(6, 0.1, None, 1)], "Cannot tell yet", "calm", "Only 1 validation row: 20 are"),
        ([right(0, 1, None, 3)], "Cannot tell yet", "calm", "Only 3 prompts: 20 are"),
        ([loss(6, 0.1, None, 38)], "Cannot tell yet", "calm", "different rows"),
        ([loss(6, None, None)], "Cannot tell yet", "calm", "The trained model is not evaluated"),
        ([loss(None, 1, None)], "Cannot tell yet", "calm", "The base model is not evaluated"),
        (
            [Figure(AHEAD, "share", 0.5, 0.9, GAINED, True, 38, "pairs")],
            "Yes, against the base model",
            "good",
            AHEAD,
        ),
        (
            [Figure("arc: acc", "share", 0.5, 0.4, ROSE, False, 9, "samples")],
            "No, against the base model",
            "bad",
            "arc",
        ),
    ],
)
def test_there_is_always_an_answer_and_its_reason(figures, word, tone, said):
    answer = did_it_help(figures, lambda figure, value: figure_row(figure)["trained"])
    assert (answer.word, answer.tone) == (word, tone) and said in answer.text
    if word == "Cannot tell yet" and "evaluat" not in answer.text:
        assert "Validation share" in answer.text, "nothing says what to do"


def test_few_rows_are_told_in_the_table_too():
    assert figure_row(loss(6, 0.1, None, 2))["word"] == "too few rows to tell"
    row = figure_row(loss(2, 1, FELL))
    assert (row["word"], row["interval"]) == ("better", "−2.00 to −1.00")


def test_nothing_is_answered_before_an_evaluation_and_the_base_of_a_continued_run_is_told(tmp_path):
    session = Session(tmp_path / "runs")

    def shown(folder):
        return evaluation_details(folder, RunSnapshot(), False, False, None)

    first = finished_run(session, name="First")
    assert shown(first)["helped"] is None
    then = finished_run(session, name="Then", **{"model.start_from": str(first.path)})
    began = Began("1", Wanted(), "export", 7, "float32", "", 0.0)
    for run in (first, then):
        append_evaluation(run.path, began)
        append_evaluation(run.path, LossMeasured("1", "trained", 1.0, [1.0], [9]))
    assert "began with" not in shown(first)["helped"]["text"]
    assert "Overview compares it with First, the run" in shown(then)["helped"]["text"]


@pytest.mark.parametrize(("before", "tone"), [(1.5, "good"), (0.5, "calm")])
def test_the_weights_that_a_continued_run_began_with_are_told_too(before, tone):
    figures = [loss(2, 1, FELL)]
    answer = did_it_help(figures, lambda _, value: f"{value:.3f}", "First", before)
    assert (answer.word, answer.tone) == ("Yes, against the base model", tone)
    text = f"Against First, the run that it continues: validation loss {before:.3f} → 1.000."
    assert answer.text.endswith(text)
