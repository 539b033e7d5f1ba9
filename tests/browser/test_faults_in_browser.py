"""What goes wrong around a run, in Chromium, against the real server and the real engine: tabs that
are closed, a network that goes away, a page that sleeps, two people at once, a server that is
killed, a full disk, a damaged record. No page is ever reloaded: what it says and what is typed in
it stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from engine.runs.events import RunEnded, RunStarted, StepFinished
from engine.runs.folder import RunFolder
from engine.runs.following import replay
from engine.runs.listing import list_runs
from tests.browser.conftest import WAIT_MILLISECONDS, Server, free_port
from tests.browser.test_app_in_browser import (
    fill,
    open_other_settings,
    press,
    recorded_run,
    state,
    wait_for_points,
)
from tests.support.disks import small_file_system
from tests.support.tiers import BROWSER_FLOWS

pytestmark = pytest.mark.everything(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

OFFLINE_SECONDS = float(os.environ.get("RAMSTREAM_OFFLINE_SECONDS", "8"))
STEPS = "document.querySelector('[data-figure=loss]').data[0].x"
WINDOW = {"width": 1440, "height": 900}


@pytest.fixture(scope="module")
def server(own_server):
    """Nobody else's: what is done to it here no other test should meet."""
    return own_server


def note(page):
    return page.locator(".rs-bar [data-field=note]")


def box(page, field):
    return page.locator(f"#field-{field.replace('.', '-')} :is(input, textarea)")


def open_tab(page, name):
    page.locator(f"#rs-tab-{name}-button").click()


def opened(context, server, where=""):
    """A page that knows when it is reloaded."""
    page = context.new_page()
    page.goto(f"{server.address}/{where}")
    page.wait_for_selector(".rs-verdict:not([data-tone=calm])", state="attached")
    page.evaluate("window.isTheSame = true")
    return page


def is_the_same(page):
    return page.evaluate("window.isTheSame === true")


def prepare(page, name, steps, **others):
    """The form filled for a run that lasts, without samples and evaluations."""
    page.wait_for_selector("#start:not([disabled])")
    open_other_settings(page)
    values = {
        "name": name,
        "train.steps": str(steps),
        "output.exact_match_samples": "0",
        "output.eval_every": "0",
        "output.checkpoint_every": "0",
        **others,
    }
    for field, text in values.items():
        fill(page, field, text)
    page.wait_for_timeout(500)


def start(page, button="#start"):
    page.locator(f"{button}:not([disabled])").click()
    expect(page).to_have_url(re.compile(r"run=\w+.*tab=live"))
    return re.search(r"run=([^&]+)", page.url).group(1)


def recorded_steps(folder):
    return [
        record.event
        for record in replay(folder.events_path)
        if isinstance(record.event, StepFinished)
    ]


def steps_done(folder):
    return max((event.step for event in recorded_steps(folder)), default=0)


def wait_until(condition, server, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, server.log()
        time.sleep(0.2)


def grows(folder, server):
    """The run makes three more steps."""
    before = steps_done(folder)
    wait_until(lambda: steps_done(folder) >= before + 3, server)


def shows_every_step(page):
    """No step is missing from the curve and none is there twice."""
    steps = page.evaluate(STEPS)
    assert steps == list(range(1, len(steps) + 1)), steps


@pytest.fixture
def own(browser, tmp_path):
    """Yields a server and a window of this test alone, and ends the processes of detached runs
    behind it.
    """
    server = Server(tmp_path, free_port())
    server.start()
    context = browser.new_context(viewport=WINDOW)
    context.set_default_timeout(WAIT_MILLISECONDS)
    yield server, context
    context.close()
    if server.process.poll() is None:
        server.end()
    for path in server.runs.glob("*/detached.json"):
        with contextlib.suppress(ProcessLookupError):  # as it should be
            os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)


