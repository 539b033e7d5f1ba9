"""A person's own table with odd columns, from the upload to the model that is exported: with the
mouse and by keyboard alone, on one page that is never read again. In Chromium, on the real server
and engine.
"""

from __future__ import annotations

import csv
import re

import pytest
from playwright.sync_api import expect
from transformers import AutoModelForCausalLM

from tests.browser.screen import (
    OPENED_RUN,
    bar,
    box,
    expect_finished,
    run_of,
    verdict,
    view_link,
    wait_for_points,
)
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

ROWS = 120
STEPS = 40
TABS = 150
"""So often Tab is pressed at most to come from one place of the page to the next."""


class Mouse:
    """A person who clicks."""

    def __init__(self, page):
        self.page = page

    def press(self, wanted):
        self.page.locator(wanted).click()

    def write(self, wanted, text):
        node = self.page.locator(wanted)
        node.fill(text)
        node.press("Tab")

    def choose(self, wanted, label):
        self.page.locator(wanted).select_option(label=label)


class Keyboard:
    """A person who has nothing but the keys."""

    def __init__(self, page):
        self.page = page

    def _go(self, wanted):
        for _ in range(TABS):
            if self.page.evaluate("wanted => document.activeElement.matches(wanted)", wanted):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"{wanted} is not reached by Tab")

    def press(self, wanted):
        self._go(wanted)
        self.page.keyboard.press("Enter")

    def write(self, wanted, text):
        self._go(wanted)
        self.page.keyboard.press("Control+A")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Tab")

    def choose(self, wanted, label):
        self._go(wanted)
        self.page.keyboard.type(label)  # the first letters choose
        expect(self.page.locator(wanted).locator("option:checked")).to_have_text(label)


def table(folder):
    """A table as spreadsheets of other countries write it: semicolons, a mark of its encoding,
    columns that no format knows, a line break within a cell.
    """
    path = folder / "Fragen & Antworten.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        lines = csv.writer(file, delimiter=";")
        lines.writerow(["Nr.", "Wohin?", " Frage (Kunde)"])
        for number in range(ROWS):
            lines.writerow([number, f"it is {number + 1}", f"{number} plus 1 is;\nwhat"])
    return path


def field(name):
    return f"#field-{name.replace('.', '-')} :is(input, textarea)"


@pytest.mark.parametrize("hands", [Mouse, Keyboard])
def test_a_table_becomes_a_model_that_is_exported(page, server, tmp_path, hands):
    hands = hands(page)
    page.evaluate("window.isSamePage = true")
    with page.expect_file_chooser() as chosen:
        hands.press(".rs-data-files [data-part=choose]")
    chosen.value.set_files(table(tmp_path))
    expect(box(page, "data.source")).to_have_value(re.compile(r"Fragen-Antworten\.csv$"))
    mapping = page.locator(".rs-mapping")
    expect(mapping.locator("tbody th")).to_have_text(["Nr.", "Wohin?", "Frage (Kunde)"])
    # The guess goes by the texts; this person wants it the other way round.
    hands.choose(".rs-mapping [data-role=prompt]", "Wohin?")
    expect(mapping).to_contain_text("Columns (your choice)")
    expect(page.locator(".rs-preview ol li mark").first).to_contain_text("0 plus 1 is")

    run_length = page.locator(".rs-run-length [data-field=length]")
    expect(run_length).to_contain_text(re.compile(r"3 passes over your \d+ rows ≈ \d+ steps"))
    hands.press("[data-length=steps]")
    hands.write(field("train.steps"), str(STEPS))
    expect(run_length).to_contain_text(
        re.compile(rf"{STEPS} steps ≈ [\d.]+ passes over your \d+ rows")
    )
    hands.write(field("name"), "Wohin damit")
    expect(page.locator("#start")).to_be_enabled()
    hands.press("#start")
    expect(page).to_have_url(OPENED_RUN)
    expect(bar(page, "name")).to_have_text("Wohin damit")
    run_id = run_of(page)
    wait_for_points(page)
    expect_finished(page)
    expect(verdict(page)).to_contain_text("alidation loss")

    target = tmp_path / "exported model"
    hands.press(view_link("export"))
    expect(page.locator("[data-field=export-weights]")).to_contain_text(re.compile(r"step \d+"))
    hands.write("[data-part=export] input[name=folder]", str(target))
    hands.press("[data-part=export] form button")
    expect(page.locator("[data-field=export-caption]")).to_contain_text(str(target))
    expect(page.locator("[data-part=use-rows]")).to_contain_text("vllm serve")
    assert page.evaluate("window.isSamePage"), "the page was read again"
    card = (target / "README.md").read_text(encoding="utf-8")
    assert "Wohin damit" in card and "Fragen-Antworten.csv" in card
    AutoModelForCausalLM.from_pretrained(target)
    assert (server.runs / run_id / "export" / "config.json").exists()
