"""The README's pictures: `python -m tests.browser.pictures RUNS RUN_ID TALK_RUN_ID` draws every
tab, light and dark.

RUNS is a folder of finished runs, such as those of a GPU machine; RUN_ID is shown in Live,
TALK_RUN_ID, which must have a checkpoint, is talked to. It is copied, and nothing of it is changed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from tests.browser.conftest import FLAGS, ROOT, WAIT_MILLISECONDS, Server, chromium_path, free_port

WIDTH, LEAST_HEIGHT = 1440, 900
TALLEST = {"hardware": 1300}
"""Of a tab that would be longer."""
COLOURS = 200
"""Of a picture: few, so that it is small."""
QUESTION = "In Roman numerals: 1618?"

expect.set_options(timeout=WAIT_MILLISECONDS)


def train(page: Page) -> None:
    page.wait_for_selector(".rs-verdict[data-tone=good]")
    page.wait_for_selector(".rs-preview mark")


def live(page: Page) -> None:
    for name in ("loss", "step_time", "norms", "timeline"):
        page.wait_for_selector(f"[data-figure={name}] .main-svg")


def runs(page: Page) -> None:
    page.wait_for_selector("[data-compare=memory] .main-svg")


def talk(page: Page) -> None:
    log = page.locator(".rs-talk [data-part=log]")
    page.wait_for_timeout(1500)
    if "tokens/s" not in log.inner_text():
        box = page.locator(".rs-talk textarea[name=message]")
        box.fill(QUESTION)
        box.press("Enter")
    page.wait_for_function(
        "document.querySelector('.rs-talk [data-part=log]').innerText.split('tokens/s').length > 2"
    )


def hardware(page: Page) -> None:
    expect(page.locator(".rs-hardware [data-field=origin]")).not_to_be_empty()
    if page.locator(".rs-hardware").get_by_text("Not measured.").count():
        page.get_by_role("button", name="Measure").click()
    expect(page.locator(".rs-hardware").get_by_text("Not measured.")).to_have_count(0)
    expect(page.get_by_text("Speeds are still being computed")).to_have_count(0)


TABS = {"hardware": hardware, "train": train, "live": live, "runs": runs, "talk": talk}
"""The first measures the speeds that the second tells times by."""


def small(picture: bytes, path: Path) -> None:
    Image.open(BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def main(source: Path, run_id: str, talk_id: str) -> None:
    with tempfile.TemporaryDirectory(prefix="ramstream-") as place, sync_playwright() as playwright:
        server = Server(Path(place), free_port())
        shutil.copytree(source, server.runs)
        server.start()
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        for scheme in ("light", "dark"):
            context = browser.new_context(color_scheme=scheme, reduced_motion="reduce")
            context.set_default_timeout(WAIT_MILLISECONDS)
            for tab, settle in TABS.items():
                page = context.new_page()
                page.set_viewport_size({"width": WIDTH, "height": LEAST_HEIGHT})
                shown = {"talk": f"run={talk_id}", "runs": f"compare={run_id},{talk_id}"}.get(
                    tab, f"run={run_id}"
                )
                page.goto(f"{server.address}/?tab={tab}&{shown}")
                page.wait_for_timeout(3000)
                for _ in range(
                    2
                ):  # what is not seen is not drawn, and what is drawn may take more space
                    whole = page.evaluate("document.documentElement.scrollHeight")
                    page.set_viewport_size(
                        {"width": WIDTH, "height": min(whole, TALLEST.get(tab, whole))}
                    )
                    settle(page)
                    page.wait_for_timeout(1500)
                path = ROOT / "docs" / f"{tab}-{scheme}.png"
                small(page.screenshot(), path)
                print(path, path.stat().st_size >> 10, "KiB", flush=True)
                page.close()
            context.close()
        browser.close()
        server.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
