"""The parameters of a test, shared between the two tiers that tests/conftest.py describes."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

FAMILY_SWEEP = "it sweeps over every family; a plain run has the eight that are used most"
PLAN_SWEEP = "it sweeps over many plans and delays; a plain run has one way to sum gradients"
BROWSER_FLOWS = "a plain run opens a browser for two flows alone"


def in_tiers(values: Iterable[Any], plain: Container[Any], reason: str) -> list:
    """Returns `values` as parameters of a test. A plain run has those in `plain`; the others wait
    for `--everything`, for `reason`.
    """
    left_out = pytest.mark.everything(reason)
    return [value if value in plain else pytest.param(value, marks=left_out) for value in values]
