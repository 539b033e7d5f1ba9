"""Four people watch one run for half a minute, or for as many as RAMSTREAM_PAGES_MINUTES says.

`python -m tests.browser.pages` tells more of ten people, for longer.
"""

from __future__ import annotations

import os

import pytest

from tests.browser.pages import feeding, measure

pytestmark = pytest.mark.slow("it takes a core for a minute")

MINUTES = float(os.environ.get("RAMSTREAM_PAGES_MINUTES", "0.5"))
PEOPLE = 4
STEP_SECONDS = 4.0
"""Other tests run beside these pages: slower steps leave them space."""


@pytest.fixture(scope="module")
def server(own_server):
    """With nothing else to do."""
    return own_server


def test_pages_follow_one_run(context, server, capsys):
    with feeding(server, STEP_SECONDS) as feed:
        figures = measure(context, server, feed, MINUTES, PEOPLE)
    with capsys.disabled():
        print("", figures.told(), sep="\n")
    assert len(figures.late) == PEOPLE and all(figures.late), "every page has followed the run"
    assert figures.zooms_lost == 0
    assert all(growth <= 0.1 for growth in figures.heap_growth), figures.told()
