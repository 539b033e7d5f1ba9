"""A run is paused, edited, talked with and resumed in few clicks, and what was said stays."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.screen import (
    OPENED_RUN,
    bar,
    fill,
    open_other_settings,
    open_view,
    press,
    state,
)
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

COUNT = """() => {
  window.clicks = 0;
  addEventListener('click', ({isTrusted, detail}) => { clicks += isTrusted && detail > 0; }, true);
}"""
"""Counts the clicks of the mouse. That of the button which Enter presses has the detail 0."""
SETTINGS = {
    "name": "Capitals",
    "train.steps": "100000",
    "output.eval_every": "0",
    "output.checkpoint_every": "0",
}


@pytest.fixture
def training(page):
    """The page of a run that saves nothing before its end."""
    open_other_settings(page)
    for field, text in SETTINGS.items():
        fill(page, field, text)
    page.wait_for_timeout(500)
    page.locator("#start:not([disabled])").click()
    expect(page).to_have_url(OPENED_RUN)
    expect(state(page)).to_have_text("Running")
    return page


def test_pause_edit_chat_and_resume_take_four_clicks_and_the_chat_stays(training):
    page = training
    press(page, "save")
    expect(page.locator(".rs-actions").get_by_role("button", name="Pause")).to_be_enabled()
    page.evaluate(COUNT)
    actions = page.locator(".rs-actions")
    actions.get_by_role("button", name="Pause").click()
    actions.get_by_role("button", name="Edit").click()
    dialog = page.get_by_role("dialog", name="Edit this run")
    expect(dialog).to_be_visible()
    page.keyboard.press("Shift+Tab")
    page.keyboard.type("0.0007")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    page.locator(".rs-views").get_by_role("link", name="Chat").click()
    message = page.get_by_label("Message", exact=True)
    expect(message).to_be_focused()
    page.keyboard.type("What is the capital of Spain?")
    page.keyboard.press("Enter")
    turn = page.locator(".rs-chat-turn")
    expect(turn.locator("[data-state=done]")).to_have_count(2)
    actions.get_by_role("button", name="Resume").click()
    expect(state(page)).to_have_text("Running")
    assert page.evaluate("clicks") == 4

    about = page.locator(".rs-chat [data-field=about]")
    expect(about).to_contain_text(
        "The run went on from its pause. Chat now has other weights: Step"
    )

    # Nothing can answer meanwhile; what was said is there, on the page of all runs, too.
    for _ in range(2):
        closed = page.locator(".rs-chat-closed")
        expect(closed).to_contain_text(
            "Capitals is training. It needs this machine: pause it to chat, and resume it"
        )
        expect(turn).to_be_visible()
        expect(message).to_be_hidden()
        page.locator(".rs-nav > a[data-page=chat]").click()
    closed.get_by_role("button", name="Pause and chat").click()
    expect(closed).to_be_hidden()
    expect(message).to_be_focused()
    expect(page.locator(".rs-chat").get_by_label("Weights")).to_have_value("current")
    expect(turn).to_be_visible()
    expect(about).to_contain_text("The weights have changed. Your next message goes to: Capitals")

    bar(page, "name").click()
    open_view(page, "settings")
    settings = page.locator(".rs-settings-view")
    expect(settings).to_contain_text("0.0007")
    settings.get_by_role("button", name="Edit").click()
    expect(dialog.get_by_label("Learning rate (peak)")).to_have_value("0.0007")
    page.keyboard.press("Escape")
    press(page, "discard")
    page.get_by_role("dialog").get_by_role("button", name="Stop and discard").click()
    expect(state(page)).to_have_text("Discarded")


def test_a_second_click_closes_a_menu(training):
    button = training.locator(".rs-actions [data-menu=stop]")
    menu = training.get_by_role("menu", name="Stop")
    for is_open in (True, False, True):
        button.click()
        expect(menu).to_have_count(1 if is_open else 0)
        expect(button).to_have_attribute("aria-expanded", str(is_open).lower())
    training.keyboard.press("Escape")
    expect(button).to_be_focused()
    press(training, "stop")
    expect(state(training)).to_have_text("Stopped")
