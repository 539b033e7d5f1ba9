"""The page for those who use no mouse, hear it instead of seeing it, or look at it on a phone."""

from __future__ import annotations

import re
from collections import namedtuple

import pytest
from playwright.sync_api import expect
from starlette.applications import Starlette
from starlette.testclient import TestClient

from app.server.login import Login
from app.server.login_form import login_routes
from engine.config.settings import TrainConfig
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from tests.browser.screen import (
    OPENED_RUN,
    PAGES,
    VIEWS,
    open_other_settings,
    open_page,
    open_view,
    page_link,
    row_of,
    run_of,
    verdict,
    view_link,
)
from tests.support.axe import AXE, FIND, IMPACTS, SCHEMES, STANDARDS, look
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS
from tests.support.synthetic_run import run_events

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

PLACES = (*PAGES, *VIEWS)
PHONE = 390
LEAST_TARGET, FINGER = 24, 40
"""px: of whatever is pressed (WCAG 2.2), and of the buttons of a run on a phone."""
STAYS = 110
"""px at most, at the top of a phone's screen, for what stays in view of the line over a run."""

LABELS = """(nodes) => Object.fromEntries([...document.querySelectorAll(nodes)]
  .map((node) => [Object.values(node.dataset)[0] ?? 'lengths', [node.ariaLabel,
    ...(node.getAttribute('aria-describedby') ?? '').split(' ').filter(Boolean)
      .map((id) => document.getElementById(id).textContent)].filter(Boolean).join(' ')]))"""
CHARTS, COMPARED = "[data-figure], [data-pool], .rs-lengths-plot", "[data-compare]"
RING = """() => {
  const node = document.activeElement;
  const style = getComputedStyle(node.closest('.rs-train .container > .wrap') ?? node);
  const box = node.getBoundingClientRect(), text = node.textContent.trim().slice(0, 30);
  const name = `${node.tagName} ${node.id || node.className || ''} ${text}`;
  return {name, isBody: node === document.body,
    isSeen: box.width > 1 && style.outlineStyle !== 'none'
      && parseFloat(style.outlineWidth) >= 2 && style.outlineColor !== 'rgba(0, 0, 0, 0)'};
}"""
SMALL = """(least) => [
    ...document.querySelectorAll('button, select, summary, [role=tab], input, textarea')]
  .filter((node) => node.checkVisibility({visibilityProperty: true}))
  .filter((node) => !node.closest('.rs-hidden, .rs-grid, [inert]'))
  .map((node) => [node,
    (node.closest('label:has([type=checkbox], [type=radio]), .wrap:has([role=combobox])') ?? node)
      .getBoundingClientRect()])
  .filter(([, box]) => box.width > 1 && box.height > 1 && (box.width < least || box.height < least))
  .map(([node, box]) => `${node.tagName} ${node.id || node.textContent.trim().slice(0, 30)}: `
    + `${box.width} x ${box.height}`)"""

Opened = namedtuple("Opened", "page active recorder")


def record(server, name, steps, **how):
    """The folder and the recorder of a run that was never trained."""
    folder = create_run(
        server.runs,
        TrainConfig.from_dict({"name": name, "model": {"source": name}, "data": {"source": name}}),
    )
    recorder = RunRecorder(folder.path, folder.id)
    for event in run_events(steps, name=name, **how):
        recorder.emit(event)
    return folder, recorder


# ------------------------------------------------------------------ by keyboard alone
# First, while nothing else is under way.


def go(page, wanted, limit=90, key="Tab"):
    """Press Tab until the focus is on `wanted`, as a person would who has nothing else."""
    for _ in range(limit):
        if page.evaluate("wanted => document.activeElement.matches(wanted)", wanted):
            return
        page.keyboard.press(key)
    raise AssertionError(f"{wanted} is not reached by {key}")


