"""The page says nothing better than it is: Start is closed while a run would lack its model, and a
run that made its model worse is red.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from pathlib import Path

import pytest
from playwright.sync_api import expect

from app.form.settings_form import shown_values
from app.pages.new.fit_panel import LACKS, NO_MODEL
from engine.config.settings import TrainConfig
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from tests.browser.screen import verdict
from tests.support.browser import WAIT_MILLISECONDS, Server
from tests.support.folders import make_data
from tests.support.ports import free_port
from tests.support.recorded_runs import read
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

MODEL = "HuggingFaceTB/SmolLM2-135M"
"""The catalog knows it, so it has an estimate, and nobody has downloaded it."""
RED = "rgb(179, 38, 30)"
PICTURES = os.environ.get("RAMSTREAM_PICTURES")
"""Screens are kept in this folder, if one is named."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verdicts")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "cache")}
    server = Server(folder, free_port(), offline, is_plain=True)
    made = create_run(server.runs, settings(folder))
    recorder = RunRecorder(made.path, made.id)
    for record in read("ends", "rate-5"):
        recorder.emit(record.event)
    recorder.close()
    server.start()
    yield server
    server.end()


def settings(folder: Path) -> TrainConfig:
    rows = make_data(folder / "rows.jsonl")
    return TrainConfig.from_dict(
        {
            "name": "Learning rate 5",
            "model": {"source": MODEL, "dtype": "float32"},
            "data": {"source": str(rows), "max_seq_len": 64},
            "train": {"steps": 10, "batch_size": 2},
        }
    )


def post(server: Server, path: str, body: dict) -> dict:
    request = urllib.request.Request(
        f"{server.address}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def picture(page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png")


@pytest.mark.parametrize("width, height", [(1440, 900), (390, 844)])
def test_start_is_closed_while_the_model_is_not_to_be_had(context, server, width, height):
    shown = shown_values(settings(server.folder))
    post(server, "/api/check", {"preset": "starter.yaml", "shown": shown})
    page = context.new_page()
    page.set_viewport_size({"width": width, "height": height})
    page.goto(f"{server.address}/?show=new")
    expect(page.locator("#field-model-source :is(input, textarea)")).to_have_value(MODEL)
    page.wait_for_selector(".rs-fit-panel[data-tone=warn]")
    found = page.locator(".rs-reasons")
    expect(found).to_contain_text(f"{MODEL} is not downloaded yet")
    # What to do is told, and the rows are seen without a tokenizer.
    expect(found).to_contain_text(f"hf download {MODEL} --local-dir FOLDER")
    expect(page.locator("[data-field=models-caption]")).to_contain_text("No connection")
    expect(page.locator(".rs-preview li")).to_have_count(5)
    expect(page.locator(".rs-preview li").first).to_contain_text("messages: [")
    expect(page.locator("#start")).to_be_disabled()
    expect(page.locator("#add-to-queue")).to_be_hidden()
    headline = page.locator(".rs-fit-panel [data-field=headline]")
    expect(headline).to_have_text(LACKS.format(NO_MODEL))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    picture(page, f"start-closed-{width}")
    page.close()


def test_a_run_that_made_its_model_worse_is_red_everywhere(context, server):
    page = context.new_page()
    page.emulate_media(color_scheme="light")
    page.goto(f"{server.address}/?show=runs")
    row = page.locator("tr[data-run]")
    expect(row.locator(".rs-state")).to_contain_text(
        re.compile(r"Worse than before training: validation loss 6\.07.* → ")
    )
    stroke = "node => getComputedStyle(node).stroke"
    assert row.locator("td[data-column=curve] polyline").evaluate(stroke) == RED
    expect(row.locator(".rs-state")).to_have_attribute("data-tone", "bad")
    expect(page.locator(".rs-nav + * a[data-run], a[data-run]").first).to_have_attribute(
        "data-tone", "bad"
    )
    picture(page, "worse-in-runs")
    row.locator("button.rs-link").click()
    card = verdict(page)
    expect(card).to_have_attribute("data-tone", "bad")
    expect(card).to_contain_text("Worse than before training")
    expect(page.locator(".rs-run")).not_to_contain_text("Learning well")
    expect(page.locator(".rs-run")).not_to_contain_text("best: step")
    picture(page, "worse-run")
    page.close()
