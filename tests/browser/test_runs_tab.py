"""The Runs tab, in Chromium, against the real server: names, comparison, the queue, and runs in
processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal

import pytest
from playwright.sync_api import expect

from app.pages.new.receipt import ordinal
from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from engine.runs.summaries.listing import list_runs
from tests.browser.screen import (
    NEW_FORM,
    bar,
    fill,
    more_of,
    open_menu,
    open_page,
    open_view,
    press,
    recorded_run,
    row_of,
    start_short_run,
)
from tests.support.browser import WAIT_MILLISECONDS, Server
from tests.support.ports import free_port
from tests.support.sets import BROWSER_FLOWS
from tests.support.synthetic_run import run_events, step_finished

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

HOSTILE = '<img src=x onerror="window.hacked=1">${window.hacked=2}{{7*7}}'


def test_a_run_is_renamed_its_settings_copied_and_taken_over_into_the_form(blank, context, server):
    page = blank
    folder = recorded_run(server, 40, "As it was made")
    gone = recorded_run(server, 5, "Not needed")
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.address)
    page.goto(f"{server.address}/?show=runs")
    more_of(page, folder.id).get_by_role("menuitem", name="Rename").click()
    rename(page, " ", "The name is empty")
    rename(page, "Second name")
    expect(row_of(page, folder.id).get_by_role("button", name="Open")).to_have_text("Second name")
    row_of(page, folder.id).get_by_role("button", name="Open").click()
    open_menu(page, "more").get_by_role("menuitem", name="Rename").click()
    rename(page, "First name")
    expect(bar(page, "name")).to_have_text("First name")
    open_view(page, "settings")
    dialog = page.locator(".rs-settings-view")
    expect(dialog.get_by_label("Name", exact=True)).to_have_value("First name")
    dialog.get_by_label("Name", exact=True).fill(HOSTILE)
    dialog.get_by_label("Note").fill("Kept for later")
    dialog.get_by_role("button", name="Save", exact=True).click()
    expect(dialog.locator("output")).to_have_text("Saved.")
    dialog.get_by_text("All settings (YAML)").click()
    dialog.get_by_role("button", name="Copy the settings").click()
    assert (
        page.evaluate("navigator.clipboard.readText()") == (folder.path / "config.yaml").read_text()
    )
    dialog.get_by_role("button", name="Copy: A new run").click()
    assert page.evaluate("navigator.clipboard.readText()") == (
        f"python {PROGRAM_ROOT}/launch.py train {folder.path}/config.yaml --runs-dir {server.runs}"
    )
    expect(bar(page, "name")).to_have_text(HOSTILE)
    expect(bar(page, "about")).to_have_text("Kept for later")
    open_page(page, "runs")
    expect(row_of(page, folder.id).locator("td[title*='Kept for later']")).to_be_visible()
    assert page.evaluate("window.hacked") is None and page.locator("img[src=x]").count() == 0
    # The menu of a run has what its row in Runs has.
    row_of(page, gone.id).get_by_role("button", name="Open").click()
    open_menu(page, "more").get_by_role("menuitem", name="Delete").click()
    sure = page.get_by_role("dialog", name="Delete Not needed?")
    sure.get_by_role("button", name="Delete").click()
    expect(row_of(page, folder.id)).to_be_visible()
    expect(row_of(page, gone.id)).to_have_count(0)
    row_of(page, folder.id).get_by_role("button", name="Open").click()
    open_menu(page, "more").get_by_role("menuitem", name="Duplicate").click()
    expect(page).to_have_url(NEW_FORM)
    expect(page.locator("#field-model-source :is(input, textarea)")).to_have_value("As it was made")


def rename(page, name, refusal=""):
    """Gives a run this name in the dialog that is open, which stays so with a refusal."""
    dialog = page.get_by_role("dialog", name="Rename this run")
    dialog.get_by_label("Name").fill(name)
    dialog.get_by_role("button", name="Rename").click()
    if refusal:
        expect(dialog.get_by_role("alert")).to_contain_text(refusal)
    else:
        expect(dialog).to_be_hidden()


DETACHED = "Keep training if I close Ramstream"
COMPARED = (
    "['loss', 'throughput', 'memory'].map(name => "
    "document.querySelector(`[data-compare=${name}]`)._fullLayout.xaxis.range.map(Number))"
)


def zoom_compared(page):
    page.locator("[data-compare=loss]").scroll_into_view_if_needed()
    box = page.locator("[data-compare=loss]").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 83, steps=5)
    page.mouse.up()
    expect(page.locator("[data-part=compare-reset]")).to_be_visible()
    page.wait_for_function(f"{COMPARED}.every(([from, to]) => to < 100)")


@pytest.fixture
def long_run(server):
    """A run that goes on: its folder and its recorder, 120 steps so far."""
    config = {"name": "Long", "model": {"source": "Long"}, "data": {"source": "Long"}}
    folder = create_run(server.runs, TrainConfig.from_dict(config))
    with folder.lock():
        recorder = RunRecorder(folder.path, folder.id)
        for event in run_events(120, total=200, name="Long", ended=None):
            recorder.emit(event)
        yield folder, recorder
        recorder.close()


def test_runs_are_compared_side_by_side(blank, server, long_run):
    page = blank
    one, three = (
        recorded_run(server, steps, name) for steps, name in ((60, "Short"), (10, "Third"))
    )
    two, recorder = long_run
    page.goto(f"{server.address}/?show=runs")
    compare = page.locator("[data-part=compare-open]")
    row_of(page, one.id).get_by_role("checkbox").check()
    expect(compare).to_be_disabled()
    row_of(page, two.id).get_by_role("checkbox").check()
    compare.click()
    for name in ("loss", "throughput", "memory"):
        chart = f"document.querySelector('[data-compare={name}]').data"
        page.wait_for_function(f"{chart}?.length >= 2")
        assert page.evaluate(f"{chart}[0].x.length") == 60
    figures = page.locator("[data-part=compare-figures]")
    expect(figures.locator("tbody tr").first).to_have_text(re.compile("Steps.*60.*120"))
    settings = page.locator("[data-part=compare-settings] tbody tr")
    expect(settings.first).to_have_text(re.compile(r"Model\s*Short\s*Long"))
    expect(settings).to_have_count(2)
    # A zoom of one is one of all, and what the runs do meanwhile does not undo it.
    zoom_compared(page)
    zoomed = [round(end, 3) for end in page.evaluate(COMPARED)[0]]
    page.wait_for_function(f"new Set({COMPARED}.map(String)).size === 1")
    for step in range(121, 131):
        recorder.emit(step_finished(step, 200))
    page.wait_for_function(
        "document.querySelector('[data-compare=loss]').data.some(({x}) => x.at(-1) >= 130)"
    )
    assert page.evaluate(COMPARED) == [pytest.approx(zoomed, abs=0.01)] * 3
    page.get_by_role("button", name="Show everything").click()
    page.wait_for_function(f"{COMPARED}.every(([from, to]) => to > 100)")
    zoom_compared(page)
    page.locator("[data-compare=memory]").scroll_into_view_if_needed()
    box = page.locator("[data-compare=memory]").bounding_box()
    page.mouse.dblclick(box["x"] + 150, box["y"] + 60)
    page.wait_for_function(f"{COMPARED}.every(([from, to]) => to > 100)")
    expect(page.get_by_role("button", name="Show everything")).to_be_hidden()
    page.get_by_role("button", name="Time", exact=True).click()
    page.wait_for_function(
        "document.querySelector('[data-compare=loss]').layout.xaxis.type === 'date'"
    )

    # The address shows it to somebody else, and a click on Runs leaves it; Back returns to it.
    assert f"{one.id}" in page.url and f"{two.id}" in page.url
    open_page(page, "runs")
    expect(page.locator(".rs-compare")).to_be_hidden()
    assert "compare=" not in page.url
    page.go_back()
    expect(page.locator("[data-part=compare-runs] li")).to_have_count(2)
    # A deleted run leaves it.
    page.goto(f"{server.address}/?compare={one.id},{two.id},{three.id}")
    expect(page.locator("[data-part=compare-runs] li")).to_have_count(3)
    more_of(page, three.id).get_by_role("menuitem", name="Delete").click()
    page.locator(".rs-runs dialog[data-part=delete]").get_by_role("button", name="Delete").click()
    expect(page.locator("[data-part=compare-runs] li")).to_have_count(2)
    page.locator("[data-part=compare-close]").click()
    expect(page.locator(".rs-compare")).to_be_hidden()
    assert "compare=" not in page.url
    page.goto(f"{server.address}/?compare={one.id},nothing-there")
    expect(page.locator("[data-field=compare-problem]")).to_contain_text("does not exist")


@pytest.fixture
def own(browser, tmp_path):
    """A server that a test may end and start again, and a page of it with the form ready; no
    process outlives them.
    """
    server = Server(tmp_path, free_port())
    server.start()
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(WAIT_MILLISECONDS)
    page = context.new_page()
    try:
        page.goto(server.address)
        page.wait_for_selector("#start:not([disabled])")
        yield server, page
    finally:
        context.close()
        if server.process.poll() is None:
            server.end(signal.SIGINT)
        for run in list_runs(server.runs):
            end_process(server.runs / run.id / "detached.json")


def add_to_queue(page, *names):
    """Queues runs of these names with the form's other settings, then shows the Runs tab."""
    open_page(page, "new")
    for number, name in enumerate(names, 1):
        fill(page, "name", name)
        page.wait_for_timeout(500)
        with page.expect_response("**/gradio_api/run/predict*") as answered:
            page.locator("#add-to-queue").click()
        # The run bar tells whether the run before has ended, which would make the number smaller.
        found = f"{answered.value.text()} while the bar says {bar_text(page)}"
        assert f"Queued, {ordinal(number)} in line." in found, found
        expect(page.locator(".rs-queued")).to_contain_text(f"Queued, {ordinal(number)} in line.")
    page.get_by_role("button", name="See queue").click()


