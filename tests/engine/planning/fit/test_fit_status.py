"""What a part of a report says of its limit."""

from __future__ import annotations

import pytest

from engine.planning.fit.memory_items import Item, MemoryItem
from engine.planning.fit.requirements import FitStatus, Part

ITEMS = (Item(MemoryItem.RUNTIME, 60), Item(MemoryItem.GRAD, 40))


@pytest.mark.parametrize(
    "limit, least, verdict",
    [
        (99, None, FitStatus.DOES_NOT_FIT),
        (99, 50, FitStatus.DOES_NOT_FIT),
        (100, None, FitStatus.TIGHT),
        (111, None, FitStatus.TIGHT),
        (112, None, FitStatus.FITS),
        (100, 90, FitStatus.FITS),
        (100, 91, FitStatus.TIGHT),
        (None, None, FitStatus.FITS),
    ],
)
def test_a_part_fits_is_tight_or_does_not_fit(limit, least, verdict):
    assert Part(ITEMS, limit, least).status == verdict
