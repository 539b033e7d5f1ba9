"""Hardware, in Chromium, against the real server."""

from __future__ import annotations

import csv
import re

import pytest
from playwright.sync_api import expect

from engine.planning.fit.model_table import HERE
from tests.browser.screen import box, open_other_settings
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

HOSTILE = '<img src=x onerror="window.hacked=1">'
ROWS = ".rs-grid tbody tr"
READY = ".rs-grid table[aria-busy=false]"
LINES_OF_A_WORD = """([name, value, word]) => {
    const facts = document.querySelector(".rs-hardware [data-part=rates]");
    facts.append(document.createElement("dt"), document.createElement("dd"));
    facts.lastChild.previousSibling.textContent = name;
    facts.lastChild.textContent = value;
    const range = document.createRange();
    range.setStart(facts.lastChild.firstChild, value.indexOf(word));
    range.setEnd(facts.lastChild.firstChild, value.indexOf(word) + word.length);
    return range.getClientRects().length;
}"""
"""On how many lines the page shows a word of a figure of this machine."""
ADAMW = "AdamW on the CPU, moments in fp32", "4.74 billion parameters/s (123 GB/s of RAM)"


@pytest.fixture
def tab(context, server):
    """The tab with one machine beside this one, its speeds computed."""
    page = context.new_page()
    page.goto(f"{server.address}/?show=hardware")
    expect(page.locator(".rs-hardware .rs-machine-chip")).not_to_have_count(0)
    for name in page.locator(".rs-hardware .rs-machine-chip").all_text_contents():
        page.get_by_role("button", name=f"Remove {name.removesuffix('×')}", exact=True).click()
    add(page, "RTX 4090")
    return page


def add(page, name):
    page.get_by_label("A machine to add").select_option(name)
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.locator(f".rs-grid thead th[data-by='{name}']")).to_be_visible()
    page.wait_for_selector(READY)


def models(page):
    return page.locator(ROWS).evaluate_all("rows => rows.map(row => row.dataset.model)")


def numbers(page, column):
    return [
        float(text.replace(",", ""))
        for cell in page.locator(f"{ROWS} [data-machine='{column}'] span").all_text_contents()
        if (text := re.sub(r"[^\d,.]", "", cell))
    ]


