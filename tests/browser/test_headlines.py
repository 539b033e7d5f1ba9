"""The headline of a run and of a draft is true: it is compared with the run's own record, and with
what a run of the same data ends with; in Chromium, against the real server and engine.
"""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from app.labels import in_loss, in_share
from engine.config.settings import TrainConfig
from engine.runs.record.following import EVENTS_FILE, replay
from engine.runs.record.snapshot import RunSnapshot
from engine.training.loop.run import start_run
from tests.browser.screen import (
    FOLDED,
    NEW_FORM,
    OPENED_RUN,
    address,
    expect_finished,
    fill,
    more_of,
    open_other_settings,
    open_page,
    open_run,
    open_view,
    open_why,
    press,
    row_of,
    run_of,
    start_short_run,
    state,
    verdict,
)
from tests.support.browser import ROOT, WAIT_MILLISECONDS
from tests.support.folded import fold
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

EMPTY = ("empty.jsonl", "")
BROKEN = ("broken.jsonl", '{"messages": [\n')
UNTRAINED = ("untrained.jsonl", '{"prompt": "a", "completion": ""}\n' * 3)
MISSING = ("missing.jsonl", None)


def snapshot_of(server, run_id) -> RunSnapshot:
    """Reads the run's own record."""
    return fold(replay(server.runs / run_id / EVENTS_FILE))


def test_the_headline_of_a_finished_starter_is_what_its_record_says(page, server):
    run_id = start_short_run(page, "Headline", steps=40)
    expect_finished(page)
    found = snapshot_of(server, run_id)
    assert found.state == "finished" and found.step == 40
    open_view(page, "learning")
    first, last = (in_loss(found.evals.loss[place]) for place in (0, -1))
    card = verdict(page)
    expect(card.get_by_role("heading")).to_have_text(
        f"Validation loss fell from {first} to {last}, but no tested answer is right"
    )
    expect(card).to_contain_text("Best model: step 40, exported.")
    before, after = (match.correct / match.total for match in found.exact_matches)
    right = card.locator("dl > div", has_text="Answers right")
    expect(right.locator("strong")).to_have_text([in_share(before), in_share(after)])
    open_why(page)
    whole = card.inner_text()
    assert f"the last loss is {in_loss(found.loss)}" in whole
    for each in ("free the memory", "grows", "busy"):
        assert each not in whole


def test_the_headline_of_a_failed_run_is_why_it_failed_and_nothing_is_promised(
    blank, server, tmp_path
):
    page = blank
    # Its file was emptied after the form was checked, as another program may do.
    data = tmp_path / "rows.jsonl"
    data.write_text("")
    preset = TrainConfig.load(ROOT / "presets/starter.yaml")
    made = start_run(preset.with_values({"name": "Failing", "data.source": str(data)}), server.runs)
    reason = made.execute().reason
    page.goto(address(server, made.id))
    expect(state(page)).to_have_text("Failed")
    found = snapshot_of(server, made.id)
    assert (found.state, found.step, found.reason) == ("failed", 0, reason)
    assert not found.checkpoints
    # No charts: the cause stands in their place.
    stage = verdict(page)
    expect(stage).to_contain_text("Failed before the first step")
    expect(stage).to_contain_text(reason)
    expect(stage).to_contain_text("Nothing was saved.")
    expect(stage).to_have_attribute("data-tone", "bad")
    expect(page.locator(".rs-charts")).to_be_hidden()
    text = page.locator(".rs-run").inner_text()
    assert "under way" not in text and "Appears with" not in text
    buttons = page.locator(".rs-actions [data-command]:visible")
    expect(buttons).to_have_count(0)
    open_page(page, "runs")
    row = row_of(page, made.id)
    expect(row.locator("[data-act=resume]")).to_have_count(0)
    menu = more_of(page, made.id)
    expect(menu.locator("[data-act=details]")).to_have_count(1)
    for act in ("resume", "queue", "export"):
        expect(menu.locator(f"[data-act={act}]")).to_have_count(0)
    page.keyboard.press("Escape")

    # What is offered works: once the file is mended, a new run goes from the first step.
    rows = (ROOT / "assets/starter.jsonl").read_text().splitlines(keepends=True)[:40]
    data.write_text("".join(rows))
    open_run(page, made.id)
    stage.get_by_role("button", name="Duplicate").click()
    expect(page).to_have_url(NEW_FORM)
    page.locator("#start:not([disabled])").click()
    expect(page).to_have_url(OPENED_RUN)
    expect(state(page)).to_have_text("Running")
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")
    saved = snapshot_of(server, run_of(page)).checkpoints[-1].step
    open_view(page, "learning")
    expect(verdict(page)).to_contain_text(f"Resume continues from step {saved}.")
    expect(buttons).to_have_text(["Resume"])


