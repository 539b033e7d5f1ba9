"""A run on two ranks: it is started, watched, stopped and resumed as any other. In Chromium, on the
real server and engine; the ranks are processes on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from app.form.settings_form import shown_values
from app.session.detached import PROCESS_FILE
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import MemorySampled, RunEnded, StepFinished, StepTimeline
from engine.runs.record.following import EVENTS_FILE, replay
from engine.runs.record.timeline_index import of_rank, ranks_in
from tests.browser.screen import OPENED_RUN, bar, expect_finished, open_view, press, run_of, state
from tests.support.browser import WAIT_MILLISECONDS, answer
from tests.support.folders import make_config
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

STARTS = 60_000
"""ms in which processes have started and found each other."""
VALUES = {
    "name": "Together",
    "engine.gpus": 2,
    "train.steps": 100_000,
    "train.schedule": "constant",
    "output.timeline_every": 5,
    "output.checkpoint_every": 0,
    "output.eval_every": 0,
}
ROWS = "document.querySelector('[data-figure=timeline]').layout.yaxis.ticktext"
DRAWN = ROWS.replace(".layout.", ".layout?.")


def rows(page: Page) -> list[str]:
    return page.evaluate(ROWS)[::-1]


def choose(page: Page, rank: str, expected: list[str]) -> None:
    page.get_by_label("Rank", exact=True).select_option(rank)
    page.wait_for_function(f"{ROWS}.slice().reverse().join() === '{','.join(expected)}'")


def events(runs: Path, run_id: str, kind: type) -> list:
    record = replay(runs / run_id / EVENTS_FILE)
    return [each.event for each in record if isinstance(each.event, kind)]


@pytest.fixture
def runs(server):
    """The runs of the server, which end with the test: their processes would outlive it."""
    yield server.runs
    for file in server.runs.glob(f"*/{PROCESS_FILE}"):
        with contextlib.suppress(ProcessLookupError):  # expected: it has ended
            os.kill(json.loads(file.read_text(encoding="utf-8"))["pid"], signal.SIGKILL)


def test_two_ranks_are_seen_stopped_and_resumed_by_one(blank, server, runs, tmp_path):
    page = blank
    shown = shown_values(make_config(tmp_path, **VALUES))
    answer(server, "/api/check", {"preset": None, "shown": shown})
    page.goto(server.address)
    page.locator("#start:not([disabled])").click()
    expect(page).to_have_url(OPENED_RUN)
    expect(bar(page, "name")).to_have_text("Together")
    run_id = run_of(page)
    expect(state(page)).to_have_text("Running", timeout=STARTS)
    expect(page.locator(".rs-bar [data-part=badges]")).to_have_text("Detached2 processes")

    # Both ranks' lanes, one by one and together.
    open_view(page, "machine")
    lanes = ["Weights in", "Compute", "Gradients out", "CPU optimizer", "Exchange"]
    page.locator("[data-figure=timeline]").scroll_into_view_if_needed()
    page.wait_for_function(f"{DRAWN}?.length === {len(lanes)}")
    assert rows(page) == lanes
    choose(page, "all", ["0 Compute", "0 Exchange", "1 Compute", "1 Exchange"])
    expect(page.locator("[data-caption=timeline]")).to_contain_text("on 2 ranks")
    bars = page.locator(".rs-timeline canvas")
    expect(bars).to_have_attribute("data-bars", re.compile(r"[1-9]\d+"))
    choose(page, "1", lanes)
    expect(page.locator("[data-timeline=colors]")).to_contain_text("Exchange")
    table = page.locator("[data-part=ranks]")
    expect(table.locator("tbody tr")).to_have_count(2)
    expect(table).to_contain_text("2 processes compute each step together")

    press(page, "pause")
    expect(state(page)).to_have_text("Paused")
    press(page, "resume")
    expect(state(page)).to_have_text("Running")
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")
    (ended,) = events(runs, run_id, RunEnded)
    assert ended.state == "stopped"
    last = events(runs, run_id, StepFinished)[-1].step
    timelines = events(runs, run_id, StepTimeline)
    assert all(ranks_in(timeline) == 2 for timeline in timelines)
    assert of_rank(timelines[-1], 1).waits
    assert all(len(sample.ranks) == 2 for sample in events(runs, run_id, MemorySampled))

    # One process goes on from what two have saved.
    command = [sys.executable, str(PROGRAM_ROOT / "launch.py"), "train", "--resume", run_id]
    command += ["--runs-dir", str(runs), "--set", "engine.gpus=1"]
    command += ["--set", f"train.steps={last + 5}"]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"TQDM_DISABLE": "1"})
    expect_finished(page)
    alone = [each for each in events(runs, run_id, StepTimeline) if each.step > last]
    assert alone and all(ranks_in(timeline) == 1 for timeline in alone)
    steps = [each.step for each in events(runs, run_id, StepFinished)]
    assert steps == list(range(1, last + 6))
    expect(page.get_by_label("Rank", exact=True)).to_be_hidden()
    page.wait_for_function(f"{ROWS}.length === 4")
    expect(table).to_be_hidden()
