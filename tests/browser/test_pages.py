"""Ten people watch one run for a minute, or for as many as RAMSTREAM_PAGES_MINUTES says.

`python -m tests.browser.pages` tells more, for longer.
"""

from __future__ import annotations

import os

import pytest

from tests.browser.pages import PAGES, feeding, measure

pytestmark = pytest.mark.everything("it takes a core for two minutes")

MINUTES = float(os.environ.get("RAMSTREAM_PAGES_MINUTES", "1"))
STEP_SECONDS = 4.0
"""Other tests run beside these pages: slower steps leave them space."""


@pytest.fixture(scope="module")
def server(own_server):
    """With nothing else to do."""
    return own_server


def test_ten_pages_follow_one_run_for_minutes(context, server, capsys):
    with feeding(server, STEP_SECONDS) as feed:
        figures = measure(context, server, feed, MINUTES)
    with capsys.disabled():
        print("", figures.told(), sep="\n")
    assert len(figures.late) == PAGES and all(figures.late), "every page has followed the run"
    assert figures.zooms_lost == 0
    assert all(growth <= 0.1 for growth in figures.heap_growth), figures.told()
