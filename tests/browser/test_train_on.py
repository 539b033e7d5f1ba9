"""Continue training from here, in Chromium: a run's weights are where a new run begins."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from engine.runs.record.events import LogLine, RunEnded, RunStarted, StepFinished
from engine.runs.record.following import replay
from engine.runs.record.run_folder import open_run
from tests.browser.screen import (
    NEW_FORM,
    OPENED_RUN,
    expect_finished,
    fill,
    more_of,
    open_page,
    run_of,
    start_short_run,
)
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.routes import wait_for
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

STEPS = 12


def events_of(folder, kind):
    return [record.event for record in replay(folder.events_path) if isinstance(record.event, kind)]


def test_a_new_run_begins_from_the_weights_of_the_one_before(page, server):
    first_id = start_short_run(page, "Taught", steps=STEPS)
    expect_finished(page)
    open_page(page, "runs")
    more_of(page, first_id).get_by_role("menuitem", name="Continue training").click()
    expect(page).to_have_url(NEW_FORM)
    first = open_run(server.runs, first_id)
    page.wait_for_selector("#start:not([disabled])")
    expect(page.locator(".rs-chip")).to_contain_text("Continues from Taught")
    summary = page.locator(".rs-fit-panel [data-field=job]")
    expect(summary).to_contain_text("Continues from Taught")
    page.get_by_role("button", name="Advanced settings").click()
    field = page.locator("#field-model-start_from :is(input, textarea)")
    expect(field).to_have_value(str(first.path.resolve()))
    # Who looks elsewhere and opens New again finds the own draft, and this one by a click.
    open_page(page, "runs")
    open_page(page, "new")
    replaced = page.locator("[data-part=replaced]")
    expect(replaced).to_contain_text("Your settings are back, in place of those to continue Taught")
    expect(page.locator(".rs-chip")).to_be_hidden()
    expect(field).to_have_value("")
    replaced.get_by_role("button", name="Undo").click()
    expect(field).to_have_value(str(first.path.resolve()))
    expect(summary).to_contain_text("Continues from Taught")
    summary.get_by_role("button", name="Start from the model instead").click()
    expect(field).to_have_value("")
    expect(page.locator(".rs-chip")).to_be_hidden()
    expect(summary).not_to_contain_text("Continues from")
    fill(page, "model.start_from", str(first.path.resolve()))
    expect(summary).to_contain_text("Continues from Taught")
    page.locator("#start:not([disabled])").click()
    expect(page).to_have_url(OPENED_RUN)
    assert run_of(page) != first_id
    second = open_run(server.runs, run_of(page))
    # For a moment the bar still shows the first run, which has finished.
    wait_for(lambda: events_of(second, RunEnded), seconds=60)
    expect_finished(page)
    assert second.id != first_id and second.config.name == "Taught 2"
    assert events_of(second, RunStarted)[0].resumed_step is None, "its steps begin anew"
    text = f"The weights are those of {first.path.resolve()}/checkpoints/step-{STEPS}."
    assert text in [line.text for line in events_of(second, LogLine)]
    before, after = (events_of(folder, StepFinished) for folder in (first, second))
    assert [step.step for step in after] == list(range(1, STEPS + 1))
    # Both runs begin with the same rows, so the loss of their first steps tells the weights apart.
    assert after[0].loss < 0.9 * before[0].loss, (before[0].loss, after[0].loss)
    assert events_of(second, RunEnded)[-1].state == "finished"
