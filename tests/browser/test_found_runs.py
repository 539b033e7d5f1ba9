"""The page Runs, in Chromium: runs are searched for, tagged, sorted, deleted together, and wait to
be resumed.
"""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from engine.runs.summaries.about import write_about
from tests.browser.screen import more_of, recorded_run, row_of
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)


@pytest.fixture(scope="module")
def server(own_server):
    """A server whose list has the runs of these tests alone."""
    return own_server


@pytest.fixture(scope="module")
def three(server):
    """Three runs that are over, the newest last."""
    runs = [
        recorded_run(server, steps, name, **how)
        for steps, name, how in (
            (40, "Contracts rank 8", {}),
            (60, "Contracts rank 16", {"total": 90, "ended": "stopped"}),
            (30, "Recipes", {}),
        )
    ]
    (runs[1].checkpoints_path / "step-60").mkdir(parents=True)
    write_about(runs[2], "Recipes", "With the long ones left out", ["kitchen"])
    return runs


@pytest.fixture
def runs_page(blank, server, three):
    blank.goto(f"{server.address}/?show=runs")
    expect(row_of(blank, three[0].id)).to_be_visible()
    return blank


def shown_rows(page):
    return page.locator(".rs-runs [data-part=rows] tr")


def filtered(page, name):
    return page.locator(f"[data-part=filters] [name={name}]")


def test_runs_are_searched_for_filtered_and_sorted(runs_page, three):
    page = runs_page
    found = page.locator("[data-field=found]")
    expect(found).to_have_text("3 runs")
    filtered(page, "search").press_sequentially("rank contracts")
    expect(shown_rows(page)).to_have_count(2)
    expect(found).to_have_text("2 of 3 runs")
    filtered(page, "search").fill("left out")  # a word of a note
    expect(shown_rows(page)).to_have_count(1)
    filtered(page, "search").fill("nobody has this")
    expect(page.locator("[data-part=none-found]")).to_be_visible()
    expect(found).to_have_text("0 of 3 runs")
    page.get_by_role("button", name="Clear filters").click()
    expect(filtered(page, "search")).to_be_empty()
    expect(shown_rows(page)).to_have_count(3)
    filtered(page, "tag").select_option("kitchen")
    expect(shown_rows(page)).to_have_count(1)
    expect(row_of(page, three[2].id)).to_contain_text("kitchen")
    filtered(page, "tag").select_option("")
    filtered(page, "state").select_option("stopped")
    expect(shown_rows(page)).to_have_count(1)
    expect(row_of(page, three[1].id)).to_be_visible()
    filtered(page, "state").select_option("")
    by_name = page.locator("th[data-column=name]")
    by_name.get_by_role("button").click()
    expect(by_name).to_have_attribute("aria-sort", "ascending")
    expect(shown_rows(page).first).to_have_attribute("data-run", three[1].id)
    expect(shown_rows(page).last).to_have_attribute("data-run", three[2].id)
    by_name.get_by_role("button").click()
    expect(by_name).to_have_attribute("aria-sort", "descending")
    expect(shown_rows(page).first).to_have_attribute("data-run", three[2].id)


def test_columns_pins_and_a_baseline_are_chosen_and_kept(runs_page, three):
    page = runs_page
    size = page.locator("th[data-column=size]")
    expect(size).to_have_count(0)
    page.get_by_role("button", name="Columns").click()
    page.get_by_role("checkbox", name="Disk").check()
    page.get_by_role("checkbox", name="Data").uncheck()
    page.keyboard.press("Escape")
    expect(size).to_be_visible()
    expect(row_of(page, three[0].id).locator("[data-column=size]")).to_contain_text("KiB")
    more_of(page, three[0].id).get_by_role("menuitem", name="Pin to the top").click()
    expect(shown_rows(page).first).to_have_attribute("data-run", three[0].id)
    expect(row_of(page, three[0].id).get_by_title("Pinned")).to_be_visible()
    more_of(page, three[1].id).get_by_role("menuitem", name="Set as baseline").click()
    expect(row_of(page, three[1].id)).to_contain_text("baseline")
    page.reload()
    expect(size).to_be_visible()
    expect(page.locator("th[data-column=data]")).to_have_count(0)
    expect(shown_rows(page).first).to_have_attribute("data-run", three[0].id)
    # One run is compared with the baseline; the other's figures are differences to it.
    row_of(page, three[0].id).get_by_role("checkbox").check()
    page.get_by_role("button", name="Compare 2").click()
    figures = page.locator("[data-part=compare-figures]")
    expect(figures.locator("thead th").first).to_contain_text("baseline")
    expect(figures.locator("tbody tr").first.locator("td small")).to_have_text(re.compile(" %"))


