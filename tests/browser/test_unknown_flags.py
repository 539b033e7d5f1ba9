"""A key of the data that may be a flag closes Start until a person says, with one click, that it is
none.
"""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.support.browser import WAIT_MILLISECONDS
from tests.support.rows import write_rows
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

HOSTILE = "<img src=x onerror=window.broken=1>"


def written(path, **more):
    rows = [
        {"prompt": f"{number} plus 1 is", "completion": f"it is {number + 1}", **more}
        for number in range(40)
    ]
    write_rows(path, rows)
    return str(path)


@pytest.mark.parametrize("width", [1440, 390])
def test_keys_that_may_be_flags_are_confirmed_with_one_click(page, tmp_path, width):
    page.set_viewport_size({"width": width, "height": 900})
    data = written(tmp_path / "a.jsonl", is_spam=False, **{HOSTILE: True})
    page.get_by_text("Advanced settings").click()
    box = page.locator("#field-data-source textarea, #field-data-source input").first
    box.fill(data)
    box.press("Enter")
    head = page.locator(".rs-preview-head")
    expect(head).to_contain_text("The key is_spam in line 1 of a.jsonl is true or false")
    expect(head).to_contain_text(HOSTILE)
    expect(page.locator("#start")).to_be_disabled()
    confirm = page.get_by_role("button", name="These keys are no flags")
    assert confirm.bounding_box()["x"] + confirm.bounding_box()["width"] <= width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    confirm.click()
    expect(head).to_contain_text("Prompt: prompt · Answer: completion")
    expect(confirm).to_be_hidden()
    flags = page.locator("#field-data-unused_flags textarea")
    assert flags.input_value().splitlines() == ["is_spam", HOSTILE]
    page.wait_for_selector("#start:not([disabled])")
    assert page.evaluate("window.broken") is None

    # What was confirmed of these data says nothing of others.
    box.fill(written(tmp_path / "b.jsonl", is_spam=True))
    box.press("Enter")
    expect(page.get_by_role("button", name="This key is no flag")).to_be_visible()
    expect(flags).to_have_value("")
    expect(page.locator("#start")).to_be_disabled()
