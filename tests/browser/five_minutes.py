"""The README's five minutes: `python -m tests.browser.five_minutes` does its six points on a new
server, as a person does them in a browser, and says how long each took.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.browser.screen import (
    OPENED_RUN,
    ask,
    box,
    fill,
    open_page,
    open_run,
    open_view,
    press,
    run_of,
    state,
    wait_for_points,
)
from tests.support.browser import FLAGS, Server, chromium_path
from tests.support.ports import free_port

PATIENCE = 200_000
"""ms; the starter shares the cores with the browser."""
LIMIT = 300
"""All points together take at most this many seconds."""
QUESTION = "In Roman numerals: 1618?"

expect.set_options(timeout=PATIENCE)


def start(page: Page, _: Path) -> None:
    page.locator("#start:not([disabled])").click()
    expect(page).to_have_url(OPENED_RUN)
    wait_for_points(page)
    expect(state(page)).to_have_text("Finished")
    expect(page.get_by_role("region", name="What came of it")).to_be_visible()


def read_the_verdict(page: Page, _: Path) -> None:
    open_page(page, "new")
    box(page, "model.source").fill("Qwen/Qwen2.5-7B")
    box(page, "model.source").press("Enter")
    expect(page.locator(".rs-fit-panel")).to_contain_text("GiB")
    expect(page.locator(".rs-fit-panel")).to_contain_text("7.6")
    box(page, "model.source").fill("assets/starter-model")
    box(page, "model.source").press("Enter")
    expect(page.locator("#start")).to_be_enabled()


def stop_and_resume(page: Page, _: Path) -> None:
    fill(page, "train.steps", "60")
    page.locator("#start:not([disabled])").click()
    expect(page).to_have_url(OPENED_RUN)
    wait_for_points(page)
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")
    press(page, "resume")
    expect(state(page)).to_have_text("Finished")


def bring_your_data(page: Page, folder: Path) -> None:
    open_page(page, "new")
    rows = folder / "sums.csv"
    lines = [f"{number} plus 1?;{number + 1}" for number in range(200)]
    rows.write_text("\n".join(["ask;tell", *lines, ""]), encoding="utf-8")
    page.locator(".rs-data-files input").set_input_files(str(rows))
    mapping = page.locator(".rs-mapping")
    mapping.locator("[data-role=prompt]").select_option(label="ask")
    mapping.locator("[data-role=completion]").select_option(label="tell")
    expect(page.locator(".rs-preview ol li mark").first).to_be_visible()
    expect(page.locator("#start")).to_be_enabled()


def chat(page: Page, _: Path) -> None:
    open_page(page, "chat")
    ask(page, QUESTION, answers=2)


def take_it_home(page: Page, folder: Path) -> None:
    newest = max(path.parent.name for path in (folder / "runs").glob("*/config.yaml"))
    open_run(page, newest)
    open_view(page, "export")
    page.locator("[data-part=export] input[name=folder]").fill(str(folder / "home"))
    page.locator("[data-part=export] button.rs-primary").click()
    expect(page.locator("[data-field=export-caption]")).to_contain_text("Exported the model")
    assert (folder / "home" / "config.json").exists() and run_of(page)


POINTS: dict[str, Callable[[Page, Path], None]] = {
    "Start": start,
    "Read the verdict": read_the_verdict,
    "Stop and resume": stop_and_resume,
    "Bring your data": bring_your_data,
    "Chat": chat,
    "Export it": take_it_home,
}


def main() -> None:
    with tempfile.TemporaryDirectory() as kept, sync_playwright() as playwright:
        folder = Path(kept)
        server = Server(folder, free_port())
        begun = time.monotonic()
        server.start()
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.set_default_timeout(PATIENCE)
            page.goto(server.address)
            page.wait_for_selector("#start:not([disabled])")
            before = time.monotonic()
            print(f"The page is ready      {before - begun:5.1f} s", flush=True)
            for name, work in POINTS.items():
                work(page, folder)
                now = time.monotonic()
                print(f"{name:22s} {now - before:5.1f} s", flush=True)
                before = now
        finally:
            browser.close()
            server.end()
        total = time.monotonic() - begun
        print(f"All                    {total:5.1f} s")
        if total > LIMIT:
            raise SystemExit(f"The README promises {LIMIT} s.")


if __name__ == "__main__":
    main()