def test_a_page_that_is_closed_offline_or_asleep_costs_a_run_nothing_and_two_may_stop_it(
    browser, server
):
    context, other = (browser.new_context(viewport=WINDOW) for _ in range(2))
    for window in (context, other):
        window.set_default_timeout(WAIT_MILLISECONDS)
    page = opened(context, server)
    prepare(page, "Faults", 20_000)
    folder = RunFolder(server.runs / start(page))
    wait_for_points(page)

    # Offline: the page says so and how old it is, and what needs the server cannot be pressed.
    open_tab(page, "train")
    fill(page, "train.warmup_steps", "17")
    page.wait_for_timeout(500)
    context.set_offline(True)
    expect(note(page)).to_contain_text("Reconnecting: the server does not answer.")
    for command in ("pause", "stop"):
        expect(page.locator(f".rs-actions [data-command={command}]")).to_be_disabled()
    expect(page.locator("#start")).to_be_disabled()
    expect(page.locator(".rs-why-not")).to_contain_text("The server does not answer")
    box(page, "name").fill("")
    box(page, "name").press_sequentially("Half typ")
    page.wait_for_timeout(1000 * OFFLINE_SECONDS)
    expect(note(page)).to_contain_text(re.compile(r"What is shown is \d+ (s|min) old"))
    done = steps_done(folder)
    context.set_offline(False)
    expect(note(page)).to_contain_text(
        re.compile(r"Connected again after \d+ (s|min); the run went on: [\d,]+ more steps?\.")
    )
    expect(box(page, "name")).to_have_value("Half typ")
    expect(box(page, "train.warmup_steps")).to_have_value("17")
    wait_until(lambda: '"Half typ"' in (server.runs / ".draft.json").read_text(), server)
    open_tab(page, "live")
    wait_for_points(page, least=done)
    shows_every_step(page)
    for command in ("pause", "stop"):
        expect(page.locator(f".rs-actions [data-command={command}]")).to_be_enabled()

    # Asleep, as the browser does it to a tab.
    devtools = context.new_cdp_session(page)
    for life in ("frozen", "active"):
        devtools.send("Page.setWebLifecycleState", {"state": life})
        if life == "frozen":
            grows(folder, server)
            time.sleep(3)
    done = steps_done(folder)
    expect(note(page)).to_contain_text(re.compile("asleep for|Connected again after"))
    wait_for_points(page, least=done)
    shows_every_step(page)
    assert is_the_same(page)

    # Every tab closed.
    page.close()
    grows(folder, server)
    page, second = (
        opened(window, server, f"?run={folder.id}&tab=live") for window in (context, other)
    )
    for each in (page, second):
        expect(state(each)).to_have_text("Running")
        expect(box(each, "train.steps")).to_have_value("20000")

    # Two people at once: one pauses while the other stops, then both stop what has been resumed.
    ask = """async ([command, seen]) => {
      const run = new URLSearchParams(location.search).get('run');
      const headers = {'content-type': 'application/json'}, body = JSON.stringify({command, seen});
      return (await fetch(`/api/runs/${run}/control`, {method: 'POST', headers, body})).status;
    }"""
    press(page, "pause")
    expect(state(second)).to_have_text("Paused")
    for each in (page, second):  # neither waits for the other's answer
        each.evaluate("document.querySelector('.rs-actions [data-command=stop]').click()")
    for each in (page, second):
        expect(state(each)).to_have_text("Stopped")
        expect(note(each)).to_be_hidden()
        assert each.evaluate(ask, ["stop", "running"]) == 200
    assert len([r for r in replay(folder.events_path) if isinstance(r.event, RunEnded)]) == 1
    sentences = {
        each.locator(".rs-bar [data-field=sentence]").inner_text() for each in (page, second)
    }
    assert len(sentences) == 1 and "can be resumed" in sentences.pop()
    for each in (page, second):
        each.evaluate("document.querySelector('.rs-actions [data-command=resume]').click()")
    for each in (page, second):
        expect(state(each)).to_have_text("Running")
    page.evaluate("document.querySelector('.rs-actions [data-command=pause]').click()")
    second.evaluate("document.querySelector('.rs-actions [data-command=stop]').click()")
    for each in (page, second):
        expect(state(each)).to_have_text("Stopped")
    assert len([r for r in replay(folder.events_path) if isinstance(r.event, RunStarted)]) == 2
    assert len([r for r in replay(folder.events_path) if isinstance(r.event, RunEnded)]) == 2
    for window in (context, other):
        window.close()