def test_a_run_is_made_by_keyboard_alone(page, server):
    press = page.keyboard.press
    state = page.locator(".rs-bar .rs-state")

    go(page, "#preset input")
    press("Control+A")
    page.keyboard.type("Starter")
    press("Enter")
    expect(page.locator("#preset input")).to_have_value("Starter")
    go(page, "#field-train-steps :is(input, textarea)")
    press("Control+A")
    page.keyboard.type("300")
    page.wait_for_timeout(500)  # Gradio takes over what was typed a moment later
    page.wait_for_selector("#start:not([disabled])")
    go(page, "#start")
    press("Enter")
    expect(page).to_have_url(OPENED_RUN)
    run_id = run_of(page)
    expect(state).to_have_text("Running")

    go(page, "[data-command=pause]")
    press("Enter")
    expect(state).to_have_text("Paused")
    expect(page.locator("[data-command=resume]")).to_be_focused()
    expect(page.locator(".rs-bar [data-field=announced]")).to_contain_text("Paused")
    more, stop = ".rs-actions [data-menu=more]", ".rs-actions [data-menu=stop]"
    go(page, more, 4)
    press("Enter")
    expect(page.locator(".rs-menu [data-act=save]")).to_be_focused()
    press("Space")
    page.wait_for_timeout(1500)  # nothing can be asked for until the run has taken it
    expect(page.locator(more)).to_be_focused()
    press("Enter")
    press("ArrowDown")
    expect(page.locator(".rs-menu [data-act=change]")).to_be_focused()
    press("Enter")
    expect(page.get_by_role("dialog", name="Edit this run")).to_be_visible()
    press("Escape")
    expect(page.locator(more)).to_be_focused()
    go(page, stop, 4, "Shift+Tab")
    press("Enter")
    expect(page.locator(".rs-menu [data-act=stop]")).to_be_focused()
    press("Enter")
    expect(state).to_have_text("Stopped")
    expect(page.locator(".rs-bar [data-field=announced]")).to_contain_text("Stopped")

    # The run's views and the list of runs, and back.
    go(page, view_link("log"))
    press("Enter")
    expect(page.locator(view_link("log"))).to_have_attribute("aria-current", "page")
    expect(page.locator(".rs-log")).to_contain_text("Checkpoint of step")
    go(page, page_link("runs"))
    press("Enter")
    expect(row_of(page, run_id)).to_be_visible()
    go(page, f"tr[data-run='{run_id}'] [data-act=more]")
    press("Enter")
    go(page, ".rs-menu [data-act=details]")
    press("Enter")
    expect(page.locator("pre[data-field=config]")).to_contain_text("max_seq_len")
    expect(page.locator(view_link("settings"))).to_have_attribute("aria-current", "page")
    page.go_back()
    expect(row_of(page, run_id)).to_be_visible()


# ------------------------------------------------------------------ what is on the page


