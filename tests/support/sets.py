"""Parameters of tests of which the plain run has some alone (tests/conftest.py has the sets)."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

FAMILY_SWEEP = "it sweeps over every family; a plain run has the eight that are used most"
PLAN_SWEEP = "it sweeps over many plans and delays; a plain run has one way to sum gradients"
BROWSER_FLOWS = "a plain run opens a browser for two flows alone"


def slow_but(values: Iterable[Any], plain: Container[Any], reason: str) -> list:
    """Returns `values` as parameters of a test. All but those in `plain` are slow, for `reason`."""
    slow = pytest.mark.slow(reason)
    return [value if value in plain else pytest.param(value, marks=slow) for value in values]
