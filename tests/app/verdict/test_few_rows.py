"""A verdict says how many validation rows it rests on, and is calm where these are few."""

from __future__ import annotations

import pytest

from app.form.settings_form import as_labeled
from app.pages.run.head import head
from app.verdict.findings import Finding, Verdict
from app.verdict.judge import verdict
from app.verdict.outcome import outcome
from engine.runs.record.events import DataPrepared, EvalFinished, RunEnded
from engine.training.checkpoints.saved_on_disk import SavedSteps
from tests.app.verdict.made_runs import evaluated, fold, steps

LEARNED = (EvalFinished(step=0, loss=4.0, loss_tokens=2000), *evaluated(2.0, 1.0, 0.5))
MEMORIZED = (EvalFinished(step=0, loss=4.0, loss_tokens=2000), *evaluated(3.5, 3.6, 3.6))


@pytest.mark.parametrize(("evals", "word"), [(LEARNED, "Learned"), (MEMORIZED, "Memorized")])
def test_an_outcome_of_few_validation_rows_is_calm_and_says_so(evals, word):
    for rows, is_few in ((2, True), (38, False)):
        made = steps(loss=lambda step: 4.0 / step**2)
        data = DataPrepared({"eval_examples": rows})
        snapshot = fold(data, *made, *evals, RunEnded("finished"))
        judged = verdict(snapshot, "finished")
        found = outcome(snapshot, judged)
        shown = head(snapshot, "finished", SavedSteps(100, 100), judged)
        assert found.word == ("Cannot tell yet" if is_few else word)
        assert (found.tone == "calm") is (shown["tone"] == "calm") is is_few
        assert ("only 2 validation rows" in shown["text"]) is is_few
        assert is_few or "Judged by 38 validation rows." in judged.main.evidence


def test_a_run_that_goes_on_says_it_too():
    snapshot = fold(DataPrepared({"eval_examples": 1}), *steps(60), *evaluated(2.0, 1.0))
    judged = verdict(snapshot, "running")
    shown = head(snapshot, "running", SavedSteps(None, None), judged)
    assert (shown["title"], shown["tone"]) == ("Learning well", "calm")
    assert shown["text"] == "Judged by only 1 validation row: 20 are needed to be sure."
    assert "Validation share" in as_labeled(judged.also[0].advice)


def test_the_head_names_settings_by_their_labels():
    snapshot = fold(*steps(60))
    slow = Verdict(Finding("speed", "warn", "The GPU waits.", "Set data.eval_fraction."))
    shown = head(snapshot, "running", SavedSteps(None, None), slow)
    assert shown["text"] == "Set Validation share."