def bar_text(page):
    return page.locator(".rs-bar").inner_text().replace("\n", " ")


def test_a_queued_run_starts_when_the_one_before_ends_and_waits_after_a_restart(own):
    server, page = own
    expect(page.locator("#add-to-queue")).to_have_count(0)
    start_short_run(page, "Now", steps=2000)
    add_to_queue(page, "Second", "Third", "Fourth")
    queued = page.locator("[data-part=queue-rows] li")
    expect(queued).to_have_count(3)
    queued.filter(has_text="Fourth").get_by_role("button", name="Move up").click()
    expect(queued.nth(1)).to_contain_text("Fourth")
    queued.filter(has_text="Third").get_by_role("button", name="Remove").click()
    expect(queued).to_have_count(2)
    press(page, "stop")
    expect(page.locator(".rs-runs [data-part=rows] tr", has_text="Second")).to_contain_text(
        re.compile("Preparing|Running")
    )
    expect(queued).to_have_count(1)

    # Ctrl-C stops what runs and starts nothing; nor does the next server.
    assert server.end(signal.SIGINT) == 0, server.log()
    assert {run.name for run in list_runs(server.runs)} == {"Now", "Second"}
    server.start()
    expect(page.get_by_role("button", name="Continue the queue")).to_be_visible()
    assert {run.name for run in list_runs(server.runs)} == {"Now", "Second"}
    page.get_by_role("button", name="Continue the queue").click()
    expect(page.locator(".rs-runs [data-part=rows] tr", has_text="Fourth")).to_be_visible()
    expect(page.locator(".rs-queue")).to_be_hidden()


