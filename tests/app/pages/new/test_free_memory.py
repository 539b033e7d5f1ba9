"""Free memory is the same wherever New tells of it, and does not waver."""

from __future__ import annotations

from dataclasses import replace

import app.pages.new.checker
from app.form.settings_form import shown_values
from engine.text import GIB


def test_free_memory_that_wavers_is_steady(checker, monkeypatch):
    """A verdict does not turn over while somebody looks at it."""
    machine, free = app.pages.new.checker.read_machine("."), []
    monkeypatch.setattr(app.pages.new.checker, "MACHINE_SECONDS", 0.0)
    for gib in (20.0, 20.3, 19.7, 12.0, 12.3):
        gpus = tuple(replace(gpu, free=int(gib * GIB)) for gpu in machine.gpus)
        now = replace(machine, ram_limit=64 * GIB, ram_available=int(gib * GIB), gpus=gpus)
        monkeypatch.setattr(app.pages.new.checker, "read_machine", lambda folder, now=now: now)
        seen = checker._machine()
        free.append((seen.ram_available / GIB, seen.gpus[0].free / GIB))
    assert free == [(20, 20), (20, 20), (20, 20), (12, 12), (12, 12)]


def test_cards_and_the_summary_never_contradict_each_other(checker, monkeypatch):
    monkeypatch.setattr(app.pages.new.checker, "MACHINE_SECONDS", 0.0)
    machine = replace(app.pages.new.checker.read_machine("."), gpus=())
    preset = checker.presets.get("starter.yaml")
    before = shown_values(preset.config)
    for gib in (22.7, 9.1, 5.2):
        now = replace(machine, ram_available=int(gib * GIB))
        monkeypatch.setattr(app.pages.new.checker, "read_machine", lambda folder, now=now: now)
        found = checker.models(preset.file, before)
        for card in found["models"]:
            after = before | {"model.source": card["id"]}
            after |= checker.derived(preset.file, before, after)["changes"]
            panel = checker.fit_panel(after)
            assert panel["can_start"] == card["fits"], (gib, card["title"])
            assert panel["free"] == found["free"]