@pytest.fixture(scope="module")
def opened(browser, server):
    """One page for the tests below, with runs of every kind, one of them going on as far as the
    page can tell.
    """
    for name, ended in (
        ("One that failed", "failed"),
        ("One with a rather long name that nobody can remember", "finished"),
        ("Broken off", None),
    ):
        folder, recorder = record(server, name, 60, ended=ended)
        recorder.close()
        if ended == "finished":
            (folder.checkpoints_path / "step-60").mkdir(parents=True)  # so it can be exported
    folder, recorder = record(server, "Under way", 80, total=200, ended=None, blocks=4)
    context = browser.new_context(viewport={"width": 1300, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(WAIT_MILLISECONDS)
    page = context.new_page()
    with folder.lock():
        page.goto(server.address)
        page.wait_for_selector(".rs-fit-panel:not([data-tone=calm])")
        page.wait_for_selector(".rs-preview li")
        page.evaluate(AXE)
        yield Opened(page, folder, recorder)
    context.close()
    recorder.close()


def open_place(page, place):
    """Opens a page, or a view of the run that is under way."""
    page.set_viewport_size({"width": 1300, "height": 900})
    if place in PAGES and place != "chat":
        open_page(page, place)
    else:
        page.locator(".rs-nav a[data-run]", has_text="Under way").click()
        open_view(page, place)
    if place == "overview":
        expect(page.locator("[data-figure=loss] .main-svg").first).to_be_attached()
    elif place == "log":
        expect(page.locator(".rs-log li").first).to_be_visible()
    elif place == "runs":
        expect(page.locator("[data-part=rows] tr", has_text="Under way")).to_be_visible()
    elif place == "hardware":
        expect(page.locator(".rs-grid tbody tr").first).to_be_visible()


@pytest.mark.parametrize("place", dict.fromkeys(PLACES))
def test_no_place_has_a_serious_finding_or_is_wider_than_its_window(opened, place):
    open_place(opened.page, place)
    assert not (findings := look(opened.page, place)), "\n".join(findings)


def test_no_dialog_and_no_form_has_a_serious_finding(opened):
    page, findings = opened.page, []
    open_place(page, "new")
    page.locator("#add-to-queue").click()
    expect(page.locator(".rs-queued")).to_contain_text("in line")
    open_place(page, "runs")
    finished = page.locator("[data-part=rows] tr", has_text="nobody can remember")
    for box in page.locator("[data-act=compare]").all()[:2]:
        box.check()
    page.locator("[data-part=compare-open]").click()
    expect(page.locator("[data-compare=memory] .main-svg").first).to_be_attached()
    look(page, "queue and comparison", ".rs-runs", findings)
    dialogs = {
        "delete": finished.locator("[data-act=more]"),
        "rename": finished.locator("[data-act=more]"),
        "change": page.locator(".rs-actions [data-menu=more]"),
        "discard": page.locator(".rs-actions [data-menu=stop]"),
    }
    for name, button in dialogs.items():
        button.click()
        if name in ("delete", "rename"):
            page.locator(f".rs-runs .rs-menu [data-act={name}]").click()
        else:
            look(page, f"menu with {name}", ".rs-bar", findings)
            page.locator(f".rs-bar .rs-menu [data-act={name}]").click()
        dialog = page.locator(f"dialog[data-part={name}][open]")
        expect(dialog).to_be_visible()
        look(page, name, f"dialog[data-part={name}][open]", findings)
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(button).to_be_focused()
    page.locator("[data-part=compare-close]").click()
    assert not findings, "\n".join(findings)


def test_the_login_page_has_no_serious_finding(browser, tmp_path):
    client, without_password = (
        TestClient(Starlette(routes=login_routes(login)))
        for login in (
            Login("ada", "open sesame", tmp_path / "key"),
            Login.without_password(tmp_path / "key"),
        )
    )
    context = browser.new_context()
    page = context.new_page()
    for answer in (
        client.get("/login"),
        client.post("/login", data={"user": "ada", "password": "wrong"}),
        without_password.get("/login?link_used=1"),
    ):
        page.set_content(answer.text)
        page.evaluate(AXE)
        assert not (findings := look_at_colors_of_the_system(page)), "\n".join(findings)
    context.close()


def look_at_colors_of_the_system(page):
    """Of a page that follows the system's theme by its style sheet alone."""
    findings = []
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        findings += [
            f"{scheme}: {found}"
            for found in page.evaluate(FIND, [None, {"type": "tag", "values": STANDARDS}])
            if found["impact"] in IMPACTS
        ]
    return findings


def test_every_chart_says_in_words_what_it_shows_now(opened):
    page = opened.page
    open_place(page, "overview")
    before = page.evaluate(LABELS, CHARTS)
    live = ("loss", "tflops", "throughput", "optimizer", "memory", "step_time", "power", "norms")
    for name in (*live, "timeline", "host", "lengths"):
        assert re.search(r"\d", before[name]), f"{name}: {before[name]}"
    assert before["loss"].startswith("Loss: Latest: training ")
    for event in run_events(120, total=200, ended=None, blocks=4)[-70:]:
        opened.recorder.emit(event)
    page.wait_for_function(
        "() => document.querySelector('.rs-bar [data-field=step]').textContent.startsWith('120')"
    )
    page.wait_for_function(
        "() => document.querySelector('[data-figure=loss]').ariaLabel.includes('step 120')"
    )
    after = page.evaluate(LABELS, CHARTS)
    assert not [
        name for name in ("loss", "optimizer", "norms", "timeline") if before[name] == after[name]
    ]

    open_place(page, "new")
    open_other_settings(page)
    page.locator("#field-train-batch_size :is(input, textarea)").fill("16")
    expect(page.locator(".rs-fit-panel [data-field=size]")).to_contain_text("up to 2,048 tokens")
    assert page.locator("[data-pool=host]").get_attribute("aria-label") != before["host"]
    page.locator("#field-data-max_seq_len :is(input, textarea)").fill("32")
    page.locator("#field-data-max_seq_len :is(input, textarea)").blur()
    page.wait_for_function(
        "label => document.querySelector('.rs-lengths-plot').ariaLabel !== label",
        arg=before["lengths"],
    )

    open_place(page, "runs")
    for box in page.locator("[data-act=compare]").all()[:2]:
        box.check()
    page.locator("[data-part=compare-open]").click()
    page.wait_for_function(
        "() => /Under way.*\\d/.test(document.querySelector('[data-compare=memory]').ariaLabel)"
    )
    compared = page.evaluate(LABELS, COMPARED)
    assert all(re.search(r"\d", compared[name]) for name in ("loss", "throughput", "memory"))
    page.locator("[data-part=compare-close]").click()


@pytest.mark.parametrize("place", dict.fromkeys(PLACES))
def test_the_focus_is_seen_wherever_it_comes(opened, place):
    page = opened.page
    open_place(page, place)
    first = page.locator(page_link("new"))
    unseen, stops = [], 0
    for scheme in SCHEMES if place == "new" else SCHEMES[:1]:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        first.focus()
        for _ in range(60):
            page.keyboard.press("Tab")
            found = page.evaluate(RING)
            if found["isBody"]:
                break
            stops += 1
            if not found["isSeen"]:
                unseen.append(found["name"])
    assert stops >= 5
    assert not unseen


def test_a_phone_shows_the_run_first_and_has_buttons_for_fingers(opened):
    page = opened.page
    for place in dict.fromkeys(PLACES):
        open_place(page, place)
        page.set_viewport_size({"width": PHONE, "height": 844})
        assert not page.evaluate(SMALL, LEAST_TARGET), place
    for button in page.locator(".rs-actions button:visible").all():
        assert button.bounding_box()["height"] >= FINGER
    tops = [
        page.locator(f".rs-bar [data-field={name}]").bounding_box()["y"]
        for name in ("word", "step")
    ]
    assert max(tops) < 200
    open_place(page, "overview")
    page.set_viewport_size({"width": PHONE, "height": 844})
    tops = page.evaluate(
        "[...document.querySelectorAll('.rs-charts figure')].filter((node) => node.offsetParent)"
        ".map((node) => [node.getBoundingClientRect().left, node.getBoundingClientRect().top])"
    )
    assert len({left for left, _ in tops}) == 1 and len({top for _, top in tops}) == len(tops)
    assert verdict(page).bounding_box()["y"] < 300

    # What stays in view is small, and every view can be reached.
    page.evaluate("scrollTo(0, 900)")
    page.wait_for_function("scrollY > 300")
    bar = page.locator("#rs-run_bar").bounding_box()
    assert bar["y"] + bar["height"] <= STAYS
    for name in ("word", "step"):
        expect(page.locator(f".rs-bar [data-field={name}]")).to_be_in_viewport(ratio=1)
    for button in page.locator(".rs-actions button:visible").all():
        expect(button).to_be_in_viewport(ratio=1)
    views = page.locator(".rs-views")
    expect(views).to_have_class(re.compile("rs-cut"))
    open_view(page, VIEWS[-1])
    expect(page.locator(view_link(VIEWS[-1]))).to_be_in_viewport(ratio=0.99)
    expect(views).not_to_have_class(re.compile("rs-cut"))


TABLE_MILLISECONDS = 240_000
"""Five machines plan for each model of the catalog, beside whatever else runs."""


def test_no_column_of_the_table_of_machines_is_cut_and_the_dark_has_dark_scrollbars(opened):
    page = opened.page
    open_place(page, "hardware")
    grid = page.locator(".rs-grid")
    page.set_viewport_size({"width": 1440, "height": 900})
    expect(grid.locator("thead th")).to_have_count(8)
    speeds = grid.locator("tbody tr").first.get_by_text("tokens/s")
    expect(speeds).to_have_count(5, timeout=TABLE_MILLISECONDS)
    assert grid.evaluate("node => node.scrollWidth <= node.clientWidth")
    page.set_viewport_size({"width": PHONE, "height": 844})
    grid.scroll_into_view_if_needed()
    expect(grid.locator("tbody td:visible").first).to_be_in_viewport(ratio=1)
    expect(grid.locator("tbody td:visible b").first).to_be_visible()
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.wait_for_function(
            "dark => (getComputedStyle(document.documentElement).colorScheme === 'dark') === dark",
            arg=scheme == "dark",
        )
