"""How long a page takes to show a long run on a server that has just been started: `python -m
tests.browser.opening`.

The record is of 100 units and 50,000 steps, with as many timelines and norms as a run of that
length keeps (500, of 800 spans). Nothing looks into the browser until the page is there: while
something does, Chromium parses plotly.js again for the places of errors that it catches itself,
which takes half a second that no user waits for. The page's own marks tell the times.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace
from playwright.sync_api import Playwright, sync_playwright

from engine.config.settings import TrainConfig
from engine.runs.record.events import MemorySampled
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from tests.browser.pages import SPAN_BLOCKS, UNITS
from tests.support.browser import FLAGS, Server, chromium_path
from tests.support.ports import free_port
from tests.support.synthetic_run import (
    records,
    run_events,
    step_finished,
    timeline,
    unit_norms,
    write_events,
)

STEPS, TIMELINES = 50_000, 500
LEAVE_AFTER, LOOK_AFTER = 2, 10
"""Seconds: until the browser, which is then idle, opens the page; until the page is looked at."""
CHART = "loss"
MARKS = """() => Object.fromEntries(performance.getEntriesByType('mark')
  .map(({name, startTime}) => [name, startTime / 1000]))"""


def long_run(runs: Path):
    config = {"name": "Long", "model": {"source": "model"}, "data": {"source": "data"}}
    folder = create_run(runs, TrainConfig.from_dict(config))
    recorder = RunRecorder(folder.path, folder.id)
    memory = next(event for event in run_events(1) if isinstance(event, MemorySampled))
    *begin, ended = run_events(1, total=STEPS, blocks=UNITS - 2)
    for event in begin[:8]:
        recorder.emit(event)
    for step in range(1, STEPS + 1):
        recorder.emit(step_finished(step, STEPS))
        recorder.emit(replace(memory, step=step))
        if step % (STEPS // TIMELINES) == 0:
            recorder.emit(timeline(step, SPAN_BLOCKS))
            recorder.emit(unit_norms(step, STEPS, UNITS))
    recorder.emit(ended)
    recorder.close()
    return folder


def with_a_newer_run(runs: Path, copy: Path) -> None:
    """Copies the runs, so that the long one is none that a server reads before somebody asks for
    it.
    """
    shutil.copytree(runs, copy)
    config = {"name": "Newer", "model": {"source": "model"}, "data": {"source": "data"}}
    folder = create_run(copy, TrainConfig.from_dict(config))
    write_events(folder.events_path, records(run_events(10), folder.id))


def seconds_to_show(playwright: Playwright, address: str) -> float:
    """Returns the seconds from leaving an empty page, in a new profile of the browser, until the
    chart was drawn last.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        leave = (
            f"data:text/html,<script>setTimeout(() => location.href = '{address}', "
            f"{1000 * LEAVE_AFTER})</script>"
        )
        browser = subprocess.Popen(
            [
                chromium_path(),
                "--headless",
                *FLAGS,
                "--window-size=1440,2600",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                leave,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            time.sleep(LEAVE_AFTER + LOOK_AFTER)
            port = (Path(profile) / "DevToolsActivePort").read_text().split()[0]
            page = (
                playwright.chromium.connect_over_cdp(f"http://127.0.0.1:{port}")
                .contexts[0]
                .pages[0]
            )
            marks = page.evaluate(MARKS)
        finally:
            browser.terminate()
            browser.wait()
    return marks[f"drawn {CHART}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        newest, older = (
            Server(Path(place) / name, free_port(), is_plain=True) for name in ("newest", "older")
        )
        for server in (newest, older):
            server.folder.mkdir()
        folder = long_run(newest.runs)
        with_a_newer_run(newest.runs, older.runs)
        print(
            f"{STEPS:,} steps, {UNITS} units: {folder.events_path.stat().st_size / 1e6:.0f} MB",
            flush=True,
        )
        shown: dict[str, list[float]] = {
            "cold server, its newest run": [],
            "the same again": [],
            "cold server, an older run": [],
        }
        for _ in range(times):
            for server, cases in ((newest, list(shown)[:2]), (older, list(shown)[2:])):
                server.start()
                try:
                    for what in cases:
                        address = f"{server.address}/?run={folder.id}&view=overview"
                        shown[what].append(seconds_to_show(playwright, address))
                finally:
                    server.end()
        for what, found in shown.items():
            print(
                f"{what}: curves of the loss after {statistics.median(found):.2f} s in the "
                f"median, {min(found):.2f} to {max(found):.2f} s of {times}",
                flush=True,
            )


if __name__ == "__main__":
    main()
