"""Settings that follow a person's own data, once these are read."""

from __future__ import annotations

import pytest

from app.form.presets import read_presets
from app.pages.new.fitting import fitting
from app.pages.new.run_length import RunLength

STARTER = read_presets()["starter.yaml"].config


def test_two_answers_are_learned_as_preferences():
    assert fitting(STARTER, "preference", None) == {"train.objective": "dpo"}
    kto = STARTER.with_values({"train.objective": "kto"})
    assert fitting(kto, "preference", None) == fitting(STARTER, "messages", None) == {}


def test_few_rows_have_a_smaller_batch_and_are_evaluated_within_the_run():
    few = RunLength(passes=3, steps=6, rows=16)  # two steps a pass, of eight rows
    assert fitting(STARTER, "messages", few) == {
        "train.batch_size": 2,
        "train.micro_batch_size": "auto",
        "train.warmup_steps": 2,
        "output.eval_every": 4,
    }
    assert fitting(STARTER, "messages", RunLength(passes=3, steps=3000, rows=8000)) == {}


@pytest.mark.parametrize(
    "rows, kept, share",
    [(38, 2, 0.2), (4, 1, None), (95, 5, 0.2), (380, 15, 0.06), (3000, 120, None), (40, 0, None)],
)
def test_enough_of_few_rows_are_kept_for_validation(rows, kept, share):
    found = RunLength(passes=3, steps=300, rows=rows, validation=kept)
    assert fitting(STARTER, "messages", found).get("data.eval_fraction") == share
