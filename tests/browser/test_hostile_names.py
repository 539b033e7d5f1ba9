"""Names of models, data sets, columns, runs and settings, and all that a record says, are text
wherever a page shows them.
"""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from engine.config.settings import TrainConfig
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from engine.runs.summaries.about import NAME_LIMIT, write_about
from engine.runs.summaries.benchmark_results import append_benchmarks
from engine.runs.summaries.evaluation_results import (
    Answer,
    Began,
    PromptsAnswered,
    Wanted,
    append_evaluation,
)
from tests.browser.screen import (
    NEW_FORM,
    address,
    fill,
    more_of,
    open_page,
    open_view,
    row_of,
    wait_for_points,
)
from tests.support.browser import WAIT_MILLISECONDS, Server
from tests.support.hostile import HOSTILE, hostile_events
from tests.support.measured import measured
from tests.support.ports import free_port
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

# What only markup, a link, a script or a template in one of the names can have made.
FOUND = """() => ({
  hacked: window.hacked ?? null,
  made: [
    ...document.querySelectorAll('img[src="x"], svg[onload], [onerror], [href^="javascript:"]')]
    .map((node) => node.outerHTML),
  bold: [...document.querySelectorAll('b, script, svg a, svg tspan')].filter(({textContent}) =>
    ['bold', 'x', 'window.hacked=4'].includes(textContent)).map((node) => node.outerHTML),
})"""
SETTINGS = {"name": HOSTILE, "model": {"source": HOSTILE}, "data": {"source": HOSTILE}}
NOTHING = {"hacked": None, "made": [], "bold": []}


def hostile_run(runs):
    """A failed run whose settings, notes, checkpoint and record are hostile."""
    folder = create_run(runs, TrainConfig.from_dict(SETTINGS))
    recorder = RunRecorder(folder.path, folder.id)
    for event in hostile_events(60):
        recorder.emit(event)
    recorder.close()
    write_about(folder, HOSTILE[:NAME_LIMIT], HOSTILE)
    (folder.checkpoints_path / "step-40").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """With a queue from before and a data file, both hostile."""
    server = Server(tmp_path_factory.mktemp("app"), free_port())
    server.runs.mkdir()
    waiting = {
        "id": "abcd",
        "name": HOSTILE,
        "model": HOSTILE,
        "data": HOSTILE,
        "added": 0.0,
        "problem": HOSTILE,
        "config": TrainConfig.from_dict(SETTINGS).to_dict(),
    }
    kept = {"held": True, "runs": [waiting]}
    (server.runs / "queue.json").write_text(json.dumps(kept))
    server.start()
    yield server
    server.end()


def clean(page):
    page.wait_for_timeout(300)  # an image that cannot be loaded takes a moment to say so
    assert page.evaluate(FOUND) == NOTHING


