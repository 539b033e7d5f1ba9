"""An error that nobody foresaw ends the preview and a start in a sentence, and no old rows stay."""

from __future__ import annotations

import re
import sys

import pytest
from playwright.sync_api import expect

from tests.support.browser import ROOT, WAIT_MILLISECONDS, Server
from tests.support.ports import free_port
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

FAULTY = """
import sys, time
import engine.data.batches.preview as data

def faulty(function):
    def call(config, *rest, **options):
        if "boom" in str(config.source):
            raise RuntimeError("boom")
        if "gone" in str(config.source):
            raise FileNotFoundError(2, "No such file or directory", "/proc/1234")
        if "slow" in str(config.source):
            time.sleep(4)
        return function(config, *rest, **options)
    return call

data.preview, data.check_first_rows = faulty(data.preview), faulty(data.check_first_rows)
import launch
sys.exit(launch.main(sys.argv[1:]))
"""


class FaultyServer(Server):
    """A server whose preview fails for some names of data."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", FAULTY, *super().command[2:]]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    server = FaultyServer(folder, free_port(), {"PYTHONPATH": str(ROOT)}, is_plain=True)
    server.start()
    yield server
    server.end()


@pytest.mark.parametrize(
    "name, reported, is_fault",
    [
        ("boom", r"fault of its own \(RuntimeError: boom\)", True),
        ("gone", r"^The system refused this \(No such file or directory: /proc/1234\)", False),
    ],
)
def test_the_preview_ends_with_a_sentence_and_without_rows(page, server, name, reported, is_fault):
    before = server.log().count("Traceback")
    preview = page.locator(".rs-preview")
    expect(preview.locator("ol li").first).to_be_visible()
    box = page.locator("#field-data-source textarea, #field-data-source input").first
    box.fill(f"{name}.jsonl")
    box.press("Enter")
    expect(preview.locator("[data-field=understood]")).to_have_text(re.compile(reported))
    expect(preview.locator("ol li")).to_have_count(0)
    expect(preview.locator(".rs-lengths")).to_be_hidden()
    expect(preview.locator(".rs-preview-key")).to_be_hidden()
    expect(preview).to_have_attribute("aria-busy", "false")
    expect(page.locator("#start")).to_be_disabled()
    assert (server.log().count("Traceback") > before) is is_fault
    # The next data are read as ever.
    box.fill("assets/starter.jsonl")
    box.press("Enter")
    expect(preview.locator("ol li").first).to_be_visible()


def test_old_rows_do_not_stand_under_the_word_that_others_are_being_read(page):
    preview = page.locator(".rs-preview")
    expect(preview.locator("ol li").first).to_be_visible()
    box = page.locator("#field-data-source textarea, #field-data-source input").first
    box.fill("slow.jsonl")
    box.press("Enter")
    understood = preview.locator("[data-field=understood]")
    expect(understood).to_have_text("Reading the first rows …")
    assert preview.locator("ol li").count() == 0
    expect(understood).to_contain_text("There is no file slow.jsonl")
