"""Comparison of the planes of two `HostStates`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from engine.planning.layout.layout import UnitLayout
from engine.runtime.host.host_states import HostStates


def assert_same_planes(
    found: HostStates, expected: HostStates, layouts: Iterable[UnitLayout], planes: Iterable[str]
) -> None:
    """Checks that the planes of both have the same sizes and contents, whole and in part, and so
    have all weights and masters that are read from them.
    """
    planes = list(planes)
    for layout in layouts:
        unit = layout.unit
        for plane in planes:
            size = expected.nbytes(unit, plane)
            assert found.nbytes(unit, plane) == size
            for begin, end in ((0, size), (size // 3, size), (size // 2 - 1, size // 2 + 1)):
                content = expected.content(unit, plane, begin, end)
                assert np.array_equal(found.content(unit, plane, begin, end), content)
        for spec in layout.parameters:
            for read in ("weight", "master"):
                ours, theirs = (getattr(each.parameters, read) for each in (found, expected))
                assert torch.equal(ours(unit, spec.name), theirs(unit, spec.name)), read
