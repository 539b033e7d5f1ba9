"""What goes wrong around a run, in Chromium, against the real server and the real engine: tabs that
are closed, a network that goes away, a page that sleeps, two people at once, a server that is
killed. No page is ever reloaded: what it says and what is typed in it stay. A damaged record and a
full disk are in test_damage_in_browser.py.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from playwright.sync_api import expect

from engine.runs.record.events import RunEnded, RunStarted
from engine.runs.record.following import replay
from engine.runs.record.run_folder import RunFolder
from engine.runs.summaries.listing import list_runs
from tests.browser.faults import (
    grows,
    is_the_same,
    opened,
    prepare,
    recorded_steps,
    shows_every_step,
    start,
    steps_done,
    wait_until,
)
from tests.browser.screen import (
    box,
    fill,
    note,
    open_page,
    open_run,
    open_view,
    press,
    state,
    verdict,
    wait_for_points,
)
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

OFFLINE_SECONDS = float(os.environ.get("RAMSTREAM_OFFLINE_SECONDS", "8"))
WINDOW = {"width": 1440, "height": 900}
STOP = """() => {
  document.querySelector('.rs-actions [data-menu=stop]').click();
  document.querySelector('.rs-bar .rs-menu [data-act=stop]').click();
}"""


@pytest.fixture(scope="module")
def server(own_server):
    """Nobody else's: what is done to it here no other test should meet."""
    return own_server