def test_a_run_that_a_search_hides_is_no_longer_selected(runs_page, three):
    page = runs_page
    compare = page.locator("[data-part=compare-open]")
    place = compare.bounding_box()
    for folder in three[:2]:
        row_of(page, folder.id).get_by_role("checkbox").check()
    expect(page.locator("[data-part=delete-open]")).to_have_text("Delete 2…")
    assert compare.bounding_box() == place, "Another button is where the pointer waits."
    filtered(page, "search").fill("kitchen")
    expect(shown_rows(page)).to_have_count(1)
    expect(page.locator("[data-part=delete-open]")).to_be_hidden()
    filtered(page, "search").fill("")
    expect(shown_rows(page)).to_have_count(3)
    expect(page.locator("[data-part=rows] input:checked")).to_have_count(0)


def test_a_folder_without_runs_says_so_once_and_leads_to_the_first(blank, server):
    def none(route):
        answer = {"runs": [], "found": 0, "total": 0, "states": [], "tags": [], "orders": []}
        queue = {"rows": [], "held": False, "behind": "", "problem": ""}
        route.fulfill(json=answer | {"is_complete": True, "queue": queue})

    blank.route("**/api/runs?*", none)
    blank.goto(f"{server.address}/?show=runs")
    expect(blank.locator(".rs-runs .rs-empty:visible")).to_have_text(re.compile("No runs yet"))
    blank.get_by_role("link", name="Start training").click()
    expect(blank).to_have_url(re.compile("show=new"))


def test_a_row_has_its_curve_and_its_validation_loss_and_opens_the_run(runs_page, three):
    row = row_of(runs_page, three[0].id)
    expect(row.locator("svg polyline")).to_be_attached()
    expect(row.locator("[data-column=validation]")).to_have_text(re.compile(r"[0-9]"))
    assert row.bounding_box()["height"] < 50, "a line a run"
    row.locator("[data-column=curve]").click()  # a row opens its run wherever it is clicked
    expect(runs_page).to_have_url(re.compile(f"run={three[0].id}"))


def test_tags_are_written_in_settings_and_found_in_the_list(runs_page, three):
    page = runs_page
    more_of(page, three[0].id).get_by_role("menuitem", name="Settings").click()
    view = page.locator(".rs-settings-view")
    view.get_by_label("Tags").fill("law, baseline ,law")
    view.get_by_role("button", name="Save", exact=True).click()
    expect(view.locator("output")).to_have_text("Saved.")
    page.go_back()
    expect(row_of(page, three[0].id).locator(".rs-tag")).to_have_text(["law", "baseline"])
    filtered(page, "tag").select_option("baseline")
    expect(shown_rows(page)).to_have_count(1)
    filtered(page, "tag").select_option("")


def test_a_stopped_run_waits_in_the_queue_while_another_goes_on(runs_page, server, three):
    page, stopped = runs_page, three[1]
    expect(row_of(page, stopped.id).get_by_role("button", name="Resume")).to_be_visible()
    going = recorded_run(server, 20, "Elsewhere", total=90, ended=None)
    with going.lock():
        row = row_of(page, stopped.id)
        row.get_by_role("button", name="Add to queue").click()
        waiting = page.locator("[data-part=queue-rows] li")
        expect(waiting).to_contain_text("resumes")
        waiting.get_by_role("button", name="Remove").click()
        expect(waiting).to_have_count(0)
    expect(row_of(page, stopped.id).get_by_role("button", name="Resume")).to_be_visible()


def test_several_runs_are_deleted_together_once_their_names_were_read(runs_page, server):
    page = runs_page
    doomed = [recorded_run(server, 12, f"Doomed {number}") for number in (1, 2)]
    doomed[0].export_path.mkdir()
    (doomed[0].export_path / "config.json").write_text("{}", encoding="utf-8")
    for folder in doomed:
        expect(row_of(page, folder.id).locator("polyline")).to_be_attached()  # its size is known
        row_of(page, folder.id).get_by_role("checkbox").check()
    page.locator("[data-part=delete-open]").click()
    dialog = page.locator(".rs-runs dialog[data-part=delete]")
    expect(dialog).to_contain_text("Their exported models are deleted too. Models that you")
    expect(dialog).to_contain_text("2 runs")
    for folder in doomed:
        expect(dialog.locator(f"li[title='{folder.id}']")).to_contain_text("KiB")
    expect(dialog).to_contain_text(re.compile(r"checkpoints \([\d.]+ KiB\) are deleted"))
    page.keyboard.press("Escape")
    assert all(folder.path.exists() for folder in doomed)
    page.locator("[data-part=delete-open]").click()
    dialog.get_by_role("button", name="Delete").click()
    for folder in doomed:
        expect(row_of(page, folder.id)).to_have_count(0)
    assert not any(folder.path.exists() for folder in doomed)
    expect(page.locator("[data-part=delete-open]")).to_be_hidden()
