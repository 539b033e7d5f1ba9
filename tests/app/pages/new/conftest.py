from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import app.pages.new.checker
from app.pages.new.checker import Checker
from engine.machine.known_machines import named_machine, with_figures
from engine.model.build.find_shape import adapted_shape
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.report import estimate


@pytest.fixture
def checker(tmp_path, monkeypatch):
    """Returns a checker on a machine with an RTX 4090, 52 GiB of RAM and 500 GiB of disk. Its
    `calls` counts estimates.
    """
    machine = with_figures(named_machine("RTX 4090", 52), disk_gib=500)
    monkeypatch.setattr(app.pages.new.checker, "read_machine", lambda folder: replace(machine))
    calls = []

    def counted_estimate(config, machine):
        calls.append(config)
        return estimate(config, machine, shape_of_run(config), adapted=adapted_shape)

    made = Checker(
        SimpleNamespace(
            runs_dir=tmp_path,
            runs=lambda: made.runs,
            why_not_start=lambda: None,
            served_id=None,
            engine=SimpleNamespace(
                estimate=counted_estimate,
                refuse_out_of_reach=lambda *_, **__: None,
                downloads_weights=lambda config: False,
            ),
        )
    )
    made.calls, made.runs = calls, []
    return made
