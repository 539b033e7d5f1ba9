"""The README's pictures: `python -m tests.browser.pictures` draws every page, light and dark, of a
server that trains the starter meanwhile. It takes some minutes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from app.form.presets import FIRST_PRESET, PRESETS
from engine.config.settings import TrainConfig
from engine.training.loop.run import start_run
from tests.browser.screen import OPENED_RUN, bar, expect_finished, open_page, run_of, verdict
from tests.support.browser import FLAGS, ROOT, Server, chromium_path
from tests.support.ports import free_port

WIDTH, LEAST_HEIGHT = 1440, 900
TALLEST = {"hardware": 1300, "result": 1250, "overview": 1100}
"""Of a page that would be longer."""
COLORS = 200
"""Of a picture: few, so that it is small."""
SETTLE = 1500
"""ms until a page of another height is drawn."""
PATIENCE = 300_000
"""ms; the starter shares the cores with the browser."""
QUESTION = "In Roman numerals: 1618?"
SLOWER = {
    "name": "Starter, a quarter of the rate",
    "train.learning_rate": 1e-3,
    "train.steps": 200,
}
"""What the other run of the comparison is like."""

expect.set_options(timeout=PATIENCE)


def hardware(page: Page) -> None:
    open_page(page, "hardware")
    expect(page.locator(".rs-hardware [data-field=origin]")).not_to_be_empty()
    expect(page.get_by_text("Speeds are still being computed")).to_have_count(0)


def new(page: Page) -> None:
    open_page(page, "new")
    page.wait_for_selector(".rs-fit-panel[data-tone=good]")
    page.wait_for_selector(".rs-preview mark")


def overview(page: Page) -> None:
    """Of a run that is half over."""
    if not OPENED_RUN.search(page.url):
        new(page)
        page.locator("#start:not([disabled])").click()
        expect(page).to_have_url(OPENED_RUN)
    page.wait_for_function(
        "parseInt(document.querySelector('.rs-bar [data-field=step]').textContent) > 230"
    )
    for name in ("loss", "tflops", "timeline"):
        page.wait_for_selector(f"[data-figure={name}] .main-svg")


def result(page: Page) -> None:
    expect_finished(page)
    expect(verdict(page)).to_be_visible()


def runs(page: Page) -> None:
    if "compare=" not in page.url:
        open_page(page, "runs")
        expect(page.locator("[data-act=compare]")).to_have_count(2)
        for box in page.locator("[data-act=compare]").all():
            box.check()
        page.locator("[data-part=compare-open]").click()
    page.wait_for_selector("[data-compare=memory] .main-svg")


def chat(page: Page) -> None:
    """With the run whose overview was shown."""
    if "view=chat" not in page.url:
        page.locator(".rs-nav a[data-run]").first.click()
        expect(bar(page, "name")).to_have_text("Starter")
        page.goto(f"{page.url.split('?')[0]}?run={run_of(page)}&view=chat")
        expect(page.locator(".rs-chat select[name=weights] option")).not_to_have_count(0)
        box = page.locator(".rs-chat textarea[name=message]")
        box.fill(QUESTION)
        box.press("Enter")
    expect(page.locator(".rs-chat [data-state=done]")).to_have_count(2)


PLACES: dict[str, Callable[[Page], None]] = {
    "hardware": hardware,
    "new": new,
    "overview": overview,
    "result": result,
    "runs": runs,
    "chat": chat,
}
"""The third starts the run that the others show."""


def small(picture: bytes, path: Path) -> None:
    Image.open(BytesIO(picture)).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def take(page: Page, name: str) -> None:
    """In both themes; what is not seen is not drawn, and what is drawn may take more space."""
    page.set_viewport_size({"width": WIDTH, "height": LEAST_HEIGHT})
    PLACES[name](page)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        for _ in range(2):
            page.wait_for_timeout(SETTLE)
            whole = page.evaluate("document.documentElement.scrollHeight")
            height = min(whole, TALLEST.get(name, whole))
            page.set_viewport_size({"width": WIDTH, "height": height})
        PLACES[name](page)
        page.wait_for_timeout(SETTLE)
        path = ROOT / "docs" / f"{name}-{scheme}.png"
        small(page.screenshot(), path)
        print(path, path.stat().st_size >> 10, "KiB", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ramstream-") as place, sync_playwright() as playwright:
        server = Server(Path(place), free_port())
        server.runs.mkdir()
        other = TrainConfig.load(PRESETS / FIRST_PRESET).with_values(SLOWER)
        print("The other run:", start_run(other, server.runs).execute().state, flush=True)
        server.start()
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        context = browser.new_context(reduced_motion="reduce")
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.goto(f"{server.address}/?show=hardware")
        for name in PLACES:
            take(page, name)
        browser.close()
        server.end()


if __name__ == "__main__":
    main()
