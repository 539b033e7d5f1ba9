"""Data whose columns have odd names: chosen in the preview, seen in color, and in the settings of
the run that is started.
"""

from __future__ import annotations

import csv
import json
import re

import pytest
import yaml
from playwright.sync_api import expect

from tests.browser.screen import OPENED_RUN, open_page, press
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

HOSTILE = "<img src=x onerror=window.broken=1>"


def test_columns_are_chosen_in_the_preview_and_are_in_the_runs_settings(page, server, tmp_path):
    path = tmp_path / "odd.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["nr", HOSTILE, " Wohin ", "notes"])
        table.writerows(
            [
                [
                    number,
                    f"{number} plus 1 is",
                    f"it is {number + 1}",
                    "a remark that nobody asked for, and long",
                ]
                for number in range(40)
            ]
        )
    box = page.locator("#field-data-source textarea, #field-data-source input").first
    box.fill(str(path))
    box.press("Enter")
    mapping = page.locator(".rs-mapping")
    expect(mapping).to_contain_text("Check your columns")
    expect(mapping).to_have_attribute("open", "")
    expect(mapping.locator("tbody th")).to_have_text(["nr", HOSTILE, "Wohin", "notes"])

    expect(page.locator("#start")).to_be_disabled()
    question = re.compile("Is “.+” the prompt and “.+” the answer?")
    expect(page.locator(".rs-reasons")).to_contain_text(question)

    system = mapping.get_by_label("System message")
    expect(system).to_be_hidden()
    mapping.get_by_text("More columns").click()
    expect(system).to_be_visible()
    mapping.locator("[data-role=prompt]").select_option(label=HOSTILE)
    mapping.locator("[data-role=completion]").select_option(label="Wohin")
    expect(mapping).to_contain_text("Columns (your choice)")
    trained = page.locator(".rs-preview ol li").first.locator("mark")
    expect(trained).to_contain_text("it is 1")
    expect(page.locator(".rs-preview ol li").first.locator("span").first).to_contain_text(
        "0 plus 1 is"
    )
    expect(mapping.locator("tr", has_text=HOSTILE).locator("td").last).to_have_text("prompt")

    page.wait_for_selector("#start:not([disabled])")
    expect(page.get_by_text(question)).to_have_count(0)
    page.locator("#start").click()
    page.wait_for_url(OPENED_RUN)
    expect(page.locator(".rs-bar")).to_contain_text(re.compile("Stop and save"))
    run = max(server.runs.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
    columns = yaml.safe_load(run.read_text(encoding="utf-8"))["data"]["columns"]
    assert (columns["prompt"], columns["completion"], columns["system"]) == (HOSTILE, "Wohin", None)
    press(page, "discard")
    page.get_by_role("dialog").get_by_role("button", name="Stop and discard").click()

    # Going by the names again, and a row that is a text: by keyboard alone.
    open_page(page, "new")
    mapping.get_by_role("button", name="Go back to automatic").press("Enter")
    expect(mapping).to_contain_text("Check your columns")
    kind = mapping.locator("[data-role=kind]")
    kind.focus()
    kind.press("End")
    expect(mapping).to_contain_text("Columns (your choice)")
    expect(page.locator(".rs-preview-head")).to_contain_text("Read as text")
    assert page.evaluate("window.broken") is None


# Chooses a column at the moment at which the page learns that the data are being read again.
CHOOSE_WHILE_READ = """(label) => {
  const preview = document.querySelector('.rs-preview');
  new MutationObserver((_, observer) => {
    if (preview.getAttribute('aria-busy') !== 'true') return;
    observer.disconnect();
    const select = document.querySelector('.rs-mapping [data-role=completion]');
    select.value = [...select.options].find((option) => option.label === label).value;
    select.dispatchEvent(new Event('change'));
    window.chosenWhileRead = true;
  }).observe(preview, {attributes: true});
}"""


def test_a_column_chosen_while_the_same_data_are_read_again_stays(page, tmp_path):
    path = tmp_path / "odd.csv"
    path.write_text(
        "nr,Frage,Wohin,notes\n"
        + "".join(f"{number},{number} plus 1 is,it is {number + 1},a\n" for number in range(40)),
        encoding="utf-8",
    )
    box = page.locator("#field-data-source textarea, #field-data-source input").first
    box.fill(str(path))
    box.press("Enter")
    mapping = page.locator(".rs-mapping")
    expect(mapping).to_contain_text("Check your columns")
    page.evaluate(CHOOSE_WHILE_READ, "nr")
    box.press("Enter")
    page.wait_for_function("window.chosenWhileRead")
    expect(mapping).to_contain_text("Columns (your choice)")
    expect(mapping.locator("tr", has_text="nr").locator("td").last).to_have_text("answer")
    # Two choices in a row, the second one before the answer to the first.
    mapping.locator("[data-role=completion]").select_option(label="notes")
    mapping.locator("[data-role=prompt]").select_option(label="Wohin")
    expect(mapping.locator("tr", has_text="notes").locator("td").last).to_have_text("answer")
    expect(mapping.locator("tr", has_text="Wohin").locator("td").last).to_have_text("prompt")
    expect(page.locator(".rs-preview ol li").first).to_contain_text("it is 1")
    expect(page.locator(".rs-preview ol li").first.locator("mark")).to_have_text(re.compile("^a"))


def test_columns_of_a_mix_are_chosen_source_by_source(page, tmp_path):
    for name, columns in (
        ("usual", ("prompt", "completion")),
        ("first", ("Grüße", "tell")),
        ("second", ("b", "c")),
    ):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(
                json.dumps(
                    {
                        "nr": number,
                        columns[0]: f"{number} plus 1 is",
                        columns[1]: f"it is {number + 1}",
                    }
                )
                + "\n"
                for number in range(40)
            ),
            encoding="utf-8",
        )
    box = page.locator("#field-data-source textarea, #field-data-source input").first
    usual, first, second = (
        str(tmp_path / f"{name}.jsonl") for name in ("usual", "first", "second")
    )
    box.fill(
        f"[{{source: {usual}, weight: 2}}, {{source: {first}}}, {{source: {second}, split: train}}]"
    )
    box.press("Enter")
    mapping = page.locator(".rs-mapping")
    expect(mapping.locator("[data-field=mapping-state]")).to_contain_text(
        "Check your columns in first.jsonl (2 of 3)"
    )
    expect(page.locator("#start")).to_be_disabled()
    # What was typed since is not lost to columns of the data before.
    text = box.input_value()
    box.fill(text.replace("weight: 2", "weight: 3"))
    mapping.get_by_role("button", name=re.compile("^Use .+ → ")).click()
    expect(box).to_have_value(text.replace("weight: 2", "weight: 3"))
    expect(page.locator(".rs-preview-head")).to_contain_text("the prompt and “")
    mapping.get_by_role("button", name=re.compile("^Use .+ → ")).click()
    expect(mapping.locator("[data-field=mapping-state]")).to_contain_text(
        "Check your columns in second.jsonl (3 of 3)"
    )
    mapping.locator("[data-role=prompt]").select_option(label="c")  # the two change places
    expect(mapping.locator("[data-field=mapping-state]")).to_contain_text(
        "Columns (your choice) in first.jsonl (2 of 3)"
    )
    expect(page.locator("#start")).to_be_enabled()
    assert yaml.safe_load(box.input_value()) == [
        {"source": usual, "weight": 3},
        {"source": first, "columns": {"prompt": "Grüße", "completion": "tell"}},
        {"source": second, "split": "train", "columns": {"prompt": "c", "completion": "b"}},
    ]
    expect(
        page.locator(".rs-preview ol li").filter(has_text="second.jsonl").first.locator("mark")
    ).to_contain_text("plus 1 is")

    mapping.get_by_role("button", name="Go back to automatic").click()
    expect(mapping.locator("[data-field=mapping-state]")).to_contain_text(
        "Check your columns in first.jsonl (2 of 3)"
    )
    assert "columns" not in yaml.safe_load(box.input_value())[1]
