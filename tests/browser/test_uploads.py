"""A file of one's own: dropped onto the page, uploaded, mapped and ready to train."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.screen import box, fill
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

DROP = """([name, text]) => {
  const files = new DataTransfer();
  files.items.add(new File([text], name, {type: 'text/csv'}));
  const about = {dataTransfer: files, bubbles: true, cancelable: true};
  const target = document.querySelector('#preset');
  target.dispatchEvent(new DragEvent('dragover', about));
  const isMarked = document.querySelector('.rs-data-files-over') !== null;
  return isMarked && !target.dispatchEvent(new DragEvent('drop', about));
}"""
HOLD = """() => {
  const put = XMLHttpRequest.prototype.send;
  XMLHttpRequest.prototype.send = function (body) { setTimeout(() => put.call(this, body), 3000); };
}"""
"""Uploads begin three seconds late, so that a test can cancel one."""


def table():
    rows = [f"{number};{number} plus 1 is;it is {number + 1}" for number in range(40)]
    return "\n".join(["nr; Frage ;Wohin", *rows, ""])


def files(page):
    return page.locator(".rs-data-files")


def test_a_dropped_table_is_uploaded_mapped_and_can_be_started(page, server):
    kept = set(server.runs.glob(".uploads/*"))  # of tests before
    assert page.evaluate(DROP, ["Meine Fragen.csv", table()]), "the browser would open the file"
    sent = files(page).locator("[data-part=sending] li")
    listed = files(page).locator("[data-part=mix] li")
    expect(listed).to_contain_text(re.compile(r"Meine Fragen\.csv\d+ bytes"))
    expect(sent).to_have_count(0)
    path = re.compile(re.escape(str(server.runs / ".uploads")) + r"/[0-9a-f]{16}/Meine-Fragen\.csv")
    expect(box(page, "data.source")).to_have_value(path)
    mapping = page.locator(".rs-mapping")
    expect(mapping.locator("tbody th")).to_have_text(["nr", "Frage", "Wohin"])
    expect(page.locator("#start")).to_be_disabled()
    mapping.locator("[data-role=prompt]").select_option(label="Frage")
    mapping.locator("[data-role=completion]").select_option(label="Wohin")
    expect(mapping).to_contain_text("Columns (your choice)")
    expect(page.locator(".rs-preview ol li mark").first).to_contain_text("it is 1")
    expect(page.locator("#start")).to_be_enabled()

    # Another page lists the file, takes it again, and removes it; a cancelled one leaves nothing.
    page.goto(server.address)
    files(page).get_by_text("Earlier uploads").click()
    row = files(page).locator("[data-part=uploads] li").filter(has_text="Meine Fragen.csv")
    page.evaluate(HOLD)
    page.locator(".rs-data-files input[type=file]").set_input_files(
        [{"name": "late.csv", "mimeType": "text/csv", "buffer": b"a,b\n1,2\n"}]
    )
    sent.get_by_role("button", name="Cancel").click()
    expect(sent).to_contain_text("cancelled")
    row.get_by_role("button", name="Use").click()
    expect(box(page, "data.source")).to_have_value(path)
    row.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(row).to_have_count(0)
    page.wait_for_timeout(3000)  # the cancelled one is never sent
    assert set(server.runs.glob(".uploads/*")) == kept


def test_several_files_become_a_mix_and_a_refusal_is_told(page, server):
    page.locator(".rs-data-files input[type=file]").set_input_files(
        [
            {"name": name, "mimeType": "text/csv", "buffer": content}
            for name, content in (
                ("one.csv", b"prompt,completion\n1,2\n"),
                ("two.exe", b"x"),
                ("three.jsonl", b'{"prompt": "3", "completion": "4"}\n'),
            )
        ]
    )
    mix = files(page).locator("[data-part=mix] li")
    expect(mix).to_have_count(2)
    expect(files(page).locator("li .rs-error")).to_contain_text("two.exe is not a data file")
    expect(box(page, "data.source")).to_have_value(
        re.compile(r'\[\{"source":".*/one\.csv"\},\{"source":".*/three\.jsonl"\}\]')
    )
    expect(page.locator(".rs-preview ol li").filter(has_text="three.jsonl")).to_be_visible()
    expect(files(page).locator("[data-part=browse]")).to_be_hidden()

    # Another one joins them by its path, weights are numbers, and a file is left out again.
    other = server.folder / "another.jsonl"
    other.write_text('{"prompt": "5", "completion": "6"}\n', encoding="utf-8")
    files(page).get_by_role("button", name="Add another").click()
    page.get_by_label("Another data set").fill(str(other))
    files(page).get_by_role("button", name="Add", exact=True).click()
    expect(mix).to_have_count(3)
    expect(box(page, "data.source")).to_be_hidden()  # which would show a notation for files
    page.get_by_label("Weight of another.jsonl").fill("2")
    page.get_by_label("Weight of another.jsonl").blur()
    expect(box(page, "data.source")).to_have_value(re.compile(r'another\.jsonl","weight":2\}\]$'))
    for name in ("one.csv", "another.jsonl", "three.jsonl"):
        files(page).get_by_role("button", name=f"Leave out {name}").click()
        expect(files(page).get_by_role("button", name=f"Leave out {name}")).to_have_count(0)
    expect(box(page, "data.source")).to_have_value("")
    fill(page, "data.source", "assets/starter.jsonl")
