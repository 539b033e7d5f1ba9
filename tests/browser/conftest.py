"""A real server in a process of its own, and a real Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.form.presets import FIRST_PRESET, PRESETS
from app.form.settings_form import shown_values
from engine.config.settings import TrainConfig
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Each window would load the list below the address bar, a page of its own, for 0.8 s of a core.
    # This list of features replaces Playwright's, of which these few matter here.
    "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup,WebUIOmniboxFullPopup,"
    "AvoidUnnecessaryBeforeUnloadCheckSync,DestroyProfileOnBrowserClose,HttpsUpgrades,"
    "HttpsFirstBalancedModeAutoEnable,MediaRouter,OptimizationHints,PaintHolding,"
    "NetworkTimeServiceQuerying,ThirdPartyStoragePartitioning",
]
START_SECONDS = 90
WAIT_MILLISECONDS = 120_000
"""A run of some steps takes a minute on a busy core. How long things take is not tested here."""


def chromium_path() -> str | None:
    """The system's Chromium, or the one that Playwright has installed."""
    from playwright.sync_api import sync_playwright

    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if path := shutil.which(name):
            return path
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


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


@dataclass
class Server:
    """The app, started as a user starts it; what it prints goes to `log`."""

    folder: Path
    port: int
    variables: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def command(self) -> list[str]:
        return [
            sys.executable,
            str(ROOT / "launch.py"),
            "--port",
            str(self.port),
            "--runs-dir",
            str(self.runs),
            "--no-browser",
        ]

    def start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | self.variables
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=environment, stdout=log, stderr=log
            )
        end = time.monotonic() + START_SECONDS
        while not self.answers():
            assert self.process.poll() is None and time.monotonic() < end, self.log()
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.address}/api/live", timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def end(self, how: int = signal.SIGKILL) -> int:
        self.process.send_signal(how)
        return self.process.wait(timeout=60)

    def log(self) -> str:
        return (self.folder / "server.log").read_text(encoding="utf-8", errors="replace")


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("app"), free_port())
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


def answer(server: Server, path: str, body: dict | None = None) -> dict:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{server.address}{path}", content, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


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
