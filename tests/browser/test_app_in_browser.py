"""The flows of the app, in Chromium, against the real server and the real engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from playwright.sync_api import expect

from tests.browser.screen import (
    POINTS,
    address,
    ask,
    bar,
    expect_finished,
    more_of,
    open_page,
    open_run,
    open_view,
    press,
    recorded_run,
    row_of,
    start_short_run,
    state,
    verdict,
    wait_for_points,
)
from tests.support.browser import ROOT, WAIT_MILLISECONDS
from tests.support.exported_answers import transformers_answer
from tests.support.sets import BROWSER_FLOWS

expect.set_options(timeout=WAIT_MILLISECONDS)

in_everything = pytest.mark.slow(BROWSER_FLOWS)


def test_the_whole_job(page, context, server):
    # The starter is ready; what is trained is marked.
    expect(page.locator("#field-model-source :is(input, textarea)")).to_have_value(
        "assets/starter-model"
    )
    expect(page.locator(".rs-preview mark").nth(1)).to_have_text(re.compile("^[MDCLXVI]+<"))
    run_id = start_short_run(page, "Whole job")

    # Points arrive; a second tab sees the same; a reload sees everything.
    expect(state(page)).to_have_text("Running")
    wait_for_points(page)
    assert re.match(r"\d+ % Whole job · Ramstream", page.title())
    press(page, "pause")  # or it may be over before a slow machine has opened the other pages
    expect(state(page)).to_have_text("Paused")
    second = context.new_page()
    second.goto(f"{server.address}/?tab=live")  # an address of an earlier version
    expect(bar(second, "name")).to_have_text("Whole job")
    wait_for_points(second)
    page.bring_to_front()
    before = page.evaluate(f"({POINTS})('loss')")
    page.reload()
    wait_for_points(page, least=before)

    # A second Start says why not.
    open_page(page, "new")
    expect(page.locator("#start")).to_be_hidden()
    expect(page.locator(".rs-why-not")).to_contain_text("is training")

    # Stop and save, seen by both tabs.
    open_run(page, run_id)
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")
    expect(state(second)).to_have_text("Stopped")
    stopped = int(bar(page, "step").inner_text().split()[0])
    assert 0 < stopped < 60
    expect(verdict(page)).to_contain_text(f"Resume continues from step {stopped}.")
    open_page(page, "new")
    expect(page.locator("#start")).to_be_enabled()

    # Resume to the end: every step is there once, and the answers are shown.
    open_run(page, run_id)
    press(page, "resume")
    expect_finished(page)
    wait_for_points(page, least=60)
    steps = page.evaluate("document.querySelector('[data-figure=loss]').data[0].x")
    assert steps == list(range(1, 61))
    page.get_by_role("button", name="Machine").click()
    page.locator("[data-figure=timeline]").scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('.rs-lanes canvas').dataset.bars >= 5")
    open_view(page, "machine")
    wait_for_points(page, "throughput", 60)
    open_view(page, "learning")
    wait_for_points(page, "optimizer", 60)
    expect(page.locator(".rs-run [data-part=prompts] tbody tr")).to_have_count(3)
    assert page.title() == "■ Whole job · Ramstream", "no answer is right after so few steps"

    # Evaluate: both models on the validation rows, and votes by keyboard on hidden answers.
    open_page(page, "runs")
    more_of(page, run_id).get_by_role("menuitem", name="Evaluate").click()
    evaluate = page.locator("[data-part=evaluate]")
    evaluate.get_by_label("Prompts", exact=True).fill("2")
    evaluate.get_by_label("Blind").check()
    evaluate.get_by_role("button", name="Evaluate", exact=True).click()
    expect(evaluate).to_contain_text("Evaluated Whole job.")
    loss = page.locator(".rs-figures tbody tr").first
    expect(loss.get_by_role("rowheader")).to_contain_text("Validation loss")
    expect(loss.locator("[data-label=Difference]")).to_have_text(re.compile("^−.*better$"))
    expect(page.locator("[data-field=helped-word]")).to_have_text("Yes, against the base model")
    vote = page.locator("[data-part=blind] [data-place=right]")
    expect(page.locator("[data-part=side-by-side]")).to_be_hidden()
    vote.focus()
    page.keyboard.press("Enter")
    expect(page.locator("[data-field=blind-count]")).to_have_text("Prompt 2 of 2")
    expect(vote).to_be_focused()
    page.keyboard.press("Enter")
    side_by_side = page.locator("[data-part=side-by-side]")
    expect(side_by_side.get_by_role("row")).to_have_count(3)
    expect(side_by_side).to_contain_text("You preferred the trained model")
    expect(side_by_side.get_by_text("your choice")).to_have_count(2)

    # Export; the folder loads in transformers and answers as the app's own sampling does.
    open_view(page, "export")
    page.locator("[data-part=export] input").fill("exported")
    size = page.locator("[data-field=export-size]")
    expect(size).to_have_text(re.compile(r"^[\d.]+ .iB of weights, [\d.]+ .iB free\.$"))
    page.locator("[data-part=export] form button").last.click()
    checked = "Checked: 10 rows of the data give the same tokens as in training."
    text = f"Exported the model of step 60 (the best weights) to {server.folder / 'exported'}."
    expect(page.locator("[data-field=export-caption]")).to_have_text(f"{text} {checked}")
    newest = page.locator(".rs-exports li").first
    expect(newest).to_contain_text(str(server.folder / "exported"))
    both = re.compile(f"{checked}.*{checked}", re.DOTALL)
    expect(page.locator(".rs-exports")).to_contain_text(both)
    with page.expect_download() as whole:
        newest.get_by_role("link", name="Download all").click()
    with zipfile.ZipFile(whole.value.path()) as files:
        assert files.testzip() is None and "exported/config.json" in files.namelist()
    newest.get_by_text(re.compile(r"^\d+ files$")).click()
    with page.expect_download() as download:
        newest.get_by_role("link", name="config.json", exact=True).click()
    assert (
        download.value.path().read_bytes() == (server.folder / "exported/config.json").read_bytes()
    )
    uses = page.get_by_role("region", name="Commands for the export")
    expect(uses).to_contain_text(f"vllm serve {server.folder / 'exported'}")
    own = server.runs / run_id / "export"
    uses.get_by_label("Export").select_option(str(own))
    expect(uses).to_contain_text(f"vllm serve {own}")
    command = page.get_by_label("Export without a browser", exact=True)
    page.locator("[data-part=export]").get_by_label("Precision").select_option("float32")
    expect(command).to_contain_text("--form model --dtype float32")
    open_view(page, "overview")
    card = verdict(page)
    expect(card).to_contain_text("Validation loss fell")
    expect(card).to_contain_text("no tested answer is right")
    expect(card).to_contain_text("Best model: step 60, exported.")
    card.get_by_role("button", name="Chat").click()
    expect(page.locator(".rs-chat select[name=run]")).to_have_value(run_id)
    expect(page.locator(".rs-chat").get_by_label("Weights")).to_have_value("best-60")
    page.locator(".rs-chat").get_by_label("Compare with the base model").uncheck()
    page.get_by_text("Sampling").click()
    page.locator(".rs-chat").get_by_label("Longest answer").fill("24")
    page.locator(".rs-chat").get_by_label("Temperature").fill("0")
    question = "Write 1888 in Roman numerals."
    answer = ask(page, question).locator("[data-side=tuned] .rs-chat-text")
    assert answer.inner_text().strip() == transformers_answer(
        server.folder / "exported", question, 24
    )


def test_pause_resume_save_and_discard(page, server):
    run_id = start_short_run(page, "Controls", steps=400)
    expect(state(page)).to_have_text("Running")
    press(page, "pause")
    expect(state(page)).to_have_text("Paused")
    step = bar(page, "step").inner_text()
    press(page, "save")
    open_view(page, "log")
    expect(page.locator(".rs-log")).to_contain_text(f"Checkpoint of step {step.split()[0]}")
    expect(bar(page, "step")).to_have_text(step)
    press(page, "resume")
    expect(state(page)).to_have_text("Running")
    press(page, "discard")
    page.get_by_role("button", name="Keep running").click()
    expect(state(page)).to_have_text("Running")
    press(page, "discard")
    page.locator("dialog button[value=discard]").click()
    expect(state(page)).to_have_text("Discarded")
    expect(page.locator(".rs-actions button:visible")).to_have_text(["⋯"])
    assert not (server.runs / run_id / "checkpoints").exists()


@in_everything
def test_a_run_is_deleted_only_after_a_question(page, server):
    run_id = start_short_run(page, "Unwanted", steps=4)
    expect_finished(page)
    open_page(page, "runs")
    row = row_of(page, run_id)
    for answer, there in (("Cancel", 1), ("Delete", 0)):
        more_of(page, run_id).get_by_role("menuitem", name="Delete").click()
        expect(page.locator(".rs-runs dialog")).to_contain_text("Unwanted")
        page.locator(".rs-runs dialog").get_by_role("button", name=answer).click()
        expect(row).to_have_count(there)
        assert (server.runs / run_id).exists() == bool(there)
    expect(page.locator(f".rs-nav a[data-run='{run_id}']")).to_have_count(0)
    expect(bar(page, "name")).not_to_have_text("Unwanted")


@in_everything
def test_a_run_of_another_process_is_followed_and_controlled(page, server):
    command = [
        sys.executable,
        "launch.py",
        "train",
        "presets/starter.yaml",
        "--runs-dir",
        str(server.runs),
        "--set",
        "name=Elsewhere",
        "--set",
        "output.exact_match_samples=0",
    ]
    with open(server.folder / "train.log", "wb") as log:
        other = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        open_page(page, "runs")
        row = page.locator(".rs-runs tr", has_text="Elsewhere")
        row.get_by_role("button", name="Open").click()
        expect(state(page)).to_have_text("Running")
        wait_for_points(page)
        press(page, "stop")
        expect(state(page)).to_have_text("Stopped")
        assert other.wait(timeout=60) is not None
    finally:
        other.kill()


@in_everything
def test_the_forecast_is_readable_at_both_widths(blank, server):
    folder = recorded_run(server, 60)
    blank.goto(address(server, folder.id, "machine"))
    card = blank.locator("[data-part=forecast]")
    expect(card.locator("tbody tr")).to_have_count(5)
    expect(card.get_by_role("row", name="RAM while training")).to_contain_text("101 GiB")
    for width in (1440, 800):
        blank.set_viewport_size({"width": width, "height": 900})
        assert card.locator(".rs-scroll").evaluate(
            "node => node.scrollWidth <= node.clientWidth"
        ), "no column is hidden"


@in_everything
def test_an_unknown_and_a_deleted_run_are_told_and_lead_on(blank, server):
    page = blank
    page.goto(address(server, "nothing-like-this"))
    gone = page.get_by_role("region", name="Not shown")
    expect(gone).to_contain_text("This run does not exist")
    expect(state(page)).to_have_text("Not shown")
    gone.get_by_role("link", name="Look at all runs").click()
    expect(page).to_have_url(re.compile("show=runs"))
    folder = recorded_run(server, 20, "Deleted elsewhere")
    page.goto(address(server, folder.id))
    wait_for_points(page)
    shutil.rmtree(folder.path)
    expect(gone).to_contain_text("This run does not exist")
    expect(page.locator("[data-figure=loss]")).to_be_hidden()
