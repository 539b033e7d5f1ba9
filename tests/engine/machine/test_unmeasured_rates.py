"""Rates of optimizers that were not measured on this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.optimizers import OPTIMIZERS
from engine.machine import rates
from tests.support.chosen import FAST_RATES


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (4, 4), (8, 6), (16, 14), (64, 32)])
def test_muon_is_as_fast_as_its_threads(monkeypatch, cores, threads):
    monkeypatch.setattr(rates, "usable_cores", lambda: cores)
    assert FAST_RATES.updates("muon") == OPTIMIZERS["muon"].thread_rate * threads
    assert FAST_RATES.updates("adamw_8bit") == FAST_RATES.adamw
    measured = replace(FAST_RATES, others=(("muon", 3e6),))
    assert measured.updates("muon") == 3e6
