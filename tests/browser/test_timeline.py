"""The timeline of a step, in Chromium, against the real server."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import expect

from engine.config.data_settings import DataConfig
from engine.config.settings import ModelConfig, TrainConfig
from engine.runs.record.events import PlanBuilt, StepFinished, StepTimeline
from engine.runs.record.run_folder import create_run
from tests.browser.screen import address
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.planned_steps import measured, plan_of, simulated
from tests.support.sets import BROWSER_FLOWS
from tests.support.synthetic_run import records, run_events, step_finished, timeline, write_events

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

HOSTILE = '<img src=x onerror="window.hacked=1">'
NODE = "document.querySelector('[data-figure=timeline]')"
RANGE = f"{NODE}.layout.xaxis.range"
BARS = "document.querySelector('.rs-lanes canvas').dataset"


@pytest.fixture(scope="module")
def run(server):
    """40 steps of a plan with two rounds; every fifth has a timeline, in which a name is markup."""
    plan = plan_of(blocks=6, micro_batches=4, rounds=2)
    events = []
    for event in run_events(40, total=100, ended=None):
        if not isinstance(event, StepTimeline):
            events.append(event)
        if isinstance(event, PlanBuilt):
            events.append(simulated(plan))
        if isinstance(event, StepFinished) and event.step % 5 == 0:
            events.append(measured(plan, event.step))
            events[-1].spans[0]["unit"] = HOSTILE
    folder = create_run(
        server.runs,
        TrainConfig(name="Timed", model=ModelConfig(source="m"), data=DataConfig(source="d")),
    )
    write_events(folder.events_path, records(events, folder.id))
    return folder


def opened(context, server, run, query=""):
    page = context.new_page()
    page.goto(f"{address(server, run.id, 'machine')}{query}")
    page.wait_for_selector("[data-figure=throughput] .main-svg")
    page.locator(".rs-timeline").scroll_into_view_if_needed()
    page.wait_for_selector("[data-figure=timeline] .main-svg")
    return page


def number(page):
    return page.locator("[data-timeline=number]")


def test_any_sampled_step_is_opened_and_has_an_address(context, server, run):
    page = opened(context, server, run)
    expect(number(page)).to_have_text("Step 40")
    expect(page.get_by_role("button", name="Follow the latest")).to_have_attribute(
        "aria-pressed", "true"
    )
    shown = page.locator("[data-caption=timeline]")
    expect(shown).to_contain_text(re.compile(r"^Step 40: .* · busy \d+ %$"))
    expect(page.locator(".rs-phases")).to_contain_text("Forward 1/2")
    expect(page.locator("[data-timeline=legend]")).to_contain_text("Compute: forward")
    page.get_by_text("How to read it").click()
    expect(page.locator("[data-timeline=colors]")).to_contain_text("Wait: optimizer")

    # By the buttons and by the slider's keys; the address follows.
    page.get_by_role("button", name="Earlier sampled step").click()
    expect(shown).to_contain_text("Step 35:")
    assert "step=35" in page.url and f"run={run.id}" in page.url
    slider = page.get_by_role("slider", name="Sampled step")
    slider.focus()
    page.keyboard.press("Home")
    expect(shown).to_contain_text("Step 5:")
    expect(slider).to_have_attribute("aria-valuetext", "Step 5")
    expect(page.get_by_role("button", name="Earlier sampled step")).to_be_disabled()

    # The address is enough, also of a step that was not sampled.
    page.goto(page.url.replace("step=5", "step=21"))
    expect(number(page)).to_have_text("Step 20")
    page.wait_for_url("**step=20**")

    # A point of a curve opens the sampled step next to it.
    page.wait_for_selector("[data-figure=throughput] .main-svg")
    page.evaluate(
        "document.querySelector('[data-figure=throughput]')"
        ".emit('plotly_click', {points: [{x: 11}]})"
    )
    expect(number(page)).to_have_text("Step 10")

    # Back to the latest, which then follows the run.
    page.get_by_role("button", name="Follow the latest").click()
    expect(shown).to_contain_text("Step 40:")
    page.wait_for_function("!location.search.includes('step=')")
    later = [step_finished(step, 100) for step in range(41, 46)] + [
        measured(plan_of(blocks=6, micro_batches=4, rounds=2), 45)
    ]
    write_events(run.events_path, records(later, run.id, first_seq=999))
    expect(number(page)).to_have_text("Step 45")
    assert page.locator("img[src=x]").count() == 0 and page.evaluate("window.hacked") is None


def test_zoom_and_prediction_stay_over_steps_and_the_trace_is_the_step(context, server, run):
    page = opened(context, server, run, "&step=15")
    expect(page.locator("[data-caption=timeline]")).to_contain_text("Step 15:")
    figure = page.get_by_role("group", name=re.compile("^Timeline of the step"))
    whole, all_of_it = page.evaluate(RANGE), page.get_by_role("button", name="Show the whole step")
    expect(all_of_it).to_be_hidden()
    figure.focus()
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    expect(all_of_it).to_be_visible()
    page.wait_for_function(f"{RANGE}[0] > {whole[0]}")
    page.wait_for_timeout(200)
    zoomed = page.evaluate(RANGE)
    assert zoomed[1] - zoomed[0] < 0.7 * (whole[1] - whole[0])
    page.get_by_role("button", name="Later sampled step").click()
    expect(page.locator("[data-caption=timeline]")).to_contain_text("Step 20:")
    assert page.evaluate(RANGE) == pytest.approx(zoomed)

    assert page.evaluate(f"{BARS}.predicted") == "4"
    page.get_by_role("button", name="Predicted", exact=True).click()
    page.wait_for_function(f"{BARS}.predicted === '0'")
    assert page.evaluate(RANGE) == pytest.approx(zoomed)
    all_of_it.click()
    expect(all_of_it).to_be_hidden()
    whole = page.evaluate(f"{NODE}.layout.xaxis.range")
    assert whole[0] < zoomed[0] and whole[1] > zoomed[1]

    # Bar by bar: what is chosen is told, the one before and after it, and the one beside it in
    # another lane.
    bar, tip = page.locator(".rs-lanes [role=status]"), page.locator(".rs-timeline .rs-tip")
    figure.focus()
    found = []
    for key in (".", ".", ",", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
        expect(bar).to_have_text(re.compile(r"^.+ ms, from [\d.]+ ms$"))
        expect(tip).to_be_visible()
        found.append(bar.text_content())
    first, second, again, below, above = found
    assert first == again != second
    assert below not in found[:3]
    assert above != below
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    expect(bar).to_be_empty()

    # By the mouse: a drag zooms, a double click goes back.
    box = figure.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 66)
    expect(page.locator(".rs-timeline .rs-tip")).to_contain_text(
        re.compile(r"^block \d+: \w+.*ms, from [\d.]+ ms$")
    )
    page.mouse.move(box["x"] + 200, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 80, steps=5)
    page.mouse.up()
    expect(all_of_it).to_be_visible()
    dragged = page.evaluate(RANGE)
    page.get_by_role("button", name="Predicted", exact=True).click()
    page.wait_for_function(f"{BARS}.predicted === '4'")
    assert page.evaluate(RANGE) == pytest.approx(dragged)
    page.mouse.dblclick(box["x"] + 300, box["y"] + 80)
    expect(all_of_it).to_be_hidden()
    assert page.evaluate(RANGE) == pytest.approx(whole)

    with page.expect_download() as download:
        page.get_by_role("link", name="Download trace").click()
    assert download.value.suggested_filename == f"{run.id}-step-20.trace.json"
    with open(download.value.path(), encoding="utf-8") as file:
        trace = json.load(file)
    spans = measured(plan_of(blocks=6, micro_batches=4, rounds=2), 20).spans
    ops = [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["pid"] == 1 and event["cat"] != "wait"
    ]
    assert len(ops) == len(spans)

    for width in (390, 800, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        figure.scroll_into_view_if_needed()
        page.wait_for_function(
            f"{NODE}.querySelector('.main-svg').clientWidth === {NODE}.clientWidth"
        )
        assert page.evaluate(
            "document.querySelector('.rs-timeline').scrollWidth"
            " <= document.querySelector('.rs-timeline').clientWidth"
        )


def test_a_step_of_ten_thousand_spans_is_shown_in_full_where_it_is_zoomed_into(context, server):
    folder = create_run(
        server.runs,
        TrainConfig(name="Many", model=ModelConfig(source="m"), data=DataConfig(source="d")),
    )
    steps = [timeline(step, blocks=400, micro_batches=7) for step in (10, 20)]
    many = [
        event
        for event in run_events(40, total=100, ended=None)
        if not isinstance(event, StepTimeline)
    ] + steps
    write_events(folder.events_path, records(many, folder.id))
    spans = steps[0].spans
    page = opened(context, server, folder)
    count = page.locator("[data-timeline=count]")
    expect(count).to_have_text(
        re.compile(rf"Showing 1?,?\d+ of {len(spans):,} spans; zoom in for all\.")
    )
    overview = count.inner_text()
    assert int(page.evaluate(f"{BARS}.bars")) <= 1502

    def zoom(start, end):
        page.evaluate(
            "([start, end]) => Plotly.relayout(document.querySelector('[data-figure=timeline]'),"
            " {'xaxis.range[0]': start, 'xaxis.range[1]': end})",
            [start, end],
        )

    # The answers to two zooms come in the wrong order: the second one's stays.
    held = []
    page.route("**/stretch?**", lambda route: held.append(route) if not held else route.continue_())
    zoom(1000, 1300)
    wait_until(page, lambda: held)
    zoom(3000, 3200)
    inside = [span for span in spans if span["end"] >= 2.95 and span["start"] <= 3.25]
    expect(count).to_have_text(f"Showing all {len(inside):,} spans of this stretch.")
    shown = len([span for span in spans if span["end"] > 3.0 and span["start"] < 3.2])
    page.wait_for_function(f"Math.abs({BARS}.bars - {shown}) <= 2")
    with contextlib.suppress(PlaywrightError):  # the page has given it up
        held[0].continue_()
    page.wait_for_timeout(300)
    expect(count).to_have_text(f"Showing all {len(inside):,} spans of this stretch.")
    assert page.evaluate(RANGE) == [3000, 3200]

    # A step that is sampled meanwhile comes into the same zoom, in full.
    write_events(
        folder.events_path,
        records([timeline(30, blocks=400, micro_batches=7)], folder.id, first_seq=99_000),
    )
    expect(number(page)).to_have_text("Step 30")
    expect(count).to_have_text(f"Showing all {len(inside):,} spans of this stretch.")
    assert page.evaluate(RANGE) == [3000, 3200]
    page.get_by_role("button", name="Show the whole step").click()
    expect(count).to_have_text(overview)
    page.wait_for_function(f"{BARS}.bars > 500")


def wait_until(page, condition):
    for _ in range(WAIT_MILLISECONDS // 100):
        if condition():
            return
        page.wait_for_timeout(100)
    raise AssertionError("this never became true")


def test_what_is_not_there_is_told_in_a_sentence(context, server, run):
    page = context.new_page()
    page.goto(server.address)
    for path, sentence in (
        (f"{run.id}/timeline?step=7", "the nearest one that has is step 5"),
        (f"{run.id}/trace?step=x", "is not the number"),
        ("nothing/timeline", "does not exist"),
    ):
        answer = page.request.get(f"{server.address}/api/runs/{path}")
        assert answer.status == 404 and sentence in answer.json()["error"]
