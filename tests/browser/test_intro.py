"""What a newcomer sees first: what this is, this machine, and three steps that lead to Start."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from engine.config.settings import TrainConfig
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS
from tests.support.synthetic_run import run_events

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)


@pytest.fixture(scope="module")
def server(own_server):
    """With no run yet."""
    return own_server


def test_a_newcomer_is_led_to_start_and_is_left_alone_later(page, server):
    card, line = page.locator(".rs-intro-card"), page.get_by_role("button", name="What is this?")
    expect(card).to_be_visible()
    expect(card).to_contain_text("teaches a language model from your own examples")
    expect(card.locator(".rs-intro-machine")).to_contain_text(re.compile(r"\d+ CPU cores?"))
    expect(card.locator("[data-step=model]")).to_contain_text("Chosen: assets/starter-model")
    expect(card.locator("[data-step=data]")).to_contain_text("Chosen: assets/starter.jsonl")
    expect(card.locator("[data-step=start]")).to_contain_text(
        "Ready: a tiny model learns to write Roman numerals."
    )
    expect(card.locator("[data-done=true]")).to_have_count(3)

    # A step leads to its control, and says when something is missing there.
    card.get_by_role("button", name="Choose a model").press("Enter")
    box = page.locator("#field-model-source :is(input, textarea)")
    expect(box).to_be_focused()
    box.fill("")
    box.press("Enter")
    expect(card.locator("[data-step=model]")).to_have_attribute("data-done", "false")
    expect(card.locator("[data-step=start]")).to_have_attribute("data-done", "false")
    box.fill("assets/starter-model")
    box.press("Enter")
    expect(card.locator("[data-step=start]")).to_have_attribute("data-done", "true")
    for _ in range(
        10
    ):  # while the form is checked, Start is disabled and the verdict has the focus instead
        page.wait_for_selector("#start:not([disabled])")
        card.get_by_role("button", name="Start and watch").click()
        if page.evaluate("document.activeElement.id") == "start":
            break
        page.wait_for_timeout(500)
    expect(page.locator("#start")).to_be_focused()

    # Hidden, it stays hidden; it comes back when it is asked for.
    card.get_by_role("button", name="Hide this").click()
    expect(card).to_be_hidden()
    page.reload()
    expect(line).to_be_visible()
    expect(card).to_be_hidden()
    line.click()
    expect(card).to_be_visible()

    # Whoever has a run knows what this is.
    page.evaluate("localStorage.clear()")
    folder = create_run(
        server.runs, TrainConfig.from_dict({"model": {"source": "m"}, "data": {"source": "d"}})
    )
    recorder = RunRecorder(folder.path, folder.id)
    for event in run_events(3):
        recorder.emit(event)
    recorder.close()
    page.reload()
    expect(line).to_be_visible()
    expect(card).to_be_hidden()
