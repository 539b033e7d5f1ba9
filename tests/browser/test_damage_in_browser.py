"""A damaged record and a full disk, in Chromium, against the real server and the real engine: the
page says what is wrong and is never reloaded.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect

from engine.runs.record.run_folder import RunFolder
from engine.runs.summaries.listing import list_runs
from tests.browser.faults import (
    grows,
    opened,
    prepare,
    shows_every_step,
    start,
    steps_done,
    wait_until,
)
from tests.browser.screen import (
    address,
    bar,
    expect_finished,
    fill,
    note,
    open_menu,
    open_page,
    open_run,
    open_view,
    press,
    recorded_run,
    state,
    wait_for_points,
)
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.disks import small_file_system
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)


GARBAGE = [
    bytes(range(11, 256)) + b"\n",
    b'{"kind":"step_finished","run_id":"x"\n',
    bytes(512) + b"\n",
    b"\xff\xfe\xfa\n",
    b"[" * 50_000 + b"\n",
    b"y" * (50 << 20) + b"\n",
    b'{"kind":"step_finished","run_id":"x","seq":9,"time":1.0,"step":1}\n',
]


NEWER = b'{"kind":"of_a_newer_version","run_id":"x","seq":9,"time":1.0,"step":1}\n'


def spoil(folder):
    """Lines that are no records, in the middle of one."""
    with open(folder.events_path, "ab", buffering=0) as file:
        file.writelines([*GARBAGE, NEWER])


def says_what_is_damaged(page, lines):
    expect(bar(page, "about")).to_contain_text(f"{lines} lines of the record could not be read")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 MiB where the runs are."""
    with small_file_system(tmp_path / "runs", 256, "--lazy") as place:
        yield place


def fill_up(place: Path, leave: int = 0) -> Path:
    """Until so many bytes are free."""
    ballast = place / "ballast"
    with open(ballast, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while not leave or shutil.disk_usage(place).free > leave:
            file.write(bytes(1 << 16) if shutil.disk_usage(place).free >= 1 << 16 else b"\0")
    return ballast


def test_a_damaged_record_and_a_full_disk(small_disk, own):
    server, context = own
    over = recorded_run(server, 40, "Over")
    spoil(over)
    page = opened(context, server)
    prepare(page, "Short of room", 20_000)
    folder = RunFolder(server.runs / start(page))
    wait_for_points(page)

    # Lines that nobody can read, while the run is followed: the page says how many, and every step
    # is there.
    spoil(folder)
    says_what_is_damaged(page, len(GARBAGE))
    open_view(page, "log")
    expect(page.locator(".rs-log")).to_contain_text("events.jsonl is damaged")
    open_view(page, "overview")
    grows(folder, server)
    wait_for_points(page, least=steps_done(folder) - 1)
    shows_every_step(page)
    press(page, "save")
    open_view(page, "log")
    expect(page.locator(".rs-log")).to_contain_text("Checkpoint of step")
    expect(state(page)).to_have_text("Running")

    # No space left: the run waits and says what for, and the server goes on answering.
    ballast = fill_up(small_disk)
    expect(state(page)).to_have_text("Paused")
    sentence = bar(page, "sentence")
    expect(sentence).to_have_text(
        re.compile(r"The disk is full: .*record.*free at least 16 MiB .* goes on by itself;")
    )
    expect(page.locator(".rs-actions button:visible")).to_have_text(["Stop", "⋯"])
    stops = ["Stop without saving", "Stop and discard"]
    expect(open_menu(page, "stop").get_by_role("menuitem")).to_have_text(stops)
    page.keyboard.press("Escape")
    fill_up(small_disk)  # what the record had held back is free now
    refused = page.evaluate(
        """async (run) => {
      const body = JSON.stringify({name: 'x', note: 'n'.repeat(4000)});
      const headers = {'content-type': 'application/json'};
      const answer = await fetch(`/api/runs/${run}/describe`, {method: 'POST', headers, body});
      return [answer.status, (await answer.json()).error];
    }""",
        folder.id,
    )
    assert refused[0] == 409 and "No space left on device" in refused[1], refused
    open_page(page, "new")
    fill(page, "name", "Typed on a full disk")
    expect(page.locator("#start")).to_be_disabled()
    assert {run.id for run in list_runs(server.runs)} == {over.id, folder.id}, (
        "nothing half-made is left"
    )

    # With space again, it goes on without being asked, no step is missing, and what is typed next
    # is kept.
    waited_at = steps_done(folder)
    ballast.unlink()
    expect(state(page)).to_have_text("Running")
    wait_until(lambda: steps_done(folder) > waited_at, server)
    fill(page, "train.warmup_steps", "17")
    wait_until(lambda: "Typed on a full disk" in (server.runs / ".draft.json").read_text(), server)
    open_run(page, folder.id)
    wait_for_points(page, least=waited_at)
    shows_every_step(page)
    open_view(page, "log")
    expect(page.locator(".rs-log")).to_contain_text("There is room on the disk again")

    # A checkpoint that lacks the space waits as well, and Stop waits for it: the run ends with
    # everything saved.
    ballast = fill_up(small_disk, leave=8 << 20)
    press(page, "stop")
    expect(state(page)).to_have_text("Paused")
    expect(sentence).to_have_text(
        re.compile(r"checkpoint of step [\d,]+ needs .* saved and stops by itself, or stop it")
    )
    expect(open_menu(page, "stop").get_by_role("menuitem").first).to_have_text(stops[0])
    ballast.unlink()
    expect(state(page)).to_have_text("Stopped")
    expect(page.locator(".rs-log")).to_contain_text("Stopped and saved at step")

    # It cannot be resumed where there is no space, and can be where there is some.
    ballast = fill_up(small_disk)
    press(page, "resume")
    expect(note(page)).to_contain_text("No space left on device")
    ballast.unlink()
    press(page, "resume")
    expect(state(page)).to_have_text("Running")
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")

    # The same damage in a run that is over.
    page.goto(address(server, over.id))
    wait_for_points(page, least=40)
    says_what_is_damaged(page, len(GARBAGE))
    expect_finished(page)
