"""A long run of the starter's own settings: `python -m tests.browser.soak --steps 20000 [--app]`.

It trains as a user does, packed, with evaluations and checkpoints: on the command line or, with
`--app`, in the app with a page open. The record of the run says how much RAM its process took. From
step 500 on it must be flat within 1 %. On one core, 1,000 steps take two minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from app.form.presets import FIRST_PRESET, PRESETS
from app.form.settings_form import shown_values
from engine.config.settings import TrainConfig
from engine.runs.record.events import RunEnded
from engine.runs.record.following import EVENTS_FILE, last_of_kind
from tests.support.browser import FLAGS, Server, answer, chromium_path
from tests.support.ports import free_port
from tests.support.soak import (
    STEADY_SHARE,
    Growth,
    growth_after,
    only_record,
    train_on_the_command_line,
)

WARM_UP_STEPS = 500
POLL_SECONDS = 5


def train_in_the_app(steps: int, folder: Path) -> Path:
    """Trains the starter for `steps` steps from a page, which stays open and shows the run; returns
    the path of its record.
    """
    from playwright.sync_api import sync_playwright

    server = Server(folder, free_port(), is_plain=True)
    server.start()
    try:
        config = TrainConfig.load(PRESETS / FIRST_PRESET, [f"train.steps={steps}"])
        answer(server, "/api/check", {"preset": FIRST_PRESET, "shown": shown_values(config)})
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(server.address)
            page.wait_for_selector("#start:not([disabled])")
            page.click("#start")
            page.wait_for_selector(".rs-run figure")
            while not list(server.runs.glob(f"*/{EVENTS_FILE}")):
                page.wait_for_timeout(1000)
            record = only_record(server.runs)
            while last_of_kind(record, RunEnded.kind) is None:
                page.wait_for_timeout(1000 * POLL_SECONDS)
            browser.close()
    finally:
        server.end()
    return record


def told(growth: Growth, seconds: float) -> str:
    """Returns the result in one line."""
    return (
        f"RAM after step {WARM_UP_STEPS}: {growth.level / 2**20:.1f} MiB, then "
        f"{growth.nbytes / 2**20:+.2f} MiB over {growth.steps:,} steps "
        f"({growth.nbytes / growth.steps:.0f} bytes a step, {100 * growth.share:.2f} %), "
        f"in {seconds / 60:.0f} minutes"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--app", action="store_true", help="train in the app, with a page open")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        train = train_in_the_app if arguments.app else train_on_the_command_line
        growth = growth_after(train(arguments.steps, Path(place)), WARM_UP_STEPS)
    print(told(growth, time.monotonic() - began))
    is_flat = abs(growth.share) <= STEADY_SHARE
    print("It is flat." if is_flat else f"FAILED: it is not flat within {STEADY_SHARE:.0%}.")
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
