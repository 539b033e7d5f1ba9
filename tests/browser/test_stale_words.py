"""What a page says stays true while things change around it: Chat after a run has ended, the line
over a run while another one begins, and notifications that a browser refuses; in Chromium.
"""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.screen import (
    address,
    bar,
    expect_finished,
    note,
    open_page,
    open_view,
    recorded_run,
)
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

REFUSED = """window.Notification = class {
  static permission = 'default';
  static requestPermission() { return Promise.resolve(Notification.permission = 'denied'); }
};"""
NEXT = "20990101-000000-next"
BUSY = "Next is training."


def test_chat_the_line_over_a_run_and_the_switch_say_what_is_true_now(blank, server):
    page = blank
    folder = recorded_run(server, 20, "Ended")
    (folder.best_path / "step-10").mkdir(parents=True)
    page.add_init_script(REFUSED)
    busy = {"is": True}

    def live(route):
        """The same answer, with another run under way here."""
        response = route.fetch()
        body = response.json()
        active = {"active": NEXT, "other_active": "Next"} if busy["is"] else {"active": None}
        route.fulfill(response=response, json=body | active)

    def choices(route):
        response = route.fetch()
        said = {"busy": BUSY, "pause": NEXT} if busy["is"] else {"busy": "", "pause": ""}
        route.fulfill(response=response, json=response.json() | said)

    def control(route):
        """Pauses the run: it then keeps nobody from a chat."""
        assert route.request.post_data_json == {"command": "pause"}
        busy["is"] = False
        route.fulfill(json={"run_id": NEXT})

    page.route(f"**/api/live/{folder.id}*", live)
    page.route("**/api/chat/choices", choices)
    page.route(f"**/api/runs/{NEXT}/control", control)
    page.goto(address(server, folder.id))
    expect_finished(page)

    # The run that began meanwhile is one click away, and goes again with its end.
    other = bar(page, "other")
    expect(other).to_contain_text("Next is training.")
    expect(other.get_by_role("button", name="Show it")).to_be_visible()
    open_view(page, "chat")
    needed = page.locator(".rs-chat-closed")
    expect(needed).to_contain_text(BUSY)
    needed.get_by_role("button", name="Pause and chat").click()
    expect(needed).to_be_hidden()
    expect(other).to_be_hidden()

    # A refusal is told in words, not in a tooltip alone.
    page.get_by_role("button", name="Notify me").click()
    expect(note(page)).to_contain_text("The browser blocks notifications of this page")
    expect(page.get_by_role("button", name="Notify me")).to_have_attribute("aria-pressed", "false")


def test_an_answer_that_breaks_off_is_none(blank, server):
    """The error of a script would fail the test, as in any other."""
    page, cut = blank, []

    def cut_off(route):
        body = route.fetch().text()
        cut.append(route.request.url)
        route.fulfill(status=200, content_type="application/json", body=body[: len(body) // 2])

    addresses = ("**/api/runs?*", "**/api/hardware/largest", "**/api/recent")
    for address_of in addresses:
        page.route(address_of, cut_off)
    page.goto(f"{server.address}/?show=hardware")
    largest = page.locator(".rs-hardware [data-field=largest]")
    expect(largest).to_have_text("The server does not answer.")
    open_page(page, "runs")
    expect(note(page)).to_contain_text("Connection lost")
    assert len({url.partition("?")[0] for url in cut}) == len(addresses)
    for address_of in addresses:
        page.unroute(address_of)
    expect(note(page)).not_to_contain_text("Connection lost")
