"""How long a page takes to show a long run on a server that has just been started: `python -m tests.browser.opening`.

The record is of 100 units and 50,000 steps, with as many timelines and norms as a run of that length keeps (500, of 800 spans).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from engine.config import TrainConfig
from engine.events import MemorySampled
from engine.recorder import RunRecorder
from engine.runs import create_run
from tests.browser.conftest import FLAGS, Server, chromium_path, free_port
from tests.browser.pages import SPAN_BLOCKS, UNITS
from tests.synthetic_run import run_events, step_finished, timeline, unit_norms

STEPS, SAMPLED = 50_000, 500
SHOWN = """document.querySelector('[data-figure=loss]')?._fullData?.[0]?.x?.length > 100
  && document.querySelector('[data-figure=timeline]')?._fullLayout"""


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
        recorder.emit(type(memory)(**vars(memory) | {"step": step}))
        if step % (STEPS // SAMPLED) == 0:
            recorder.emit(timeline(step, SPAN_BLOCKS))
            recorder.emit(unit_norms(step, STEPS, UNITS))
    recorder.emit(ended)
    recorder.close()
    return folder


def main() -> None:
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        server = Server(Path(place), free_port())
        folder = long_run(server.runs)
        print(f"{STEPS:,} steps, {UNITS} units: {folder.events_path.stat().st_size / 1e6:.0f} MB", flush=True)
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        for what in ("cold server", "again"):
            if server.process is None:
                server.start()
            page = browser.new_page(viewport={"width": 1440, "height": 2600})
            begun = time.monotonic()
            page.goto(f"{server.address}/?run={folder.id}&tab=live")
            page.wait_for_selector(".rs-bar .rs-state:not(:empty)")
            bar = time.monotonic() - begun
            page.wait_for_function(SHOWN)
            print(f"{what}: run bar after {bar:.2f} s, curves and timeline after {time.monotonic() - begun:.2f} s", flush=True)
            page.close()
        browser.close()
        server.end()


if __name__ == "__main__":
    main()
