"""The lines of the Summary: what will be trained, how long that takes, what the button says."""

from __future__ import annotations

import pytest

from app.pages.new.receipt import TO_MEASURE, clock, job_lines, ordinal
from app.pages.new.run_length import RunLength
from engine.config.settings import TrainConfig

FOUND = RunLength(passes=3, steps=48, rows=128)


def config(**train):
    given = {
        "model": {"source": "Qwen/Qwen2.5-0.5B"},
        "data": {"source": "/uploads/capitals.csv"},
        "train": train,
    }
    return TrainConfig.from_dict(given)


@pytest.mark.parametrize(
    "train, found, lines",
    [
        (
            {"epochs": 3},
            FOUND,
            ["Qwen2.5 0.5B · all weights", "capitals.csv · 3 passes (48 steps)"],
        ),
        (
            {"steps": 48, "method": "lora", "lora_rank": 8},
            FOUND,
            ["Qwen2.5 0.5B · LoRA, rank 8", "capitals.csv · 48 steps (3 passes)"],
        ),
        ({"steps": 1}, None, ["Qwen2.5 0.5B · all weights", "capitals.csv · 1 step"]),
    ],
)
def test_a_run_is_told_in_two_lines(train, found, lines):
    assert job_lines(config(**train), found) == lines


def test_a_mix_is_told_in_short():
    mix = config(steps=2).with_values({"data.source": [{"source": "a"}, {"source": "b"}]})
    assert job_lines(mix, None)[1] == "a + b · 2 steps"


def test_the_time_is_known_or_why_it_is_not():
    assert clock(54.2, "", "As usual.") == {
        "seconds": 54.2,
        "begins": 0.0,
        "text": "≈ 55 s",
        "why": "",
        "note": "As usual.",
        "to_measure": False,
    }
    assert clock(None, TO_MEASURE)["to_measure"] and clock(None, TO_MEASURE)["text"] == "unknown"
    assert clock(None, "Not in bf16.") == {
        "seconds": None,
        "begins": 0.0,
        "text": "unknown",
        "why": "Not in bf16.",
        "note": "",
        "to_measure": False,
    }


def test_places_in_line():
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th"]
    )
