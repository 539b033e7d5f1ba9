"""The frame: the sidebar, the line over a run, and the address, which says what is shown."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from engine.config.settings import TrainConfig
from engine.runs.record.events import BestKept, EvalFinished, ExactMatchMeasured
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from tests.browser.screen import (
    VIEWS,
    address,
    bar,
    open_other_settings,
    open_page,
    open_view,
    page_link,
    recorded_run,
    state,
    view_link,
    wait_for_points,
)
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS
from tests.support.synthetic_run import run_events, step_finished

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

BOX = "node => { const {top, bottom} = node.getBoundingClientRect(); return [top, bottom]; }"


@pytest.fixture
def server(own_server):
    """With no runs of other files in the sidebar."""
    return own_server


@pytest.fixture
def going(server):
    """A run that goes on, as far as a page can tell."""
    config = {"name": "Going", "model": {"source": "m"}, "data": {"source": "d"}}
    folder = create_run(server.runs, TrainConfig.from_dict(config))
    recorder = RunRecorder(folder.path, folder.id)
    for event in run_events(80, total=200, name="Going", ended=None, blocks=4):
        recorder.emit(event)
    with folder.lock():
        yield folder
    recorder.close()


def current(page, links):
    return page.locator(f"{links}[aria-current=page]")


def test_every_place_has_an_address_and_back_forward_and_a_reload_find_it(context, server, going):
    over = recorded_run(server, 40, "Over")
    recorder = RunRecorder(over.path, over.id)
    for step, loss in ((40, 0.32), (41, 0.31), (42, 0.3)):
        recorder.emit(EvalFinished(step=step, loss=loss, loss_tokens=900))
        recorder.emit(BestKept(step=step, loss=loss))
    broken = {"prompt": "Junk?", "expected": "4", "answer": "\ufffd\x7fab"}
    recorder.emit(ExactMatchMeasured(42, "after", 48, 50, [broken]))
    recorder.close()
    page = context.new_page()
    page.goto(f"{server.address}/?show=runs")
    entries = page.locator(".rs-nav li")
    expect(entries.nth(0)).to_contain_text(re.compile(r"Going\s*Running · 40 %"))
    expect(entries.nth(1)).to_contain_text(re.compile(r"Over\s*Learned"))
    expect(entries.nth(1).locator("a")).to_have_attribute("data-tone", "good")
    expect(current(page, ".rs-nav > a")).to_have_text("Runs")
    expect(state(page)).to_be_visible()  # of the run that goes on, on every page
    expect(page.locator(".rs-views")).to_be_hidden()

    page.evaluate("window.isTheSame = true")
    entries.nth(1).locator("a").click()
    for view in VIEWS:
        open_view(page, view)
        expect(page).to_have_url(address(server, over.id, view))
        expect(bar(page, "name")).to_have_text("Over")
        if view == "overview":
            read_what_is_broken(page.locator("[data-part=answers] tr", has_text="Junk?"))
    # The other run goes on meanwhile, and the sidebar says how far it is.
    recorder = RunRecorder(going.path, going.id)
    recorder.emit(step_finished(100, 200))
    recorder.close()
    expect(entries.nth(0)).to_contain_text("Running · 50 %")
    page.go_back()
    expect(page).to_have_url(address(server, over.id, "log"))
    expect(page.locator(".rs-log")).to_contain_text("2 earlier ones are not shown.")
    page.get_by_label("Kind").select_option("Everything")
    expect(page.locator(".rs-log")).not_to_contain_text("not shown")
    expect(page.locator(".rs-log li", has_text="over 900 tokens")).to_have_count(4)
    # Words and a kind find together, and how many there are is said.
    search, found = page.locator("[data-part=log-search] input"), page.locator(".rs-log li")
    search.fill("Step 41")
    expect(found).to_have_count(2)
    page.get_by_label("Kind").select_option("Checkpoints and exports")
    expect(found).to_contain_text(["Best so far: step 41"])
    expect(page.locator("[data-field=log-count]")).to_contain_text(re.compile(r"^1 of \d+ entries"))
    search.fill("nothing of that kind")
    expect(found).to_have_text(["No entry matches."])
    search.fill("")
    for _ in range(len(VIEWS) - 1):
        page.go_back()
    expect(current(page, ".rs-nav > a")).to_have_text("Runs")
    expect(page.locator(".rs-runs")).to_be_visible()
    page.go_forward()
    expect(current(page, view_link("overview"))).to_be_visible()
    assert page.evaluate("window.isTheSame"), "nothing of this loads the page anew"

    # A reload, and the same address in another tab.
    open_view(page, "learning")
    page.reload()
    other = context.new_page()
    other.goto(page.url)
    for each in (page, other):
        expect(current(each, view_link("learning"))).to_be_visible()
        expect(bar(each, "name")).to_have_text("Over")
        wait_for_points(each, "optimizer")

    # Without a run, the one that goes on; addresses of earlier versions go on working.
    for old, view, name in (
        ("tab=live", "overview", "Going"),
        (f"tab=talk&run={over.id}", "chat", "Over"),
        (f"run={over.id}&step=10&view=machine", "machine", "Over"),
    ):
        other.goto(f"{server.address}/?{old}")
        expect(current(other, view_link(view))).to_be_visible()
        expect(bar(other, "name")).to_have_text(name)
    expect(other.locator("[data-timeline=number]")).to_have_text("Step 10")
    other.goto(f"{server.address}/?show=talk")
    expect(current(other, ".rs-nav > a")).to_have_text("Chat")


def read_what_is_broken(row):
    """Broken characters are folded, with a button that shows them."""
    expect(row).to_contain_text("Unreadable")
    row.get_by_role("button", name="Show").click()
    expect(row).to_contain_text("ab")
    expect(row).not_to_contain_text("Unreadable")


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1366, 768), (800, 900), (390, 844)])
def test_the_timeline_of_a_step_is_large_in_every_window(blank, server, going, width, height):
    """The page scrolls instead."""
    page = blank
    page.set_viewport_size({"width": width, "height": height})
    page.goto(address(server, going.id))
    wait_for_points(page, "tflops")
    lanes = page.locator(".rs-timeline .rs-lanes")
    lanes.scroll_into_view_if_needed()
    page.wait_for_selector("[data-figure=timeline] .main-svg")
    box = lanes.bounding_box()
    assert box["height"] >= 200
    assert box["width"] > 0.9 * page.locator(".rs-charts").bounding_box()["width"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_overview_shows_memory_and_the_line_over_a_run_stays(blank, server, going):
    page = blank
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(address(server, going.id))
    memory = page.locator("[data-caption=memory_line]")
    memory.scroll_into_view_if_needed()
    expect(memory).to_contain_text("RAM: peak 100 GiB · flat · 28.0 GiB free")
    wait_for_points(page, "memory_line")

    for width in (1440, 800, 390):
        page.set_viewport_size({"width": width, "height": 844})
        open_view(page, "machine")
        wait_for_points(page, "norms")
        page.evaluate("window.scrollTo(0, document.documentElement.scrollHeight)")
        page.wait_for_function("window.scrollY > 300")
        for part in (".rs-bar .rs-state", ".rs-bar [data-field=step]", "[data-command=pause]"):
            top, bottom = page.locator(part).evaluate(BOX)
            assert 0 <= top < bottom < 260, (width, part, top, bottom)
        expect(page.get_by_role("button", name="Stop", exact=True)).to_be_in_viewport()

    # So does the verdict beside a form that is longer than the window.
    page.set_viewport_size({"width": 1440, "height": 900})
    open_page(page, "new")
    page.wait_for_selector(".rs-fit-panel:not([data-tone=calm])")
    open_other_settings(page)
    page.wait_for_function("document.documentElement.scrollHeight > 1800")
    page.evaluate("window.scrollTo(0, 900)")
    page.wait_for_function("window.scrollY > 800")
    expect(page.locator("#add-to-queue")).to_be_in_viewport()  # a run goes on
    expect(page.locator(page_link("runs"))).to_be_in_viewport()


COUNTED = """
const plain = window.requestAnimationFrame.bind(window);
window.frames_asked_for = 0;
window.requestAnimationFrame = (draw) => { window.frames_asked_for += 1; return plain(draw); };
"""


def test_a_page_where_nothing_moves_asks_for_no_frames(context, server):
    """Else the browser would draw 60 of them a second beside the run, which needs the cores."""
    page = context.new_page()
    page.add_init_script(COUNTED)
    page.goto(f"{server.address}/?show=hardware")
    page.wait_for_selector(".rs-fit-panel:not([data-tone=calm])", state="attached")
    asked_for = -1
    for _ in range(60):  # the page is still being made, by Gradio and by us
        before, asked_for = asked_for, page.evaluate("window.frames_asked_for")
        if before == asked_for:
            break
        page.wait_for_timeout(1000)
    assert before == asked_for > 0