def test_a_page_that_is_closed_offline_or_asleep_costs_a_run_nothing_and_two_may_stop_it(
    browser, server
):
    context, other = (browser.new_context(viewport=WINDOW) for _ in range(2))
    for window in (context, other):
        window.set_default_timeout(WAIT_MILLISECONDS)
    page = opened(context, server)
    prepare(page, "Faults", 20_000)
    folder = RunFolder(server.runs / start(page))
    wait_for_points(page)

    # Offline: the page says so and how old it is, and what needs the server cannot be pressed.
    open_page(page, "new")
    fill(page, "train.warmup_steps", "17")
    page.wait_for_timeout(500)
    context.set_offline(True)
    expect(note(page)).to_contain_text("Connection lost; trying again.")
    for name in ("Pause", "Stop"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_disabled()
    expect(page.locator("#start")).to_be_disabled()
    expect(page.locator(".rs-why-not")).to_contain_text("The server does not answer")
    box(page, "name").fill("")
    box(page, "name").press_sequentially("Half typ")
    page.wait_for_timeout(1000 * OFFLINE_SECONDS)
    expect(note(page)).to_contain_text(re.compile(r"\(\d+ (s|min) ago\)"))
    done = steps_done(folder)
    context.set_offline(False)
    expect(note(page)).to_contain_text(
        re.compile(r"Connected again after \d+ (s|min); the run went on: [\d,]+ more steps?\.")
    )
    expect(box(page, "name")).to_have_value("Half typ")
    expect(box(page, "train.warmup_steps")).to_have_value("17")
    wait_until(lambda: '"Half typ"' in (server.runs / ".draft.json").read_text(), server)
    open_run(page, folder.id)
    wait_for_points(page, least=done)
    shows_every_step(page)
    for name in ("Pause", "Stop"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_enabled()

    # Asleep, as the browser does it to a tab.
    devtools = context.new_cdp_session(page)
    for life in ("frozen", "active"):
        devtools.send("Page.setWebLifecycleState", {"state": life})
        if life == "frozen":
            grows(folder, server)
            time.sleep(3)
    done = steps_done(folder)
    expect(note(page)).to_contain_text(re.compile("asleep for|Connected again after"))
    wait_for_points(page, least=done)
    shows_every_step(page)
    assert is_the_same(page)

    # Every tab closed.
    page.close()
    grows(folder, server)
    page, second = (
        opened(window, server, f"?run={folder.id}&view=overview") for window in (context, other)
    )
    for each in (page, second):
        expect(state(each)).to_have_text("Running")
        expect(box(each, "train.steps")).to_have_value("20000")

    # Two people at once: one pauses while the other stops, then both stop what has been resumed.
    ask = """async ([command, seen]) => {
      const run = new URLSearchParams(location.search).get('run');
      const headers = {'content-type': 'application/json'}, body = JSON.stringify({command, seen});
      return (await fetch(`/api/runs/${run}/control`, {method: 'POST', headers, body})).status;
    }"""
    press(page, "pause")
    expect(state(second)).to_have_text("Paused")
    for each in (page, second):  # neither waits for the other's answer
        each.evaluate(STOP)
    for each in (page, second):
        expect(state(each)).to_have_text("Stopped")
        expect(note(each)).to_be_hidden()
        assert each.evaluate(ask, ["stop", "running"]) == 200
    assert len([r for r in replay(folder.events_path) if isinstance(r.event, RunEnded)]) == 1
    sentences = {
        verdict(each).locator("[data-field=head-text]").inner_text() for each in (page, second)
    }
    assert len(sentences) == 1 and "Resume continues from step" in sentences.pop()
    for each in (page, second):
        each.evaluate("document.querySelector('.rs-actions [data-command=resume]').click()")
    for each in (page, second):
        expect(state(each)).to_have_text("Running")
    page.evaluate("document.querySelector('.rs-actions [data-command=pause]').click()")
    second.evaluate(STOP)
    for each in (page, second):
        expect(state(each)).to_have_text("Stopped")
    assert len([r for r in replay(folder.events_path) if isinstance(r.event, RunStarted)]) == 2
    assert len([r for r in replay(folder.events_path) if isinstance(r.event, RunEnded)]) == 2
    for window in (context, other):
        window.close()


def test_a_server_that_is_killed_and_started_again(own):
    server, context = own
    page = opened(context, server)
    prepare(page, "Killed", 20_000)
    folder = RunFolder(server.runs / start(page))
    wait_for_points(page, least=3)
    press(page, "save")
    open_view(page, "log")
    expect(page.locator(".rs-log")).to_contain_text("Checkpoint of step")
    grows(folder, server)
    open_page(page, "new")

    # Killed while it answers an event of Gradio's: the event waits for the next server, and nothing
    # is reloaded.
    fill(page, "train.warmup_steps", "17")
    page.wait_for_timeout(500)
    server.process.send_signal(signal.SIGSTOP)
    box(page, "data.max_seq_len").press_sequentially("0")
    box(page, "data.max_seq_len").press("Tab")  # the preview is asked for
    page.wait_for_timeout(300)
    server.end()
    expect(note(page)).to_contain_text("Connection lost")
    first = {event.step: event for event in recorded_steps(folder)}
    box(page, "name").fill("")
    box(page, "name").press_sequentially("Half typ")
    server.start()
    expect(state(page)).to_have_text("Interrupted")
    expect(note(page)).to_contain_text("The server was started again")
    saved = re.search(
        r"[Ii]nterrupted at step (\d+), when .* continues from step (\d+)\.",
        note(page).inner_text(),
    ).groups()
    assert int(saved[0]) == max(first) > int(saved[1])
    expect(page.locator("#start")).to_be_enabled()
    expect(box(page, "name")).to_have_value("Half typ")
    expect(box(page, "train.warmup_steps")).to_have_value("17")
    expect(page.locator(".rs-preview-head")).not_to_have_class(re.compile("rs-pending"))
    wait_until(lambda: '"Half typ"' in (server.runs / ".draft.json").read_text(), server)
    assert is_the_same(page) and page.get_by_text("Connection Lost").count() == 0

    # What is asked of Gradio works: a preset fills the form. And Resume goes on to the bit.
    page.locator("#preset input").click()
    page.get_by_role("option", name="Starter").click()
    expect(box(page, "train.warmup_steps")).to_have_value("20")
    open_run(page, folder.id)
    press(page, "resume")
    expect(state(page)).to_have_text("Running")
    wait_until(lambda: steps_done(folder) > max(first), server)
    again = {event.step: event for event in recorded_steps(folder)[len(first) :]}
    both = sorted(first.keys() & again.keys())
    assert both == list(range(int(saved[1]) + 1, max(first) + 1))
    assert all(
        (first[step].loss, first[step].grad_norm) == (again[step].loss, again[step].grad_norm)
        for step in both
    )
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")


def test_a_detached_run_goes_on_without_a_server_and_ctrl_c_stops_and_saves(own):
    """A detached run makes steps while no server lives, and the next one finds it."""
    server, context = own
    page = opened(context, server)
    prepare(page, "Detached", 20_000)
    page.get_by_label("Keep training if I close Ramstream").check()
    detached = RunFolder(server.runs / start(page))
    wait_for_points(page, least=3)
    open_page(page, "new")
    expect(page.locator("#start")).to_be_hidden()
    expect(page.locator(".rs-why-not")).to_contain_text("Detached is training")
    server.end()
    grows(detached, server)
    done = steps_done(detached)
    server.start()
    expect(state(page)).to_have_text("Running")
    expect(note(page)).to_contain_text(
        re.compile(r"The server was started again after \d+ s\. The run went on: [\d,]+ more")
    )
    open_run(page, detached.id)
    wait_for_points(page, least=done)
    shows_every_step(page)
    press(page, "pause")
    expect(state(page)).to_have_text("Paused")
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")
    expect(page.locator("#start")).to_be_enabled()
    assert is_the_same(page)

    # Ctrl-C stops and saves a run of the server's own.
    press(page, "resume")
    expect(state(page)).to_have_text("Running")
    assert server.end(signal.SIGINT) == 0, server.log()
    assert "Traceback" not in server.log()  # the page's streams ended with the server
    assert next(run for run in list_runs(server.runs) if run.id == detached.id).state == "stopped"
