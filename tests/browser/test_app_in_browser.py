"""The flows of the app, in Chromium, against the real server and the real engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from playwright.sync_api import expect
from safetensors.numpy import save_file

from tests.browser.screen import (
    POINTS,
    address,
    ask,
    bar,
    fill,
    more_of,
    note,
    open_page,
    open_run,
    open_view,
    press,
    recorded_run,
    row_of,
    start_short_run,
    state,
    wait_for_points,
)
from tests.support.browser import ROOT, WAIT_MILLISECONDS, Server
from tests.support.exported_answers import transformers_answer
from tests.support.ports import free_port
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
    expect(page.locator("#start")).to_be_disabled()
    expect(page.locator(".rs-why-not")).to_contain_text("one run at a time")

    # Stop and save, seen by both tabs.
    open_run(page, run_id)
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")
    expect(state(second)).to_have_text("Stopped")
    stopped = int(bar(page, "step").inner_text().split()[0])
    assert 0 < stopped < 60
    expect(bar(page, "sentence")).to_contain_text("can be resumed")
    open_page(page, "new")
    expect(page.locator("#start")).to_be_enabled()

    # Resume to the end: every step is there once, and the answers are shown.
    open_run(page, run_id)
    press(page, "resume")
    expect(state(page)).to_have_text("Finished")
    wait_for_points(page, least=60)
    steps = page.evaluate("document.querySelector('[data-figure=loss]').data[0].x")
    assert steps == list(range(1, 61))
    page.locator("[data-figure=timeline]").scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('.rs-lanes canvas').dataset.bars >= 5")
    open_view(page, "machine")
    wait_for_points(page, "throughput", 60)
    open_view(page, "learning")
    wait_for_points(page, "optimizer", 60)
    expect(page.locator(".rs-run [data-part=answers] tbody tr")).to_have_count(3)
    assert page.title() == "✓ Whole job · Ramstream"

    # Export; the folder loads in transformers and answers as the app's own sampling does.
    open_page(page, "runs")
    more_of(page, run_id).get_by_role("button", name="Export").click()
    page.locator("[data-part=export] input").fill("exported")
    page.locator("[data-part=export] form button.rs-primary").click()
    said = f"Exported the model of step 60 (the best weights) to {server.folder / 'exported'}."
    expect(page.locator("[data-field=export-caption]")).to_have_text(said)
    open_view(page, "overview")
    card = page.locator("[data-part=result]")
    expect(card).to_contain_text("Finished 60 steps")
    expect(card).to_contain_text("All numbers are of the weights of step 60, which were exported.")
    expect(card).to_contain_text("the best of 4 evaluations")
    card.get_by_role("button", name="Chat").click()
    expect(page.locator(".rs-chat select[name=run]")).to_have_value(run_id)
    expect(page.locator(".rs-chat").get_by_label("Weights")).to_have_value("best-60")
    page.locator(".rs-chat").get_by_label("Compare with the model before training").uncheck()
    page.get_by_text("How answers are drawn").click()
    page.locator(".rs-chat").get_by_label("Tokens at most").fill("24")
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
    open_view(page, "export")
    expect(page.locator(".rs-files")).to_contain_text(f"Checkpoint of step {step.split()[0]}")
    expect(bar(page, "step")).to_have_text(step)
    press(page, "resume")
    expect(state(page)).to_have_text("Running")
    press(page, "discard")
    page.get_by_role("button", name="Keep running").click()
    expect(state(page)).to_have_text("Running")
    press(page, "discard")
    page.locator("dialog button[value=discard]").click()
    expect(state(page)).to_have_text("Discarded")
    expect(page.locator(".rs-actions button:visible")).to_have_count(0)
    assert not (server.runs / run_id / "checkpoints").exists()


@in_everything
def test_a_run_is_deleted_only_after_a_question(page, server):
    run_id = start_short_run(page, "Unwanted", steps=4)
    expect(state(page)).to_have_text("Finished")
    open_page(page, "runs")
    row = row_of(page, run_id)
    for answer, there in (("Keep it", 1), ("Delete", 0)):
        more_of(page, run_id).get_by_role("button", name="Delete").click()
        expect(page.locator(".rs-runs dialog")).to_contain_text(f"Unwanted · {run_id}")
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
def test_zoom_is_linked_and_kept_while_points_arrive(page):
    start_short_run(page, "Zoomed", steps=300)
    wait_for_points(page, least=8)
    open_view(page, "learning")
    box = page.locator("[data-figure=loss]").bounding_box()
    page.mouse.move(box["x"] + 120, box["y"] + 120)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 124, steps=6)
    page.mouse.up()
    expect(page.locator("[data-part=reset]")).to_be_visible()
    ranges = (
        "['loss', 'optimizer'].map(name => "
        "document.querySelector(`[data-figure=${name}]`)._fullLayout.xaxis.range)"
    )
    page.wait_for_function(f"new Set({ranges}.map(String)).size === 1")
    zoomed = page.evaluate(ranges)
    seen = page.evaluate(f"({POINTS})('loss')")
    wait_for_points(page, least=seen + 5)
    assert page.evaluate(ranges) == zoomed
    page.locator("[data-part=reset]").click()
    page.wait_for_function(f"{ranges}[0][0] === 0")
    press(page, "discard")
    page.locator("dialog button[value=discard]").click()
    expect(state(page)).to_have_text("Discarded")


@in_everything
def test_the_verdict_follows_the_settings(page, server, tmp_path):
    verdict = page.locator(".rs-fit-panel")
    expect(verdict.locator("h3")).to_have_text("It fits this machine.")
    expect(verdict.locator(".rs-fit")).to_have_count(2)
    fill(page, "train.batch_size", "-3")
    expect(verdict).to_contain_text("Batch size (rows): -3 is too small")
    expect(page.locator("#start")).to_be_disabled()
    expect(page.locator("#field-train-batch_size")).to_have_class(re.compile("rs-wrong"))
    fill(page, "train.batch_size", "8")
    expect(page.locator("#start")).to_be_enabled()
    expect(page.locator("#field-train-batch_size")).not_to_have_class(re.compile("rs-wrong"))
    # A model that no workstation holds.
    config = json.loads((ROOT / "assets/starter-model/config.json").read_text())
    layers = 400
    config |= {
        "hidden_size": 16384,
        "intermediate_size": 65536,
        "num_hidden_layers": layers,
        "vocab_size": 128_000,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_window_layers": layers,
    }
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.zeros(1)}, tmp_path / "model.safetensors")  # a verdict wants some
    fill(page, "model.source", str(tmp_path))
    expect(verdict.locator("h3")).to_have_text("It does not fit this machine.")
    expect(page.locator("#start")).to_be_disabled()
    expect(page.locator(".rs-why-not")).to_contain_text("cannot be started")
    assert verdict.locator(".rs-fit[data-tone=bad]").count() >= 1


@in_everything
def test_the_preview_says_what_is_wrong_with_a_file(page, tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"messages": [\n')
    fill(page, "data.source", str(tmp_path / "broken.jsonl"))
    expect(page.locator(".rs-preview-head.rs-error")).to_contain_text("broken.jsonl")


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
def test_charts_follow_a_window_that_becomes_narrow(browser, server):
    folder = recorded_run(server, 20)
    context = browser.new_context(viewport={"width": 1440, "height": 5000})
    page = context.new_page()
    page.goto(address(server, folder.id, "machine"))
    page.wait_for_selector("[data-figure=timeline] .main-svg", timeout=WAIT_MILLISECONDS)
    page.set_viewport_size({"width": 800, "height": 5000})
    page.wait_for_function(
        "document.documentElement.scrollWidth <= 800 && [...document.querySelectorAll('.rs-plot')]"
        ".filter(node => node.offsetParent)"
        ".every(node => node.querySelector('.main-svg')?.clientWidth === node.clientWidth)",
        timeout=WAIT_MILLISECONDS,
    )
    context.close()


@in_everything
def test_an_unknown_and_a_deleted_run_are_told_and_lead_on(blank, server):
    page = blank
    page.goto(address(server, "nothing-like-this"))
    gone = page.get_by_role("region", name="Not shown")
    expect(gone).to_contain_text("There is no run nothing-like-this")
    expect(state(page)).to_have_text("Not shown")
    gone.get_by_role("link", name="Look at all runs").click()
    expect(page).to_have_url(re.compile("show=runs"))
    folder = recorded_run(server, 20, "Deleted elsewhere")
    page.goto(address(server, folder.id))
    wait_for_points(page)
    shutil.rmtree(folder.path)
    expect(gone).to_contain_text(f"There is no run {folder.id}")
    expect(page.locator("[data-figure=loss]")).to_be_hidden()


@in_everything
def test_with_a_login_the_page_asks_first_and_then_works(browser, tmp_path):
    server = Server(tmp_path, free_port(), {"RAMSTREAM_LOGIN": "ada:open sesame"})
    server.start()
    context = browser.new_context()
    context.set_default_timeout(WAIT_MILLISECONDS)
    try:
        page = context.new_page()
        page.goto(f"{server.address}/?show=runs")
        page.get_by_label("User").fill("ada")
        page.get_by_label("Password").fill("wrong")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_contain_text("wrong")
        page.get_by_label("User").fill("ada")
        page.get_by_label("Password").fill("open sesame")
        page.get_by_role("button", name="Log in").click()
        expect(page.locator(".rs-runs [data-part=empty]")).to_be_visible()
        open_page(page, "new")
        expect(page.locator(".rs-fit-panel h3")).to_have_text("It fits this machine.")
        context.clear_cookies()
        expect(note(page)).to_contain_text("You are logged out.")
    finally:
        context.close()
        server.end()
