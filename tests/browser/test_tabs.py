"""Each tab has a draft of its own: in Chromium, on the real server."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from engine.runs.record.run_folder import open_run
from tests.browser.screen import OPENED_RUN, box, fill, run_of
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)


def opened(context, server, how="goto", page=None):
    page = page or context.new_page()
    page.goto(server.address) if how == "goto" else page.reload()
    page.wait_for_selector("#start:not([disabled])")
    return page


def type_settings(page, name, steps):
    fill(page, "name", name)
    with page.expect_response("**/api/check"):
        fill(page, "train.steps", steps)


def keep_the_draft_back(page):
    """Lets the form wait for its draft until what this returns is empty."""
    is_held = [True]

    def wait(route):
        while is_held:
            page.wait_for_timeout(20)
        route.continue_()

    page.route("**/api/opening", wait)
    return is_held


def shows(page, name, steps):
    expect(box(page, "name")).to_have_value(name)
    expect(box(page, "train.steps")).to_have_value(steps)


def test_two_tabs_of_a_window_keep_a_draft_each(own):
    server, context = own
    first = opened(context, server)
    type_settings(first, "Of the first", "61")
    second = opened(context, server)
    shows(second, "Of the first", "61")  # which it begins with
    type_settings(second, "Of the second", "62")
    type_settings(first, "Still the first", "63")
    opened(context, server, "reload", second)
    shows(second, "Of the second", "62")
    with context.expect_page() as copied:
        first.evaluate("window.open(location.href)")  # takes along what the browser keeps for it
    copied.value.wait_for_selector("#start:not([disabled])")
    shows(copied.value, "Still the first", "63")
    type_settings(copied.value, "Of the copy", "64")
    is_held = keep_the_draft_back(first)
    first.reload()
    name = box(first, "name")
    name.evaluate("box => box.focus()")
    first.keyboard.type("lost")
    expect(first.locator(".rs-train")).to_have_attribute("inert", "")
    assert "lost" not in name.input_value()
    is_held.clear()
    expect(first.locator(".rs-train[inert]")).to_have_count(0)
    shows(first, "Still the first", "63")

    server.end()
    server.start()
    opened(context, server, "reload", first)
    shows(first, "Still the first", "63")
    opened(context, server, "reload", second)
    shows(second, "Of the second", "62")
    second.locator("#start").click()
    expect(second).to_have_url(OPENED_RUN)
    config = open_run(server.runs, run_of(second)).config
    assert (config.name, config.train.steps) == ("Of the second", 62)
