"""What is offered where a job does not fit makes it fit, or is said to be out of reach."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import app.pages.new.checker
from engine.machine.known_machines import named_machine, with_figures
from engine.text import GIB
from tests.support.forms import shown


@pytest.mark.parametrize(
    "gpu, ram, disk, model, others",
    [
        ("RTX 3060", 16, 100, "Qwen/Qwen2.5-7B", {}),
        ("RTX 3060", 32, 40, "Qwen/Qwen2.5-7B", {"data__max_seq_len": 4096}),
        (
            "RTX 3060",
            32,
            40,
            "HuggingFaceTB/SmolLM2-1.7B",
            {"output__checkpoint_every": 10, "output__keep_checkpoints": 5},
        ),
        ("RTX 4090", 32, 200, "Qwen/Qwen2.5-7B", {"data__max_seq_len": 4096}),
        (None, 24, 100, "HuggingFaceTB/SmolLM2-1.7B", {"data__max_seq_len": 4096}),
        (None, 48, 100, "Qwen/Qwen2.5-7B", {"train__batch_size": 64}),
    ],
)
def test_the_recommended_change_fits_once_it_is_applied(
    checker, monkeypatch, gpu, ram, disk, model, others
):
    machine = with_figures(named_machine(gpu or "RTX 4090", ram), disk_gib=disk)
    machine = machine if gpu else replace(machine, gpus=())
    monkeypatch.setattr(app.pages.new.checker, "read_machine", lambda folder: machine)
    given = shown(model__source=model, **others)
    found = checker.fit_panel(given)
    assert not found["can_start"]
    best = [each for each in found["suggestions"] if each["is_recommended"]]
    assert best == found["suggestions"][:1] and best
    after = given | best[0]["changes"]
    after |= checker.derived(None, given, after)["changes"]
    found = checker.fit_panel(after)
    assert found["can_start"], found["reasons"]
    assert not any(each["is_recommended"] for each in found["suggestions"])


def test_what_other_programs_hold_is_told_where_freeing_it_would_help(checker, monkeypatch):
    machine = replace(app.pages.new.checker.read_machine("."), gpus=(), ram_limit=24 * GIB)
    given = shown(model__source="HuggingFaceTB/SmolLM2-135M", data__max_seq_len=64)
    told = {}
    for free in (1, 0.5):
        now = replace(machine, ram_available=int(free * GIB))
        monkeypatch.setattr(app.pages.new.checker, "read_machine", lambda folder, now=now: now)
        monkeypatch.setattr(checker, "_read", (0.0, None))
        told[free] = checker.fit_panel(given)["reasons"][0]
    assert "more RAM. Other programs use 23.0 GiB of RAM: close some of them." in told[1]
    assert told[0.5] != told[1]
    small = replace(machine, ram_available=GIB, ram_limit=2 * GIB)
    monkeypatch.setattr(app.pages.new.checker, "read_machine", lambda folder: small)
    monkeypatch.setattr(checker, "_read", (0.0, None))
    assert checker.fit_panel(given)["reasons"][0].endswith(
        "more RAM. Choose a smaller model or another machine."
    )


def test_where_no_change_suffices_the_nearest_one_is_told_and_taken(checker, monkeypatch):
    machine = with_figures(named_machine("RTX 4090", 24), disk_gib=500)
    machine = replace(machine, gpus=(), ram_limit=26 * GIB, ram_available=16 * GIB)
    monkeypatch.setattr(app.pages.new.checker, "read_machine", lambda folder: machine)
    given = shown(model__source="Qwen/Qwen2.5-7B")
    found = checker.fit_panel(given)
    (told,) = found["reasons"]
    assert not found["suggestions"]
    assert told.startswith("The nearest is to train an add-on (LoRA)")
    assert told.endswith("more RAM. Other programs use 10.0 GiB of RAM: close some of them.")
    fix = found["fixes"][told]
    assert fix["label"] == "Train an add-on (LoRA)"
    assert fix["changes"]["train.method"] == "lora"
    lacks = re.search(r"needs ([\d.]+ GiB) more RAM", told)[1]
    after = checker.fit_panel(given | fix["changes"])
    assert f"needs {lacks} more RAM" in after["reasons"][0]
