"""All texts of the screens: `python -m tests.browser.texts --to FILE` opens every page and view of
made-up runs, and writes each text once, under the place where it was seen first.

They are to be read from end to end: what is odd, said twice, or jargon is mended where it stands.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.browser.screen import PAGES, VIEWS, address, recorded_run
from tests.support.browser import FLAGS, Server, chromium_path
from tests.support.ports import free_port

SETTLE = 2500
"""ms until a place is drawn."""
RUNS = (("Finished", 120, "finished"), ("Failed", 60, "failed"), ("Broken off", 60, None))
# Folds are opened, so that what they hold is read as well. Tooltips and names for screen readers
# are texts, too.
READ = """() => {
    for (const fold of document.querySelectorAll('details')) fold.open = true;
    const said = [];
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT);
    while (walk.nextNode()) {
        const node = walk.currentNode;
        if (!node.checkVisibility({visibilityProperty: true})) continue;
        for (const name of ['title', 'aria-label', 'placeholder'])
            if (node.getAttribute(name)) said.push(node.getAttribute(name));
        const own = [...node.childNodes].filter(({nodeType}) => nodeType === Node.TEXT_NODE);
        if (own.some(({data}) => data.trim())) said.push(node.innerText ?? node.textContent);
    }
    return said;
}"""


def texts_of(page: Page) -> list[str]:
    """Returns the texts that the page shows now, in the order of the page."""
    return [" ".join(text.split()) for text in page.evaluate(READ)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True)
    target = parser.parse_args().to
    seen: set[str] = set()
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        server = Server(Path(folder), free_port())
        server.start()
        runs = [recorded_run(server, steps, name, ended=ended) for name, steps, ended in RUNS]
        places = {f"page {name}": f"{server.address}/?show={name}" for name in PAGES}
        for run, (name, *_) in zip(runs, RUNS):
            places |= {f"{name}, {view}": address(server, run.id, view) for view in VIEWS}
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        for place, url in places.items():
            page.goto(url)
            page.wait_for_timeout(SETTLE)
            fresh = [text for text in dict.fromkeys(texts_of(page)) if text not in seen]
            seen.update(fresh)
            lines += [f"== {place}", *filter(None, fresh), ""]
        browser.close()
        server.end()
    target.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
