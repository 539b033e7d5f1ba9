"""The preference starter, from its preset to the result: in Chromium, on the real server and
engine.
"""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from engine.runs.record.following import EVENTS_FILE, replay
from tests.browser.screen import (
    OPENED_RUN,
    bar,
    expect_finished,
    run_of,
    verdict,
    wait_for_points,
)
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.folded import fold
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

NAME = "Politeness from pairs"


def test_the_preference_starter_learns_to_be_polite(blank, server):
    page = blank
    page.goto(server.address)
    page.locator("#preset input").click()
    page.get_by_role("option", name=NAME).click()
    preview = page.locator(".rs-preview")
    expect(preview.locator("[data-field=understood]")).to_contain_text("chosen → the better answer")
    row = preview.locator("li").first
    expect(row.locator("mark.rs-chosen")).to_have_count(1)
    expect(row.locator("mark.rs-rejected")).to_have_count(1)
    assert row.locator("b").all_inner_texts() == ["chosen", "rejected"]

    page.locator("#start:not([disabled])").click()
    expect(page).to_have_url(OPENED_RUN)
    expect(bar(page, "name")).to_have_text(NAME)
    run_id = run_of(page)
    expect_finished(page, timeout=4 * WAIT_MILLISECONDS)

    # What the record says, the page says.
    found = fold(replay(server.runs / run_id / EVENTS_FILE))
    before, after = found.exact_matches
    assert before.correct == 0 and after.correct >= 0.9 * after.total
    card = verdict(page)
    expect(card.get_by_role("heading")).to_contain_text("Learned it: 0 % right before, ")
    shown = page.locator("[data-part=answers] tbody tr").first
    expect(shown.locator("td").first).to_contain_text("rejected: ")
    assert before.samples[0]["answer"] == before.samples[0]["rejected"]
    assert after.samples[0]["answer"] == after.samples[0]["expected"]
    ahead = card.locator("dl > div", has_text="Chosen answer ahead")
    expect(ahead).to_contain_text("100 %")
    # The link leads to the answers, below the bar over the run.
    page.get_by_role("link", name="Over time").click()
    title = page.get_by_role("heading", name="Sample answers over time")
    expect(title).to_be_focused()
    covered = page.locator(".rs-bar").bounding_box()
    assert title.bounding_box()["y"] >= covered["y"] + covered["height"]
    expect(title).to_be_in_viewport()
    wait_for_points(page, least=100)
    drawn = "document.querySelector('[data-figure=preference]').data.map(t => t.name)"
    names = page.evaluate(drawn)
    assert {"chosen", "rejected", "margin", "margin, validation"} <= set(names)
