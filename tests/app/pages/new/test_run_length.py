"""How many passes some steps are, and how many steps some passes are."""

from __future__ import annotations

import dataclasses

import pytest

from app.pages.new.run_length import Sample, run_length, run_length_text
from engine.config.settings import TrainConfig

SAMPLE = Sample(rows=200, skipped=0, lengths=(100,) * 200, percent_filled=None, is_all=False)
PACKED = dataclasses.replace(SAMPLE, percent_filled=80.0)


def config(**values):
    plain = {"model": {"source": "m"}, "data": {"source": "d"}, "train": {"steps": 100}}
    base = TrainConfig.from_dict(plain).with_values(
        {"train.batch_size": 10, "data.eval_fraction": 0.0, "data.max_seq_len": 1000}
    )
    return base.with_values({name.replace("__", "."): value for name, value in values.items()})


def test_steps_are_passes_over_the_rows_that_are_trained():
    found = run_length(config(), SAMPLE, 2000)
    assert found.passes == pytest.approx(0.5) and found.rows == 2000
    held = run_length(config(data__eval_fraction=0.5), SAMPLE, 2000)
    assert held.passes == pytest.approx(1.0) and held.rows == held.validation == 1000
    half = run_length(
        config(), dataclasses.replace(SAMPLE, skipped=100, lengths=(100,) * 100), 2000
    )
    assert half.passes == pytest.approx(1.0) and half.rows == 1000


def test_packed_rows_hold_several_documents():
    """Eight documents of 100 tokens fill a row of 1,000 to 80 %."""
    assert run_length(config(), PACKED, 2000).passes == pytest.approx(100 / (2000 / 8 / 10))
    cut = dataclasses.replace(PACKED, lengths=(5000,) * 200, percent_filled=100.0)
    assert run_length(config(), cut, 2000).passes == pytest.approx(100 / (2000 / 10))


def test_passes_are_steps():
    found = run_length(config(train__steps=None, train__epochs=3.0), SAMPLE, 2000)
    assert found.steps == pytest.approx(600)
    text = run_length_text(config(train__steps=None, train__epochs=3.0), found, 2.0 * found.steps)
    assert text == "3 passes over your 2,000 rows ≈ 600 steps · ≈ 20 min"


def test_rows_that_are_kept_for_validation_are_told_where_fewer_are_trained():
    few = dataclasses.replace(SAMPLE, rows=40, lengths=(100,) * 40, is_all=True)
    asked = config(train__steps=None, train__epochs=3.0, data__eval_fraction=0.04)
    found = run_length(asked, few, None)
    assert (found.rows, found.validation) == (38, 2)
    text = run_length_text(asked, found, 3.0)
    assert text == (
        "3 passes over your 38 rows ≈ 11 steps · a few seconds. "
        "2 of 40 rows are kept for validation."
    )


def test_the_number_of_rows_must_be_known():
    assert run_length(config(), SAMPLE, None) is None
    whole = dataclasses.replace(SAMPLE, is_all=True)
    assert run_length(config(), whole, None).passes == pytest.approx(5)
    assert run_length(config(), dataclasses.replace(SAMPLE, lengths=()), 2000) is None
    assert run_length_text(config(), None, None) == ""


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (100, "100 steps ≈ 0.5 passes over your 2,000 rows · ≈ 1 min 40 s"),
        (1, "1 step ≈ less than 0.01 passes over your 2,000 rows · a few seconds"),
        (200, "200 steps ≈ 1 pass over your 2,000 rows · ≈ 3 min 20 s"),
        (9000, "9,000 steps ≈ 45 passes over your 2,000 rows · ≈ 2 h 30 min"),
    ],
)
def test_it_is_one_line(steps, words):
    asked = config(train__steps=steps)
    assert run_length_text(asked, run_length(asked, SAMPLE, 2000), float(steps)) == words


def test_many_passes_over_few_rows_are_doubted():
    few = dataclasses.replace(SAMPLE, is_all=True)
    assert run_length(config(train__steps=500), few, None).warning is None
    found = run_length(config(train__steps=800), few, None)
    assert found.warning.startswith("About 40 passes over 200 rows make the model memorize them")
    one = Sample(rows=1, skipped=0, lengths=(9,), percent_filled=None, is_all=True)
    assert "over a single row make" in run_length(config(), one, None).warning
    assert run_length(config(train__steps=10**6), SAMPLE, 2000).warning is None
