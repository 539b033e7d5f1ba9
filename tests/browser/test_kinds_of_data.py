"""Data of other formats in the preview: preferences, refused marks, and a compressed file."""

from __future__ import annotations

import gzip
import json

import pytest
from playwright.sync_api import expect

from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def choose(page, path) -> None:
    box = page.locator("#field-data-source textarea, #field-data-source input").first
    box.fill(str(path))
    box.press("Enter")


def test_preferences_marks_and_a_compressed_file_are_told_for_what_they_are(page, tmp_path):
    preferences, marked, packed = (
        tmp_path / name for name in ("preferences.jsonl", "marked.jsonl", "packed.jsonl.gz")
    )
    asked = [(f"{number} plus 1 is", f"it is {number + 1}") for number in range(40)]
    preferences.write_text(
        lines([{"prompt": ask, "chosen": tell, "rejected": "no idea"} for ask, tell in asked])
    )
    marked.write_text(
        lines([{"prompt": ask, "completion": tell, "label": False} for ask, tell in asked])
    )
    with gzip.open(packed, "wt", encoding="utf-8") as file:
        file.write(lines([{"prompt": ask, "completion": tell} for ask, tell in asked]))

    choose(page, preferences)
    head, mapping = page.locator(".rs-preview-head"), page.locator(".rs-mapping")
    expect(head).to_contain_text("Recognized as preference")
    # Data of pairs make preferences what is learned.
    expect(page.locator(".rs-preview")).to_contain_text("Each row is a pair: a chosen answer")
    expect(page.locator(".rs-preview ol mark.rs-chosen").first).to_contain_text("it is 1<|end|>")
    expect(page.locator(".rs-preview ol mark.rs-rejected").first).to_contain_text("no idea")
    expect(page.locator(".rs-preview")).to_contain_text("answers end with <|end|>")
    for role, chosen in {"kind": "a chosen answer and a rejected one", "chosen": "chosen"}.items():
        expect(mapping.locator(f"[data-role={role}] option:checked")).to_have_text(chosen)
    expect(page.locator("#start")).to_be_enabled()

    choose(page, marked)
    text = "The column label of marked.jsonl marks answers as good or bad (KTO)"
    expect(page.locator(".rs-preview")).to_contain_text(text)
    expect(page.locator(".rs-reasons")).to_contain_text(text)
    expect(page.locator("#start")).to_be_disabled()

    choose(page, packed)
    expect(page.locator(".rs-preview ol li").first).to_contain_text("line 1 of packed.jsonl.gz")
    expect(page.locator(".rs-preview")).not_to_contain_text("KTO")
    expect(page.locator("#start")).to_be_enabled()