def end_process(path):
    if path.exists():
        with contextlib.suppress(ProcessLookupError):  # as it should be
            os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)


def test_a_queued_run_in_a_process_of_its_own_holds_its_place_over_a_restart(own):
    server, page = own
    rows, queued = (
        page.locator(".rs-runs [data-part=rows] tr"),
        page.locator("[data-part=queue-rows] li"),
    )
    start_short_run(page, "First", steps=5000)
    add_to_queue(page, "Away", "After it", "Last")
    for name in ("Away", "Last"):
        with page.expect_response("**/detached"):
            queued.filter(has_text=name).get_by_role("checkbox", name=DETACHED).check()
    expect(
        queued.filter(has_text="After it").get_by_role("checkbox", name=DETACHED)
    ).not_to_be_checked()
    press(page, "stop")
    expect(rows.filter(has_text="Away")).to_contain_text("Running")
    expect(queued).to_have_count(2)
    away = next(run for run in list_runs(server.runs) if run.name == "Away")
    assert (server.runs / away.id / "detached.json").exists()

    # The next server waits for it, and goes on when it ends by itself.
    assert server.end(signal.SIGINT) == 0, server.log()
    server.start()
    expect(page.locator("[data-part=queue-behind]")).to_contain_text("Continues when Away ends")
    expect(page.get_by_role("button", name="Continue the queue")).to_be_hidden()
    assert {run.name for run in list_runs(server.runs)} == {"First", "Away"}
    end_process(server.runs / away.id / "detached.json")
    expect(rows.filter(has_text="After it")).to_contain_text("Running")
    expect(queued).to_have_count(1)
    expect(queued.get_by_role("checkbox", name=DETACHED)).to_be_checked()
    expect(page.locator("[data-part=queue-behind]")).to_be_hidden()


def test_the_comparison_and_the_settings_are_readable_at_both_widths(blank, server):
    one, two = (
        recorded_run(server, 60, "One"),
        recorded_run(server, 90, "A rather long name for a run that nobody remembers"),
    )
    blank.goto(f"{server.address}/?show=runs&compare={one.id},{two.id}")
    blank.locator("[data-compare=memory]").scroll_into_view_if_needed()
    blank.wait_for_selector("[data-compare=memory] .main-svg")
    fits = "document.documentElement.scrollWidth <= innerWidth"
    for width in (1440, 800):
        blank.set_viewport_size({"width": width, "height": 900})
        blank.wait_for_function(fits)
    more_of(blank, one.id).get_by_role("menuitem", name="Settings").click()
    expect(blank.locator("pre[data-field=config]")).to_contain_text("max_seq_len")
    for width in (1440, 800):
        blank.set_viewport_size({"width": width, "height": 900})
        blank.wait_for_function(fits)
