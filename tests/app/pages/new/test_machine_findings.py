"""What was found on the machine, in the Summary of a new run."""

from __future__ import annotations

from dataclasses import replace

import pytest

import app.pages.new.checker
from engine.errors import ConfigError
from engine.machine.findings import Check, Effect, Finding
from tests.support.forms import shown

UNUSED = Finding(Check.TORCH, "PyTorch is built without CUDA.", Effect.NO_GPU, "pip install torch")
SLOW_BF16 = Finding(Check.BF16, "This card has no bfloat16.", Effect.SLOWS, "--set model.dtype=...")
NO_COMPILER = Finding(Check.KERNELS, "There is no compiler.", Effect.SLOWS)
LIMIT = Finding(Check.RAM, "A control group limits RAM.", Effect.NOTE)


def test_a_run_takes_the_cpu_only_once_a_person_says_so(checker, monkeypatch):
    machine = app.pages.new.checker.read_machine(".")
    asking = replace(machine, findings=(UNUSED, LIMIT))
    monkeypatch.setattr(app.pages.new.checker, "read_machine", lambda folder: asking)
    asked = checker.fit_panel(shown())
    assert asked["headline"] == "1 thing to confirm" and asked["tone"] == "warn"
    assert asked["why_not"] == asked["reasons"][0] == UNUSED.sentence
    assert not asked["can_start"] and not asked["can_queue"]
    fix = asked["fixes"][UNUSED.sentence]
    assert fix == {"label": "Train on the CPU", "changes": {"engine.device": "cpu"}}
    with pytest.raises(ConfigError, match="without CUDA"):
        checker.read_trainable(shown())
    confirmed = checker.fit_panel(shown() | fix["changes"])
    assert confirmed["can_start"] and UNUSED.sentence not in confirmed["reasons"]
    # A job that does not fit says so first.
    too_large = checker.fit_panel(shown(model__source="Qwen/Qwen2.5-72B"))
    assert too_large["headline"] == "Does not fit" and UNUSED.sentence in too_large["reasons"]


def test_what_slows_a_run_here_is_a_warning_where_it_concerns_the_run(checker, monkeypatch):
    slow = replace(
        app.pages.new.checker.read_machine("."), findings=(SLOW_BF16, NO_COMPILER, LIMIT)
    )
    monkeypatch.setattr(app.pages.new.checker, "read_machine", lambda folder: slow)
    found = checker.fit_panel(shown())
    assert found["can_start"] and found["headline"] == "Fits, with 2 warnings"
    assert {SLOW_BF16.sentence, NO_COMPILER.sentence} <= set(found["reasons"])
    assert LIMIT.sentence not in found["reasons"]
    fix = found["fixes"][SLOW_BF16.sentence]
    assert fix == {"label": "Compute in float32", "changes": {"model.dtype": "float32"}}
    in_float32 = checker.fit_panel(shown() | fix["changes"])["reasons"]
    assert SLOW_BF16.sentence not in in_float32 and NO_COMPILER.sentence in in_float32
    on_cpu = checker.fit_panel(shown(engine__device="cpu"))["reasons"]
    assert not {SLOW_BF16.sentence, NO_COMPILER.sentence} & set(on_cpu)
