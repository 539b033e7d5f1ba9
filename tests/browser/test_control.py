"""Changing a run while it goes on, being told of its end, and coming in by the link that works
once; in Chromium.
"""

from __future__ import annotations

import re
import signal

import pytest
from playwright.sync_api import expect

from engine.runs.record.events import SettingsChanged
from engine.runs.record.following import EVENTS_FILE, replay
from tests.browser.screen import (
    bar,
    expect_finished,
    fill,
    open_view,
    press,
    start_short_run,
    state,
)
from tests.support.browser import WAIT_MILLISECONDS, Server
from tests.support.ports import free_port
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

NOTIFICATIONS = """window.told = [];
window.Notification = class extends EventTarget {
  constructor(title, options) { super(); window.told.push([title, options.body]); }
  static permission = 'default';
  static requestPermission() { return Promise.resolve(Notification.permission = 'granted'); }
};
Object.defineProperty(document, 'hidden', {get: () => window.away ?? false});"""

UNDER_THE_NOTE = """() => {
  const note = document.querySelector('.rs-bar-note[data-passes]').getBoundingClientRect();
  return [...document.querySelectorAll('button, a, summary')].filter((node) => {
    const box = node.getBoundingClientRect();
    return node.checkVisibility() && box.width && box.bottom > note.top && box.top < note.bottom
      && box.right > note.left && box.left < note.right;
  }).map((node) => node.outerHTML);
}"""


def test_a_run_is_changed_and_tells_when_it_is_over(page, server):
    page.add_init_script(NOTIFICATIONS)
    page.reload()
    page.wait_for_selector("#start:not([disabled])")
    run_id = start_short_run(page, "Changed", steps=100_000)
    expect(state(page)).to_have_text("Running")
    page.get_by_role("button", name="Notify me").click()
    expect(page.get_by_role("button", name="Will notify")).to_have_attribute("aria-pressed", "true")

    # By keyboard alone: open, a wrong number of steps, a right one.
    page.locator(".rs-actions").get_by_role("button", name="More").focus()
    for key in ("Enter", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    dialog = page.get_by_role("dialog", name="Edit this run")
    expect(dialog.get_by_label("Total steps")).to_have_value("100000")
    expect(dialog.get_by_label("Total steps")).to_be_focused()
    dialog.get_by_label("Learning rate (peak)").fill("-1")
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    dialog.get_by_label("Learning rate (peak)").fill("0.0007")
    done = int(re.match(r"[\d,]+", bar(page, "step").inner_text()).group().replace(",", ""))
    dialog.get_by_label("Total steps").fill(str(done + 40))
    expect(dialog).to_contain_text(f"falls until step {done + 40:,} instead of 100,000.")
    height = page.locator(".rs-bar").bounding_box()["height"]
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(bar(page, "note")).to_have_text("The new values take effect at the next step.")
    assert page.locator(".rs-bar").bounding_box()["height"] == height, "It moves the page."
    assert not page.evaluate(UNDER_THE_NOTE), "It lies over buttons."
    page.evaluate("window.away = true")
    expect_finished(page)
    assert [title for title, _ in page.evaluate("window.told")] == ["Changed: finished"]
    page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    (changed,) = [
        record.event
        for record in replay(server.runs / run_id / EVENTS_FILE)
        if isinstance(record.event, SettingsChanged)
    ]
    assert changed.values == {"train.learning_rate": 0.0007, "train.steps": done + 40}
    open_view(page, "settings")
    main = page.locator('[data-part="settings-main"]')
    expect(main).to_contain_text(f"Length{done + 40} steps")
    expect(main).to_contain_text(f"falls until step {done + 40}")
    open_view(page, "log")
    expect(page.locator(".rs-log")).to_contain_text(f"steps 100,000 → {done + 40}")
    expect(bar(page, "step")).to_have_text(f"{done + 40:,} of {done + 40:,}")


def test_less_steps_than_are_done_are_refused_in_the_dialog(page):
    start_short_run(page, "Kept", steps=100_000)
    expect(bar(page, "step")).to_have_text(re.compile(r"^[\d,]*\d\d of"))
    press(page, "change")
    dialog = page.get_by_role("dialog", name="Edit this run")
    dialog.get_by_label("Total steps").evaluate("box => { box.min = 1; box.value = 1; }")
    dialog.get_by_role("button", name="Apply").click()
    expect(dialog.get_by_role("alert")).to_contain_text("fewer than the")
    dialog.get_by_role("button", name="Cancel").click()
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")


@pytest.fixture
def guarded(tmp_path):
    server = Server(tmp_path, free_port(), {"RAMSTREAM_LOGIN": "me:secret"})
    server.start()
    yield server
    server.end(signal.SIGKILL)


def test_the_link_logs_in_once(browser, guarded):
    link = re.search(r"http\S+\?token=\S+", guarded.log()).group()
    first = browser.new_context()
    page = first.new_page()
    page.goto(link)
    page.wait_for_selector(".rs-fit-panel")
    assert page.url.startswith(guarded.address) and "token" not in page.url
    second = browser.new_context()
    page = second.new_page()
    page.goto(link)
    expect(page.get_by_role("alert")).to_have_text(
        "That link does not work: it was already used, has expired, or the server was started "
        "again since. Please log in."
    )
    page.get_by_label("User").fill("me")
    page.get_by_label("Password").fill("secret")
    page.get_by_role("button", name="Log in").click()
    page.wait_for_selector(".rs-fit-panel")
    for context in (first, second):
        context.close()


def test_a_run_that_was_stopped_stays_though_the_next_of_the_queue_begins(page, server):
    """The page follows whichever run goes on, but a second click must not stop the next one."""
    start_short_run(page, "First", steps=100_000)
    expect(state(page)).to_have_text("Running")
    page.goto(f"{server.address}/?show=new")
    fill(page, "name", "Second")
    page.wait_for_timeout(500)
    page.locator("#add-to-queue:not([disabled])").click()
    expect(page.locator(".rs-queued")).to_contain_text("in line")
    page.goto(f"{server.address}/?view=overview")
    expect(bar(page, "name")).to_have_text("First")
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")
    other = bar(page, "other")
    expect(other).to_contain_text("Second is training.")
    expect(bar(page, "name")).to_have_text("First")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_hidden()
    other.get_by_role("button", name="Show it").click()
    expect(bar(page, "name")).to_have_text("Second")
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")