def test_the_table_is_filtered_sorted_extended_and_taken_as_csv(tab):
    assert len(models(tab)) >= 40
    both = tab.locator("tr[data-model='Qwen/Qwen2.5-VL-7B-Instruct'] td:nth-child(2)")
    expect(both).to_have_text("7.62 Bof 8.29 B")
    expect(tab.locator("[data-part=facts]:visible")).to_contain_text(re.compile("of .* free"))
    expect(tab.locator("[data-field=largest]")).to_contain_text("(all weights) · ")
    read_then = tab.locator("[data-field=largest-for]")
    expect(read_then).to_have_text(re.compile(r"^With \d+ GiB RAM.* free, on .+, \d\d:\d\d$"))

    for width in (800, 1440):
        tab.set_viewport_size({"width": width, "height": 900})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width

    # A verdict is a word, and its details are a tooltip of the focused cell; arrows move.
    tab.locator(f"{ROWS}:first-child [data-machine='{HERE}'] button").focus()
    tab.keyboard.press("ArrowRight")
    cell = tab.locator(f"{ROWS}:first-child [data-machine='RTX 4090']")
    expect(cell).to_be_focused()
    expect(cell.locator("b")).to_have_text(re.compile("fits|too large"))
    expect(tab.get_by_role("tooltip")).to_contain_text("of RAM and")
    expect(cell).to_have_attribute("aria-describedby", "rs-hardware-tip")
    tab.keyboard.press("Escape")
    expect(tab.get_by_role("tooltip")).to_be_hidden()

    # Sorted by speed, then by size.
    head = tab.locator(".rs-grid thead th[data-by='RTX 4090']")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "descending")
    speeds = numbers(tab, "RTX 4090")
    assert len(speeds) >= 5 and speeds == sorted(speeds, reverse=True)
    tab.get_by_role("button", name="Parameters").click()
    ascending = models(tab)
    tab.get_by_role("button", name="Parameters").click()
    assert models(tab)[0] == ascending[-1]

    # Only what fits; then only what is called so.
    tab.get_by_role("button", name="Fits any shown").click()
    fitting = models(tab)
    assert 0 < len(fitting) < len(ascending)
    tab.locator("[data-part=settings] [name=filter]").fill("qwen3 0.6")
    assert models(tab) == ["Qwen/Qwen3-0.6B"]
    expect(tab.locator(".rs-hardware [data-field=counted]")).to_have_text(
        re.compile(r"^1 of \d+ models\.")
    )

    # The file is what is shown.
    add(tab, "L4")
    tab.locator("[data-part=settings] [name=filter]").fill("qwen")
    shown = models(tab)
    with tab.expect_download() as download:
        tab.get_by_role("button", name="CSV").click()
    with open(download.value.path(), encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert download.value.suggested_filename == "ramstream-models.csv"
    assert [(row["model"], row["machine"]) for row in rows] == [
        (model, name) for model in shown for name in (HERE, "RTX 4090", "L4")
    ]
    rates = [
        float(row["tokens_per_second"])
        for row in rows
        if row["machine"] == "RTX 4090" and row["tokens_per_second"]
    ]
    assert numbers(tab, "RTX 4090") == pytest.approx(rates, rel=0.01)

    # What is typed stays text.
    tab.locator("[data-part=settings] [name=filter]").fill(HOSTILE)
    expect(tab.locator(".rs-hardware [data-field=counted]")).to_contain_text(HOSTILE)
    tab.get_by_role("combobox", name="Model", exact=True).fill(HOSTILE)
    tab.get_by_role("button", name="Show machines").click()
    expect(tab.locator("[data-field=offered]")).to_contain_text("is not in the catalog")
    assert tab.locator("img[src=x]").count() == 0 and tab.evaluate("window.hacked") is None


def test_from_a_model_to_machines_and_to_train(tab):
    tab.locator("[data-part=settings] select[name=method]").select_option("lora")
    # Settings that no run could have are one sentence.
    tab.locator("[data-part=settings] [name=rows]").fill("0")
    tab.locator("[data-part=settings] [name=rows]").press("Tab")
    expect(tab.locator("[data-field=settings-error]")).to_contain_text("0 is too small")
    tab.locator("[data-part=settings] [name=rows]").fill("1")
    tab.locator("[data-part=settings] [name=rows]").press("Tab")
    tab.wait_for_selector(READY)
    expect(tab.locator("[data-field=settings-error]")).to_have_text("")

    tab.locator("[data-part=settings] [name=filter]").fill("qwen3-0.6b")
    tab.get_by_role("button", name="Qwen3 0.6B", exact=True).click()
    offers = tab.locator("[data-part=offers] tbody")
    expect(offers.get_by_text("RTX 4090", exact=True)).to_be_visible()
    heading = tab.get_by_role("heading", name="Which machine do I need?")
    expect(heading).to_be_focused()
    expect(heading).to_be_in_viewport()
    expect(offers.locator("tr").first).to_be_in_viewport()
    offers.get_by_text("RTX 4090", exact=True).click()
    expect(offers.locator("details[open] a").first).to_have_attribute(
        "href", re.compile("^https://")
    )

    # A measurement says how far it is, and can be cancelled.
    tab.get_by_role("button", name="Measure", exact=True).click()
    tab.get_by_role("button", name="Cancel").click()
    expect(tab.locator("[data-field=measured]")).to_contain_text("was cancelled")
    expect(tab.get_by_role("button", name="Measure", exact=True)).to_be_enabled()

    # New gets the model, and what the table trains of it.
    tab.locator(f"[data-machine='{HERE}'] button").press("Enter")
    expect(tab.locator("#field-model-source :is(input, textarea)")).to_have_value("Qwen/Qwen3-0.6B")
    open_other_settings(tab)
    expect(box(tab, "train.method")).to_have_value("adapters (LoRA)")
    expect(box(tab, "train.lora_rank")).to_be_visible()
    expect(tab.locator(".rs-fit-panel")).to_contain_text("trained")
    expect(tab.locator(".rs-fit-panel [data-field=size]")).to_contain_text("28 layers")


def test_the_moments_of_the_table_are_chosen(tab):
    tab.locator("select[name=optimizer]").select_option("best")
    tab.wait_for_selector(READY)
    cell = tab.locator("tr[data-model='Qwen/Qwen2.5-0.5B'] [data-machine='RTX 4090']")
    expect(cell.locator("b")).to_have_text("fits, fp32")
    larger = tab.locator("tr[data-model='mistralai/Mistral-7B-v0.3'] [data-machine='RTX 4090']")
    expect(larger.locator("b")).to_have_text("just fits, bf16")
    expect(tab.locator(".rs-hardware [data-field=counted]")).to_contain_text(
        re.compile(r"Models that fit: This machine \d+, RTX 4090 \d+\.")
    )
    tab.set_viewport_size({"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert tab.evaluate(LINES_OF_A_WORD, [*ADAMW, "parameters/s"]) == 1
    tab.set_viewport_size({"width": 1440, "height": 900})
    tab.locator("select[name=optimizer]").select_option("adamw")
    expect(larger.locator("b")).to_have_text("too large")


def test_what_is_trained_is_chosen_for_the_table(tab):
    cell = tab.locator("tr[data-model='meta-llama/Llama-2-13b-hf'] [data-machine='RTX 4090']")
    tab.wait_for_selector(READY)
    expect(cell.locator("b")).to_have_text("too large")
    tab.locator("[data-part=settings] [name=method]").select_option("lora")
    tab.wait_for_selector(READY)
    expect(cell.locator("b")).to_have_text("fits")
    tab.get_by_text("Details", exact=True).click()
    expect(tab.locator("[data-part=largest-details]")).to_contain_text("adapters (LoRA) of rank 16")
    cell.click()
    expect(tab.get_by_role("tooltip")).to_contain_text("A step takes about")