def hover_until_labeled(page, chart):
    """Moves the mouse over a chart until a label shows. A chart that is drawn anew takes its label
    away, and shows none before the mouse moves again.
    """
    label = chart.locator(".hoverlayer")
    for move in range(WAIT_MILLISECONDS // 200):
        chart.hover(position={"x": 180 + move % 40, "y": 90})
        page.wait_for_timeout(200)
        if label.text_content():
            return


def test_names_never_become_markup(page, context, server):
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))

    # The form and the preview: hostile columns, values and file names.
    source = server.folder / f"{HOSTILE.replace('/', '')[:120]}.jsonl"
    row = {
        f"{HOSTILE} prompt": HOSTILE,
        f"{HOSTILE} completion": f"{HOSTILE} done",
        HOSTILE: HOSTILE,
    }
    source.write_text("\n".join([json.dumps(row)] * 3))
    fill(page, "data.source", str(source))
    preview = page.locator(".rs-preview")
    expect(preview).to_contain_text("<img src=x")
    clean(page)
    source = source.with_name(f"2{source.name}")
    source.write_text("\n".join([json.dumps({"prompt": "ask", "completion": HOSTILE})] * 3))
    fill(page, "data.source", str(source))
    expect(preview.locator("mark").nth(1)).to_contain_text("onerror")
    fill(page, "model.source", HOSTILE)
    expect(page.locator(".rs-fit-panel")).to_contain_text("<img src=x")
    clean(page)

    # A run: every view, card, chart and hover label.
    one, two = hostile_run(server.runs), hostile_run(server.runs)
    append_benchmarks(one.path, [measured(HOSTILE, metric=HOSTILE, dtype=HOSTILE, harness=HOSTILE)])
    answers = [Answer(HOSTILE, HOSTILE, HOSTILE)]
    append_evaluation(
        one.path,
        Began("one", Wanted(own=HOSTILE), "best", 7, HOSTILE, "", 1.78e9, HOSTILE),
        *(PromptsAnswered("one", side, answers, 3, 1.0) for side in ("base", "trained")),
    )
    page.goto(address(server, one.id, "machine"))
    expect(page.locator(".rs-bar [data-field=name]")).to_contain_text("<img src=x")
    wait_for_points(page, "norms")
    page.locator("[data-figure=norms]").hover(position={"x": 160, "y": 90})
    page.locator("[data-figure=timeline]").scroll_into_view_if_needed()
    page.wait_for_selector("[data-figure=timeline] .main-svg")
    box, tip = (
        page.locator("[data-figure=timeline]").bounding_box(),
        page.locator(".rs-timeline .rs-tip"),
    )
    for y in range(10, int(box["height"]) - 40, 8):  # down through the lanes
        page.mouse.move(box["x"] + 400, box["y"] + y)
        if tip.is_visible() and "hacked" in tip.inner_text():
            break
    expect(tip).to_contain_text("<img src=x")
    for view, shown in (
        ("overview", ".rs-head"),
        ("learning", ".rs-run [data-part=prompts]"),
        ("settings", "[data-part=settings-main]"),
        ("log", ".rs-log"),
        ("evaluate", "[data-part=side-by-side]"),
    ):
        open_view(page, view)
        expect(page.locator(shown)).to_be_visible()
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        clean(page)
    open_view(page, "log")
    expect(page.locator(".rs-log")).to_contain_text("<img src=x")
    open_view(page, "settings")
    expect(page.locator("pre[data-field=config]")).to_contain_text("<img src=x")

    # Runs: the queue, the list, the comparison with its hover label.
    open_page(page, "runs")
    expect(page.locator("[data-part=queue-rows] li")).to_contain_text("<img src=x")
    expect(row_of(page, one.id)).to_contain_text("window.hacked=2")
    clean(page)
    page.goto(f"{server.address}/?compare={one.id},{two.id}")
    page.wait_for_function("document.querySelector('[data-compare=loss]')?.data?.length >= 2")
    expect(page.locator("[data-part=compare-runs] li")).to_have_count(2)
    hover_until_labeled(page, page.locator("[data-compare=loss]"))
    expect(page.locator("[data-compare=loss] .hoverlayer")).to_contain_text("<img src=x")
    more_of(page, two.id).get_by_role("menuitem", name="Delete").click()
    expect(page.locator(".rs-runs dialog[data-part=delete]")).to_contain_text("<img src=x")
    page.keyboard.press("Escape")
    clean(page)

    # Chat, and the form filled from the run.
    open_page(page, "chat")
    expect(page.locator(".rs-chat select[name=run]")).to_contain_text("<img src=x")
    expect(page.locator(".rs-chat [data-field=about]")).to_contain_text("<img src=x")
    clean(page)
    open_page(page, "runs")
    more_of(page, one.id).get_by_role("menuitem", name="Duplicate").click()
    expect(page).to_have_url(NEW_FORM)  # the form of the page before has the same values
    expect(page.locator("#field-model-source :is(input, textarea)")).to_have_value(HOSTILE)
    expect(page.locator(".rs-fit-panel")).to_contain_text("<img src=x")
    clean(page)
    assert dialogs == []
