"""A real server in a process of its own, and a real Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from app.form.presets import FIRST_PRESET, PRESETS
from app.form.settings_form import shown_values
from engine.config.settings import TrainConfig
from tests.support.browser import FLAGS, WAIT_MILLISECONDS, Server, answer, chromium_path
from tests.support.ports import free_port


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="package")
def shared_context(tmp_path_factory):
    """A browser window for all tests, with a profile on the disk: the browser keeps compiled
    scripts there, and in the process of a page that stays open. A page takes half of four seconds
    of a core then. Nothing moves without need: without a GPU, each frame is drawn by the processor.

    Closed with its folder: Playwright leaves an event loop running, under which no other test could
    start one.
    """
    from playwright.sync_api import sync_playwright

    path = chromium_path()
    if path is None:
        pytest.skip(
            "no Chromium is installed; install one, for instance by `playwright install chromium`"
        )
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=path,
            args=[*FLAGS, "--process-per-site"],
            viewport={"width": 1440, "height": 900},
            reduced_motion="reduce",
        )
        context.set_default_timeout(WAIT_MILLISECONDS)
        yield context
        context.close()


@pytest.fixture(scope="package")
def browser(shared_context):
    """The browser, for tests that need a window of their own."""
    return shared_context.browser


@pytest.fixture(scope="package")
def shared_server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("app"), free_port(), is_plain=True)
    server.start()
    yield server
    server.end()


@pytest.fixture(scope="module")
def server(shared_server):
    """One server for the files that do not need their own, with no run going on. Its folder has
    runs of files before.
    """
    yield shared_server
    make_idle(shared_server)


def make_idle(server: Server) -> None:
    """Takes every run out of the queue, ends the one that goes on, and begins a new chat: the next
    file needs Start, and an answer of the file before is not one of its own. A queued run begins
    within seconds of the end of the one before it.
    """
    answer(server, "/api/chat/new", {})
    while True:
        queued = [row["id"] for row in answer(server, "/api/runs")["queue"]["rows"]]
        active = answer(server, "/api/live")["active"]
        if not queued and active is None:
            return
        with contextlib.suppress(urllib.error.HTTPError):  # it starts or ends just now
            for each in queued:
                answer(server, f"/api/queue/{each}/remove", {})
            if active is not None:
                answer(server, f"/api/runs/{active}/control", {"command": "discard"})
        time.sleep(0.5)


@pytest.fixture(scope="module")
def own_server(tmp_path_factory):
    """A server for the tests of a file alone."""
    server = Server(tmp_path_factory.mktemp("own"), free_port())
    server.start()
    yield server
    server.end()


@pytest.fixture
def context(shared_context, server):
    """The window, with no page but one that stays open; afterwards, nothing may have gone wrong in
    it and nothing may have left the machine. What its pages kept is forgotten.
    """
    first, *_ = shared_context.pages
    first.goto(f"{server.address}/favicon.ico")
    requests, errors = [], []
    listeners = {
        "request": lambda request: requests.append(request.url),
        "weberror": lambda error: errors.append(str(error.error)),
    }
    for event, listener in listeners.items():
        shared_context.on(event, listener)
    yield shared_context
    shared_context.new_cdp_session(first).send(
        "Storage.clearDataForOrigin",
        {"origin": server.address, "storageTypes": "cookies,local_storage,indexeddb"},
    )
    shared_context.clear_permissions()
    for page in shared_context.pages:
        if page is not first:
            page.close()
    for event, listener in listeners.items():
        shared_context.remove_listener(event, listener)
    elsewhere = [url for url in requests if not url.startswith((server.address, "data:", "blob:"))]
    assert not elsewhere, "requests left the machine"
    assert not errors


@pytest.fixture
def blank(context):
    """A page for a test that goes to an address of its own."""
    return context.new_page()


@pytest.fixture
def page(blank, server):
    """The app with the starter in its form, which remembers what the test before has typed."""
    draft = {
        "preset": FIRST_PRESET,
        "shown": shown_values(TrainConfig.load(PRESETS / FIRST_PRESET)),
    }
    answer(server, "/api/check", draft)
    blank.goto(server.address)
    blank.wait_for_selector("#start:not([disabled])")
    return blank


@pytest.fixture
def own(browser, tmp_path):
    """Yields a server and a window of this test alone, and ends the processes of detached runs
    behind it.
    """
    server = Server(tmp_path, free_port())
    server.start()
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(WAIT_MILLISECONDS)
    yield server, context
    context.close()
    if server.process.poll() is None:
        server.end()
    for path in server.runs.glob("*/detached.json"):
        with contextlib.suppress(ProcessLookupError):  # as it should be
            os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