@pytest.mark.parametrize("name, content", [EMPTY, BROKEN, UNTRAINED, MISSING])
def test_data_that_cannot_train_get_no_green_verdict_and_no_start(page, tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    config = TrainConfig.load(ROOT / "presets/starter.yaml").with_values({"data.source": str(path)})
    ended = start_run(config, tmp_path / "runs").execute()
    assert ended.state == "failed"
    fill(page, "data.source", str(path))
    panel = page.locator(".rs-fit-panel")
    expect(panel).to_have_attribute("data-tone", "bad")
    expect(panel.locator("h3")).to_have_text("Data cannot be trained on")
    # The reason is the one for which a run fails: its first words name the file or the rows.
    text = panel.locator("[data-field=reasons] li").first.inner_text()
    if content != UNTRAINED[1]:
        told = ended.reason.replace("`", "")  # the page has code between backticks in its font
        assert text.split(";")[0] == told.split(";")[0]
    else:
        assert "token to train on" in text and "token to train on" in ended.reason
    expect(page.locator("#start")).to_be_disabled()
    # A file that is mended is read again once the box is left, and can be trained on.
    path.write_text((ROOT / "assets/starter.jsonl").read_text())
    page.locator("#field-data-source :is(input, textarea)").press("Enter")
    expect(page.locator("#start")).to_be_enabled()
    # The model of the example is told that it was made for other data.
    expect(panel).to_have_attribute("data-tone", "warn")
    expect(panel.locator("h3")).to_have_text("Fits, with 1 warning")


def test_the_verdict_leads_to_a_setting_in_the_folded_section(page):
    open_other_settings(page)
    fill(page, "train.weight_decay", "-1")
    panel = page.locator(".rs-fit-panel")
    expect(panel).to_contain_text("Weight decay: -1")
    page.locator(FOLDED).click()  # it is opened again by itself
    panel.get_by_role("button", name="Go to this setting").click()
    box = page.locator("#field-train-weight_decay :is(input, textarea)")
    expect(box).to_be_focused()
    expect(page.locator("#field-train-weight_decay .rs-field-error")).to_contain_text("-1")
    box.fill("0.01")
    expect(panel).to_have_attribute("data-tone", "good")
    expect(panel.get_by_role("button", name="Go to this setting")).to_be_hidden()


def test_a_column_mapping_ends_with_its_data(page, tmp_path):
    path = tmp_path / "mapped.csv"
    path.write_text("nr,Frage,Wohin\n" + "".join(f"{n},what is {n},it is {n}\n" for n in range(9)))
    fill(page, "data.source", str(path))
    mapping = page.locator(".rs-mapping")
    mapping.locator("[data-role=prompt]").select_option(label="Frage")
    mapping.locator("[data-role=completion]").select_option(label="Wohin")
    expect(mapping).to_contain_text("Columns (your choice)")
    expect(page.locator("#start")).to_be_enabled()
    fill(page, "data.source", "assets/starter.jsonl")
    expect(page.locator(".rs-preview mark").nth(1)).to_have_text(re.compile("^[MDCLXVI]+<"))
    expect(page.locator("#start")).to_be_enabled()
    expect(page.locator(".rs-fit-panel")).to_have_attribute("data-tone", "good")
