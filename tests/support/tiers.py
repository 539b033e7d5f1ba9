"""The parameters of a test, shared between the two tiers that tests/conftest.py describes."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest

FAMILY_SWEEP = "it sweeps over every family; a plain run has the eight that are used most"
NTH = int(os.environ.get("RAMSTREAM_NTH_FAMILY", "7"))
"""Of some sweeps, the second tier has every seventh family, and all of them with 1."""
PLAN_SWEEP = "it sweeps over many plans and delays; a plain run has one way to sum gradients"
BROWSER_FLOWS = "a plain run opens a browser for two flows alone"


def in_tiers(values: Iterable[Any], plain: Container[Any], reason: str) -> list:
    """Returns `values` as parameters of a test. A plain run has those in `plain`; the others wait
    for `--everything`, for `reason`.
    """
    left_out = pytest.mark.everything(reason)
    return [value if value in plain else pytest.param(value, marks=left_out) for value in values]


def nth(families: Sequence[str], always: Container[str], first: int = 0) -> list[str]:
    """Returns every `NTH` family from the number `first` on, and those in `always`. Sweeps that
    begin with different numbers have different families.
    """
    return [
        family
        for place, family in enumerate(families)
        if place % NTH == first % NTH or family in always
    ]
