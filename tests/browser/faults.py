"""A page that is opened once and never again, and the run that it shows, for tests of what goes
wrong around them.
"""

from __future__ import annotations

import time

from playwright.sync_api import expect

from engine.runs.record.events import StepFinished
from engine.runs.record.following import replay
from tests.browser.screen import OPENED_RUN, fill, open_other_settings, run_of

STEPS = "document.querySelector('[data-figure=loss]').data[0].x"


def opened(context, server, where=""):
    """A page that knows when it is reloaded."""
    page = context.new_page()
    page.goto(f"{server.address}/{where}")
    page.wait_for_selector(".rs-fit-panel:not([data-tone=calm])", state="attached")
    page.evaluate("window.isTheSame = true")
    return page


def is_the_same(page):
    return page.evaluate("window.isTheSame === true")


def prepare(page, name, steps, **others):
    """The form filled for a run that lasts, without samples and evaluations."""
    page.wait_for_selector("#start:not([disabled])")
    open_other_settings(page)
    values = {
        "name": name,
        "train.steps": str(steps),
        "output.exact_match_samples": "0",
        "output.eval_every": "0",
        "output.checkpoint_every": "0",
        **others,
    }
    for field, text in values.items():
        fill(page, field, text)
    page.wait_for_timeout(500)


def start(page):
    page.locator("#start:not([disabled])").click()
    expect(page).to_have_url(OPENED_RUN)
    return run_of(page)


def recorded_steps(folder):
    return [
        record.event
        for record in replay(folder.events_path)
        if isinstance(record.event, StepFinished)
    ]


def steps_done(folder):
    return max((event.step for event in recorded_steps(folder)), default=0)


def wait_until(condition, server, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, server.log()
        time.sleep(0.2)


def grows(folder, server):
    """The run makes three more steps."""
    before = steps_done(folder)
    wait_until(lambda: steps_done(folder) >= before + 3, server)


def shows_every_step(page):
    """No step is missing from the curve and none is there twice."""
    steps = page.evaluate(STEPS)
    assert steps == list(range(1, len(steps) + 1)), steps
