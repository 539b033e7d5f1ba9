"""The Runs tab, in Chromium, against the real server: names, comparison, the queue, and runs in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal

import pytest
from playwright.sync_api import expect

from engine.run_list import list_runs
from tests.browser.conftest import WAIT_MILLISECONDS, Server, free_port
from tests.browser.test_app_in_browser import (HOSTILE, fill, open_other_settings, press, recorded_run, start_short_run,
                                               state)

expect.set_options(timeout=WAIT_MILLISECONDS)


def open_tab(page, name):
    page.locator(f"#rs-tab-{name}-button").click()


def row_of(page, run_id):
    return page.locator(f".rs-runs [data-part=rows] tr[data-run='{run_id}']")


def prepare(page, name, steps):
    """The form filled for a run that lasts, without samples and checkpoints."""
    open_other_settings(page)
    for field, text in (("name", name), ("train.steps", str(steps)), ("output.exact_match_samples", "0"),
                        ("output.eval_every", "0"), ("output.checkpoint_every", "0")):
        fill(page, field, text)
    page.wait_for_timeout(500)


def test_a_run_is_renamed_its_settings_copied_and_taken_over_into_the_form(page, context, server):
    folder = recorded_run(server, 40, "First name")
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.address)
    page.goto(f"{server.address}/?run={folder.id}&tab=runs")
    row_of(page, folder.id).get_by_role("button", name="Details").click()
    expect(page.get_by_role("dialog", name="First name")).to_be_visible()
    dialog = page.locator("dialog[data-part=details]")
    expect(dialog.get_by_label("Name", exact=True)).to_have_value("First name")
    dialog.get_by_label("Name", exact=True).fill(HOSTILE)
    dialog.get_by_label("Note").fill("Kept for later")
    dialog.get_by_role("button", name="Save name and note").click()
    expect(dialog.locator("output")).to_have_text("Saved.")
    dialog.get_by_role("button", name="Copy the settings").click()
    assert page.evaluate("navigator.clipboard.readText()") == (folder.path / "config.yaml").read_text()
    dialog.get_by_role("button", name="Copy: A new run").click()
    assert page.evaluate("navigator.clipboard.readText()") == (
        f"python launch.py train {folder.path}/config.yaml --runs-dir {server.runs}")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(row_of(page, folder.id)).to_contain_text("Kept for later")
    expect(page.locator(".rs-bar [data-field=name]")).to_have_text(HOSTILE)
    expect(page.locator(".rs-bar [data-field=about]")).to_have_text("Kept for later")
    assert page.evaluate("window.hacked") is None and page.locator("img[src=x]").count() == 0
    row_of(page, folder.id).get_by_role("button", name="New run from this one").click()
    expect(page).to_have_url(re.compile(r"tab=train"))
    expect(page.locator("#field-model-source :is(input, textarea)")).to_have_value("First name")


def test_runs_are_compared_side_by_side(page, server):
    one, two, three = (recorded_run(server, steps, name) for steps, name in ((60, "Short"), (120, "Long"), (10, "Third")))
    page.goto(f"{server.address}/?tab=runs")
    compare = page.locator("[data-part=compare-open]")
    row_of(page, one.id).get_by_role("checkbox").check()
    expect(compare).to_be_disabled()
    row_of(page, two.id).get_by_role("checkbox").check()
    compare.click()
    page.wait_for_function("document.querySelector('[data-compare=loss]').data?.length >= 2")
    assert [page.evaluate(f"document.querySelector('[data-compare={name}]').data[0].x.length") for name in (
        "loss", "throughput", "memory")] == [60, 60, 60]
    figures = page.locator("[data-part=compare-figures]")
    expect(figures.locator("tbody tr").first).to_have_text(re.compile("Steps.*60.*120"))
    settings = page.locator("[data-part=compare-settings] tbody tr")
    expect(settings.first).to_have_text(re.compile(r"model\.source\s*Short\s*Long"))
    expect(settings).to_have_count(2)
    page.get_by_role("button", name="Time", exact=True).click()
    page.wait_for_function("document.querySelector('[data-compare=loss]').layout.xaxis.type === 'date'")

    # The address shows it to somebody else; a deleted run leaves it.
    assert f"{one.id}" in page.url and f"{two.id}" in page.url
    page.goto(f"{server.address}/?compare={one.id},{two.id},{three.id}")
    expect(page.locator("[data-part=compare-runs] li")).to_have_count(3)
    row_of(page, three.id).get_by_role("button", name="Delete").click()
    page.locator("dialog[data-part=delete]").get_by_role("button", name="Delete").click()
    expect(page.locator("[data-part=compare-runs] li")).to_have_count(2)
    page.get_by_role("button", name="Close the comparison").click()
    expect(page.locator(".rs-compare")).to_be_hidden()
    assert "compare=" not in page.url
    page.goto(f"{server.address}/?compare={one.id},nothing-there")
    expect(page.locator("[data-field=compare-problem]")).to_contain_text("There is no run nothing-there")


def test_a_queued_run_starts_when_the_one_before_ends_and_waits_after_a_restart(browser, tmp_path):
    server = Server(tmp_path, free_port())
    server.start()
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(WAIT_MILLISECONDS)
    page = context.new_page()
    try:
        page.goto(server.address)
        page.wait_for_selector("#start:not([disabled])")
        expect(page.locator("#add-to-queue")).to_have_count(0)
        start_short_run(page, "Now", steps=2000)
        open_tab(page, "train")
        for number, name in enumerate(("Second", "Third", "Fourth"), 1):
            fill(page, "name", name)
            page.wait_for_timeout(500)
            page.locator("#add-to-queue").click()
            expect(page.locator(".rs-queued")).to_have_text(f"Number {number} in the queue now; Runs shows it.")
        open_tab(page, "runs")
        queued = page.locator("[data-part=queue-rows] li")
        expect(queued).to_have_count(3)
        queued.filter(has_text="Fourth").get_by_role("button", name="Move up").click()
        expect(queued.nth(1)).to_contain_text("Fourth")
        queued.filter(has_text="Third").get_by_role("button", name="Remove").click()
        expect(queued).to_have_count(2)
        press(page, "stop")
        expect(page.locator(".rs-runs [data-part=rows] tr", has_text="Second")).to_contain_text(re.compile("Preparing|Running"))
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
    finally:
        context.close()
        if server.process.poll() is None:
            server.end(signal.SIGINT)


def test_a_detached_run_outlives_its_server(browser, tmp_path):
    server = Server(tmp_path, free_port())
    server.start()
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(WAIT_MILLISECONDS)
    page = context.new_page()
    try:
        page.goto(server.address)
        page.wait_for_selector("#start:not([disabled])")
        prepare(page, "Detached", 5000)
        page.locator("#start-detached:not([disabled])").click()
        expect(page).to_have_url(re.compile(r"run=\w+.*tab=live"))
        run_id = re.search(r"run=([^&]+)", page.url).group(1)
        expect(state(page)).to_have_text(re.compile("Preparing|Running"))
        page.wait_for_function("document.querySelector('[data-figure=loss]')?.data?.[0]?.x.length >= 3")
        open_tab(page, "train")
        expect(page.locator("#start")).to_be_disabled()
        expect(page.locator(".rs-why-not")).to_contain_text("in a process of its own")
        server.end(signal.SIGINT)
        pid = json.loads((server.runs / run_id / "detached.json").read_text())["pid"]
        assert open(f"/proc/{pid}/cmdline").read().count("--resume") == 1
        server.start()
        expect(state(page)).to_have_text("Running")
        press(page, "pause")
        expect(state(page)).to_have_text("Paused")
        press(page, "stop")
        expect(state(page)).to_have_text("Stopped")
        expect(page.locator("#start")).to_be_enabled()
    finally:
        context.close()
        server.end()
        for run in list_runs(server.runs):
            end_process(server.runs / run.id / "detached.json")


def end_process(path):
    if path.exists():
        with contextlib.suppress(ProcessLookupError):  # as it should be
            os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)


@pytest.mark.parametrize("width", [1440, 800])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_comparison_is_readable_at_both_widths_in_both_themes(browser, server, width, scheme):
    one, two = recorded_run(server, 60, "One"), recorded_run(server, 90, "A rather long name for a run that nobody remembers")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{server.address}/?tab=runs&compare={one.id},{two.id}")
    page.wait_for_selector("[data-compare=memory] .main-svg", timeout=WAIT_MILLISECONDS)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    row_of(page, one.id).get_by_role("button", name="Details").click()
    expect(page.get_by_role("dialog", name="One")).to_be_visible()
    expect(page.locator("pre[data-field=config]")).to_contain_text("max_seq_len")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()
