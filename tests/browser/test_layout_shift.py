"""Nothing jumps on a run's Overview, from Preparing to its end; in Chromium, on the real engine."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from app.form.settings_form import shown_values
from engine.config.settings import TrainConfig
from tests.browser.layout_shifts import assert_still, forget, observe_opening
from tests.browser.screen import OPENED_RUN, expect_finished, state, verdict
from tests.support.browser import ROOT, WAIT_MILLISECONDS, answer
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

# The largest empty band of a head whose parts stand below each other, in pixels.
BAND = """head => {
    const parts = [...head.children].map(part => part.getBoundingClientRect());
    const edges = parts.filter(({height}) => height > 0).sort((a, b) => a.top - b.top);
    const {top, bottom} = head.getBoundingClientRect();
    const ends = [top, ...edges.map(edge => edge.bottom)];
    return Math.max(...[...edges.map(edge => edge.top), bottom].map((y, at) => y - ends[at]));
}"""


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_nothing_jumps_over_a_whole_run(blank, server, width, height):
    page = blank
    observe_opening(page)
    page.set_viewport_size({"width": width, "height": height})
    preset = TrainConfig.load(ROOT / "presets/starter.yaml")
    config = preset.with_values(
        {
            "name": f"Still at {width}",
            "train.steps": 60,
            "output.eval_every": 20,
            "output.exact_match_samples": 3,
        }
    )
    answer(server, "/api/check", {"preset": None, "shown": shown_values(config)})
    page.goto(server.address)
    page.locator("#start:not([disabled])").click()
    expect(page).to_have_url(OPENED_RUN)
    expect(verdict(page)).to_be_visible()
    forget(page)
    heights = {verdict(page).bounding_box()["height"]}
    expect(state(page)).to_have_text("Running")
    page.wait_for_selector("[data-figure=loss] .main-svg")
    heights.add(verdict(page).bounding_box()["height"])
    if width == 390:
        assert verdict(page).evaluate(BAND) < 45
    expect_finished(page)
    expect(verdict(page)).to_have_attribute("data-phase", "over")
    page.wait_for_timeout(1500)  # what is drawn after the end
    heights.add(verdict(page).bounding_box()["height"])
    assert_still(page)
    assert len(heights) == 1, heights
    # What its machine did takes one line, which opens.
    fold = page.get_by_role("button", name="Machine")
    expect(page.locator(".rs-timeline")).to_be_hidden()
    fold.click()
    expect(page.locator(".rs-timeline")).to_be_visible()
    expect(fold).to_have_attribute("aria-expanded", "true")
