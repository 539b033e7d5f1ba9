"""The page New: three questions, how long, and the Summary. In Chromium, on the real server."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from app.form.settings_form import settings
from tests.browser.screen import (
    OPENED_RUN,
    bar,
    box,
    fill,
    open_other_settings,
    open_page,
    open_view,
    press,
    state,
)
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)


@pytest.fixture(scope="module")
def server(own_server):
    """With no run yet."""
    return own_server


def job(page):
    return page.locator(".rs-fit-panel [data-field=job]")


def task(page, name):
    return page.locator(f".rs-choices input[value={name}]")


def test_every_setting_is_on_the_page(page):
    open_other_settings(page)
    for setting in settings():
        expect(page.locator(f"#{setting.elem_id}")).to_have_count(1)


def test_what_it_learns_follows_the_data_and_can_be_chosen(page, server):
    page.wait_for_selector(".rs-preview mark")
    expect(task(page, "answers")).to_be_checked()
    path = server.folder / "pairs.jsonl"
    rows = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    fill(page, "data.source", str(path))
    expect(task(page, "preferences")).to_be_checked()
    expect(job(page)).to_contain_text(re.compile(r"pairs\.jsonl · 3 passes \(\d+ steps\)"))
    open_other_settings(page)
    expect(box(page, "train.objective")).to_have_value("which of two answers is better (DPO)")
    page.get_by_text("Plain text", exact=True).click()
    expect(box(page, "train.objective")).to_have_value("answers as they are written (SFT)")
    expect(box(page, "data.format")).to_have_value("text")


def test_adapters_have_a_rate_of_their_own_and_give_it_back(page):
    open_other_settings(page)
    fill(page, "train.learning_rate", "2e-5")
    page.get_by_text("Train an add-on (LoRA)").click()
    expect(box(page, "train.learning_rate")).to_have_value("0.0002")
    expect(job(page)).to_contain_text("LoRA, rank")
    fill(page, "train.learning_rate", "0.0005")
    page.get_by_text("Train everything").click()
    expect(box(page, "train.learning_rate")).to_have_value("2e-5")
    page.get_by_text("Train an add-on (LoRA)").click()
    expect(box(page, "train.learning_rate")).to_have_value("0.0005")


def test_a_model_is_chosen_by_its_card(page):
    own, card = (page.locator(".rs-models [data-part=models] label").nth(place) for place in (0, 1))
    expect(own).to_contain_text("Starter model")
    expect(own.locator("input")).to_be_checked()
    expect(card).to_contain_text(re.compile("✓ fits · .* RAM"))
    # It promises no download where the hub cannot be reached.
    expect(card).to_contain_text(re.compile("download|not on this machine"))
    source, title = card.get_attribute("title"), card.locator("b").inner_text()
    caption = page.locator("[data-field=models-caption]")
    expect(caption).to_contain_text("Memory for batch size 8 and sequence length 128.")
    page.locator(".rs-models [data-part=models] label").nth(2).click()
    fill(page, "train.batch_size", "4")
    expect(caption).to_contain_text("batch size 4")
    expect(card).to_have_attribute("title", source)  # nothing moves while a person looks
    expect(own).to_contain_text("Starter model")
    card.click()
    expect(box(page, "model.source")).to_have_value(source)
    expect(page.locator(f".rs-models label[title='{source}'] input")).to_be_checked()
    expect(job(page)).to_contain_text(title)
    page.locator(".rs-models [data-part=models] label", has_text="Starter model").click()
    expect(box(page, "model.source")).to_have_value("assets/starter-model")
    expect(job(page)).to_contain_text("Starter model")


def test_the_command_of_what_the_form_shows_is_copied(page, context):
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    fill(page, "train.steps", "7")
    expect(job(page)).to_contain_text("7 steps")
    page.get_by_role("button", name="Copy command").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert "launch.py train presets/starter.yaml --set train.steps=7" in copied
    # What is typed into the list of presets searches it.
    page.locator("#preset input").click()
    page.keyboard.type("llama")
    expect(page.get_by_role("option", name="Starter", exact=True)).to_be_hidden()
    expect(page.get_by_role("option").first).to_contain_text("Llama")


def test_in_a_narrow_window_the_summary_is_a_bar(page):
    page.set_viewport_size({"width": 390, "height": 844})
    start, needs = page.locator("#start"), page.locator("[data-need=host]")
    expect(start).to_be_in_viewport()
    summary = page.locator(".rs-side").bounding_box()
    assert summary["height"] < 100 and summary["width"] == 390
    expect(page.locator(".rs-fit-panel h3")).to_be_in_viewport()
    clock = page.locator(".rs-fit-panel .rs-clock")
    expect(clock).to_be_in_viewport()
    assert clock.evaluate("node => node.scrollWidth <= node.clientWidth"), "it is cut"
    expect(needs).to_be_hidden()
    # The whole bar opens it, and the button closes it again.
    page.locator(".rs-fit-panel h3").click()
    expect(needs).to_be_in_viewport()
    button = page.get_by_role("button", name="Details of the Summary")
    button.click()
    expect(needs).to_be_hidden()
    button.click()
    expect(needs).to_be_in_viewport()
    expect(needs).to_contain_text(re.compile("needs .* · .* free"))
    page.set_viewport_size({"width": 1366, "height": 768})
    # In a wide one it scrolls within the window, wherever the page is, with Start in sight.
    page.locator("[data-part=memory] summary").click()
    summary = page.locator(".rs-side > .rs-card")
    for top in (0, 400):
        page.evaluate("top => window.scrollTo(0, top)", top)
        page.wait_for_function("top => window.scrollY === top", arg=top)
        expect(start).to_be_in_viewport(ratio=1)
        page.wait_for_function(
            "node => Math.abs(innerHeight - 12 - node.getBoundingClientRect().bottom) < 2",
            arg=summary.element_handle(),
        )
    assert summary.evaluate("node => node.scrollHeight > node.clientHeight")
    page.locator("[data-part=memory] summary").click()
    page.set_viewport_size({"width": 1440, "height": 900})


def test_the_example_is_one_click_and_what_it_replaced_comes_back(page):
    anew = page.get_by_role("button", name="Start over")
    expect(anew).to_be_hidden()
    fill(page, "train.steps", "7")
    anew.click()
    steps = page.locator("#field-train-steps :is(input, textarea)")
    expect(steps).to_have_value("450")
    expect(anew).to_be_hidden()
    expect(page.get_by_text("Started over.")).to_be_visible()
    page.get_by_role("button", name="Undo", exact=True).click()
    expect(steps).to_have_value("7")
    page.get_by_role("button", name="Try the 1-minute example").click()
    expect(page).to_have_url(OPENED_RUN)
    expect(bar(page, "name")).to_have_text("Starter")
    expect(bar(page, "step")).to_contain_text("of 450")
    # What needs the machine for itself is refused before it is asked for, with the reason.
    open_view(page, "export")
    serving = page.get_by_role("region", name="Serve to other programs")
    expect(serving).to_contain_text("Starter is training. Pause it first, or wait until it ends.")
    expect(serving.get_by_role("button", name="Start serving")).to_be_disabled()
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")
    open_page(page, "new")
    expect(page.get_by_role("button", name="Try the 1-minute example")).to_be_enabled()
    expect(page.get_by_text("The example replaced your settings.")).to_be_visible()
    page.get_by_role("button", name="Undo", exact=True).click()
    expect(steps).to_have_value("7")
