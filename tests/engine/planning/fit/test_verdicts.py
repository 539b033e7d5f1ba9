"""What a part of a report says of its limit."""

from __future__ import annotations

import pytest

from engine.planning.fit.memory_items import Item, MemoryItem
from engine.planning.fit.requirements import Part, Verdict

ITEMS = (Item(MemoryItem.RUNTIME, 60), Item(MemoryItem.GRAD, 40))


@pytest.mark.parametrize(
    "limit, least, verdict",
    [
        (99, None, Verdict.DOES_NOT_FIT),
        (99, 50, Verdict.DOES_NOT_FIT),
        (100, None, Verdict.TIGHT),
        (111, None, Verdict.TIGHT),
        (112, None, Verdict.FITS),
        (100, 90, Verdict.FITS),
        (100, 91, Verdict.TIGHT),
        (None, None, Verdict.FITS),
    ],
)
def test_a_part_fits_is_tight_or_does_not_fit(limit, least, verdict):
    assert Part(ITEMS, limit, least).verdict == verdict