def test_a_server_that_is_killed_and_started_again(own):
    server, context = own
    page = opened(context, server)
    prepare(page, "Killed", 20_000)
    folder = RunFolder(server.runs / start(page))
    wait_for_points(page, least=3)
    press(page, "save")
    expect(page.locator(".rs-files")).to_contain_text("Checkpoint of step")
    grows(folder, server)
    open_tab(page, "train")

    # Killed while it answers an event of Gradio's: the event waits for the next server, and nothing
    # is reloaded.
    fill(page, "train.warmup_steps", "17")
    page.wait_for_timeout(500)
    server.process.send_signal(signal.SIGSTOP)
    box(page, "data.max_seq_len").press_sequentially("0")
    box(page, "data.max_seq_len").press("Tab")  # the preview is asked for
    page.wait_for_timeout(300)
    server.end()
    expect(note(page)).to_contain_text("Reconnecting")
    first = {event.step: event for event in recorded_steps(folder)}
    box(page, "name").fill("")
    box(page, "name").press_sequentially("Half typ")
    server.start()
    expect(state(page)).to_have_text("Interrupted")
    expect(note(page)).to_contain_text("The server was started again")
    saved = re.search(
        r"interrupted at step (\d+), when .* checkpoint of step (\d+)\.", note(page).inner_text()
    ).groups()
    assert int(saved[0]) == max(first) > int(saved[1])
    expect(page.locator("#start")).to_be_enabled()
    expect(box(page, "name")).to_have_value("Half typ")
    expect(box(page, "train.warmup_steps")).to_have_value("17")
    expect(page.locator(".rs-preview-head")).not_to_have_class(re.compile("rs-pending"))
    wait_until(lambda: '"Half typ"' in (server.runs / ".draft.json").read_text(), server)
    assert is_the_same(page) and page.get_by_text("Connection Lost").count() == 0

    # What is asked of Gradio works: a preset fills the form. And Resume goes on to the bit.
    page.locator("#preset input").click()
    page.get_by_role("option", name="Starter").click()
    expect(box(page, "train.warmup_steps")).to_have_value("20")
    press(page, "resume")
    expect(state(page)).to_have_text("Running")
    wait_until(lambda: steps_done(folder) > max(first), server)
    again = {event.step: event for event in recorded_steps(folder)[len(first) :]}
    both = sorted(first.keys() & again.keys())
    assert both == list(range(int(saved[1]) + 1, max(first) + 1))
    assert all(
        (first[step].loss, first[step].grad_norm) == (again[step].loss, again[step].grad_norm)
        for step in both
    )
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")

    # A detached run makes steps while no server lives, and the next one finds it.
    fill(page, "name", "Detached")
    fill(page, "train.steps", "20000")
    page.wait_for_timeout(500)
    detached = RunFolder(server.runs / start(page, "#start-detached"))
    wait_for_points(page, least=3)
    open_tab(page, "train")
    expect(page.locator("#start")).to_be_disabled()
    expect(page.locator(".rs-why-not")).to_contain_text("in a process of its own")
    server.end()
    grows(detached, server)
    done = steps_done(detached)
    server.start()
    expect(state(page)).to_have_text("Running")
    expect(note(page)).to_contain_text(
        re.compile(r"The server was started again after \d+ s\. The run went on: [\d,]+ more")
    )
    open_tab(page, "live")
    wait_for_points(page, least=done)
    shows_every_step(page)
    press(page, "pause")
    expect(state(page)).to_have_text("Paused")
    press(page, "stop")
    expect(state(page)).to_have_text("Stopped")
    expect(page.locator("#start")).to_be_enabled()
    assert is_the_same(page)

    # Ctrl-C stops and saves a run of the server's own.
    press(page, "resume")
    expect(state(page)).to_have_text("Running")
    assert server.end(signal.SIGINT) == 0, server.log()
    assert next(run for run in list_runs(server.runs) if run.id == detached.id).state == "stopped"


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
    expect(page.locator("[data-part=facts]")).to_contain_text(f"{lines} lines could not be read")


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
    expect(page.locator(".rs-log")).to_contain_text("events.jsonl is damaged")
    grows(folder, server)
    wait_for_points(page, least=steps_done(folder) - 1)
    shows_every_step(page)
    press(page, "save")
    expect(page.locator(".rs-files")).to_contain_text("Checkpoint of step")
    expect(state(page)).to_have_text("Running")

    # No space left: the run waits and says what for, and the server goes on answering.
    ballast = fill_up(small_disk)
    expect(state(page)).to_have_text("Paused")
    sentence = page.locator(".rs-bar [data-field=sentence]")
    expect(sentence).to_have_text(
        re.compile(r"The disk is full: .*record.*free at least 16 MiB .* goes on by itself;")
    )
    expect(page.locator("[data-command=stop]")).to_have_text("Stop without saving")
    for command, is_there in (
        ("stop", True),
        ("discard", True),
        ("resume", False),
        ("pause", False),
        ("save", False),
    ):
        assert page.locator(f"[data-command={command}]").is_visible() == is_there, command
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
    open_tab(page, "train")
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
    open_tab(page, "live")
    wait_for_points(page, least=waited_at)
    shows_every_step(page)
    expect(page.locator(".rs-log")).to_contain_text("There is room on the disk again")

    # A checkpoint that lacks the space waits as well, and Stop waits for it: the run ends with
    # everything saved.
    ballast = fill_up(small_disk, leave=8 << 20)
    press(page, "stop")
    expect(state(page)).to_have_text("Paused")
    expect(sentence).to_have_text(
        re.compile(r"checkpoint of step [\d,]+ needs .* saved and stops by itself, or stop it")
    )
    expect(page.locator("[data-command=stop]")).to_have_text("Stop without saving")
    ballast.unlink()
    expect(state(page)).to_have_text("Stopped")
    expect(sentence).to_have_text(re.compile(r"Stopped and saved at step"))

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
    page.goto(f"{server.address}/?run={over.id}&tab=live")
    wait_for_points(page, least=40)
    says_what_is_damaged(page, len(GARBAGE))
    expect(state(page)).to_have_text("Finished")
