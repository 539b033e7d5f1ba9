"""No verdict stands beside settings that it is not about: from a choice until its answer, the
Summary says that it checks, and Start waits. In Chromium, on the real server.
"""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.layout_shifts import assert_still, observe_from_here
from tests.browser.screen import OPENED_RUN, box, press, run_of
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

LARGE = "deepseek-ai/DeepSeek-V3"
WATCH = """() => {
  // What the Summary says right after a click.
  document.addEventListener('change', () => setTimeout(() => {
    window.said ??= document.querySelector('.rs-fit-panel h3').textContent;
  }));
}"""


def summary(page):
    return page.locator(".rs-fit-panel")


def headline(page):
    return summary(page).locator("h3")


def held(page):
    """Holds back the answers of the checks from here on; returns those that are held."""
    late = []
    # Playwright sets an attribute of the function, which a built-in method does not take.
    page.route("**/api/check", lambda route: late.append(route))  # noqa: PLW0108
    return late


def answered(page, late):
    page.unroute("**/api/check")  # which lets those go on that are held back
    late.clear()


def test_from_the_choice_to_its_answer_the_summary_checks_and_start_waits(page, server):
    page.wait_for_selector(".rs-preview mark")
    card = page.locator(".rs-models [data-part=models] label:has(.rs-lacks)")
    expect(card).to_be_visible()
    expect(headline(page)).to_contain_text("Fits")
    runs = list(server.runs.glob("*/config.yaml"))
    page.evaluate(WATCH)
    observe_from_here(page)
    late = held(page)
    card.click()
    expect(headline(page)).to_have_text("Checking …")
    expect(summary(page)).to_have_attribute("aria-busy", "true")
    assert page.evaluate("window.said") == "Checking …"
    page.locator("#start").dispatch_event("click")
    page.wait_for_timeout(800)
    expect(headline(page)).to_have_text("Checking …")
    assert late
    assert_still(page)
    answered(page, late)
    expect(headline(page)).to_have_text("Does not fit")
    expect(page.locator("#start")).to_be_disabled()
    page.wait_for_timeout(500)
    assert list(server.runs.glob("*/config.yaml")) == runs, "what does not fit was started"


@pytest.mark.parametrize("how", ["typed", "data", "preset"])
def test_whatever_is_chosen_is_checked_before_anything_is_said_of_it(page, server, how):
    page.wait_for_selector(".rs-preview mark")
    late = held(page)
    if how == "typed":
        box(page, "model.source").fill(LARGE)
        expect(headline(page)).to_have_text("Press Enter to check")
        box(page, "model.source").press("Enter")
    elif how == "data":
        path = server.folder / "sums.csv"
        path.write_text("prompt,completion\n" + "1 plus 1?,2\n" * 40, encoding="utf-8")
        page.set_input_files(".rs-data-files [data-part=input]", path)
    else:
        page.locator("#preset input").click()
        page.get_by_role("option", name="LoRA").first.click()
    expect(headline(page)).to_have_text("Checking …")
    answered(page, late)
    expect(headline(page)).not_to_have_text("Checking …")
    expect(summary(page)).to_have_attribute("aria-busy", "false")


def test_a_click_on_start_that_comes_early_starts_what_was_typed(page):
    page.wait_for_selector(".rs-preview mark")
    late = held(page)
    box(page, "train.steps").fill("61")
    page.locator("#start").click()
    expect(headline(page)).to_have_text("Checking …")
    expect(page.locator("#start")).to_have_attribute("aria-busy", "true")
    answered(page, late)
    expect(page).to_have_url(OPENED_RUN)
    expect(page.locator(".rs-bar [data-field=step]")).to_contain_text("of 61")
    assert run_of(page)
    press(page, "discard")
    page.get_by_role("dialog").get_by_role("button", name="Stop and discard").click()
