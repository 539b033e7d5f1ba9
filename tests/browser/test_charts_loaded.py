"""plotly.js, the largest file of the page, is loaded when a chart is needed, and a failure to load
it can be mended.
"""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.screen import address, open_run, recorded_run
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

PLOTLY = re.compile(r"/ramstream/plotly-\w+\.js")
DRAWN = "name => performance.getEntriesByName(`drawn ${name}`).length > 0"


def test_new_draws_its_bars_without_plotly_and_a_run_that_is_opened_loads_it(blank, server):
    run = recorded_run(server, 20).id
    asked = []
    blank.on("request", lambda request: asked.append(request.url))
    blank.goto(f"{server.address}/?show=new")
    blank.wait_for_selector("#start:not([disabled])")
    bars = blank.locator(".rs-lengths-plot .rs-bars i")
    expect(bars.first).to_be_visible()
    assert re.search(r"^\d.* tokens?: [\d,]+ examples?$", bars.first.get_attribute("title"))
    assert not [url for url in asked if PLOTLY.search(url)]
    open_run(blank, run)
    blank.wait_for_function(DRAWN, arg="loss")
    assert len([url for url in asked if PLOTLY.search(url)]) == 1


def test_charts_that_cannot_be_loaded_say_so_once_and_a_click_loads_them(blank, server):
    run = recorded_run(server, 20).id
    blank.route(PLOTLY, lambda route: route.abort())
    blank.goto(address(server, run, "machine"))
    notice = blank.get_by_text("The charts could not be loaded: the server does not answer.")
    expect(notice).to_be_visible()
    expect(notice).to_have_count(1)
    blank.unroute(PLOTLY)
    again = blank.get_by_role("button", name="Try again")
    again.focus()
    again.press("Enter")
    for chart in ("throughput", "timeline"):
        blank.locator(f"[data-figure={chart}]").scroll_into_view_if_needed()
        blank.wait_for_function(DRAWN, arg=chart)
    expect(notice).to_have_count(0)
    assert blank.evaluate("document.activeElement !== document.body")
