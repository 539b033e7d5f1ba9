"""Nothing jumps while a page opens, and a person without a pointer gets past the sidebar."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.layout_shifts import assert_still, observe_opening
from tests.browser.screen import address, recorded_run
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

OPENED = {
    "new": "#start:not([disabled])",
    "overview": "[data-figure=loss] .main-svg",
    "runs": ".rs-runs [data-part=rows] tr[data-run]",
    "chat": ".rs-chat select option",
    "hardware": "[data-ready] .rs-grid tbody tr",
}
"""What the page shows when it is there."""
SETTLES = 500
"""ms in which more may arrive."""


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("name", OPENED)
def test_nothing_jumps_while_a_page_opens(blank, server, name, width):
    run = recorded_run(server, 60).id
    blank.set_viewport_size({"width": width, "height": 900})
    observe_opening(blank)
    blank.goto(address(server, run) if name == "overview" else f"{server.address}/?show={name}")
    blank.wait_for_selector(OPENED[name], state="attached")
    blank.wait_for_timeout(SETTLES)
    assert_still(blank)
    # Gradio makes the sidebar and the rest one after the other; either may be painted first.
    main = blank.locator("#rs-main")
    there = main.bounding_box()
    blank.evaluate("document.querySelector('#rs-sidebar').remove()")
    alone = main.bounding_box()
    assert (alone["x"], alone["y"]) == pytest.approx((there["x"], there["y"]), abs=1)


def test_the_first_tab_offers_to_skip_the_sidebar_and_the_address_stays(blank, server):
    recorded_run(server, 20)
    blank.goto(f"{server.address}/?show=runs")
    blank.wait_for_selector(OPENED["runs"])
    skip = blank.get_by_role("link", name="Skip to the content")
    blank.keyboard.press("Tab")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    blank.keyboard.press("Enter")
    expect(blank.locator("#rs-main")).to_be_focused()
    assert blank.url == f"{server.address}/?show=runs"
    blank.keyboard.press("Tab")
    assert blank.evaluate("document.activeElement.closest('#rs-main') !== null")


def test_a_list_of_the_form_keeps_the_focus_when_something_was_chosen_in_it(page):
    box = page.get_by_role("combobox", name="Start from a preset")
    before = box.input_value()
    box.focus()
    expect(page.get_by_role("option").first).to_be_visible()
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    expect(box).not_to_have_value(before)
    expect(page.get_by_role("option")).to_have_count(0)
    expect(box).to_be_focused()
    page.keyboard.press("Tab")
    expect(box).not_to_be_focused()
    assert page.evaluate("document.activeElement !== document.body")
