"""A server of the app for tests in a browser, and the flags of Chromium."""

from __future__ import annotations

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

from tests.support.forked_processes import ForkedApp

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
PACED = ROOT / "tests" / "support" / "paced"
"""Folder in whose processes long runs rest between steps."""
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


@dataclass
class Server:
    """The app, started as a user starts it; what it prints goes to `log`."""

    folder: Path
    port: int
    variables: dict[str, str] = field(default_factory=dict)
    is_plain: bool = False
    """It is started as a new Python, not forked from one that has imported the app, which takes
    five seconds of a core less. A program that changes modules before the app is imported, and
    one with variables that libraries read when they are, are started so.
    """
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
        paths = [str(PACED), *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        environment = os.environ | ours | self.variables
        with open(self.folder / "server.log", "ab") as log:
            start = subprocess.Popen if self.is_plain else ForkedApp
            self.process = start(
                self.command, cwd=self.folder, env=environment, stdout=log, stderr=log
            )
        end = time.monotonic() + START_SECONDS
        while not self.answers():
            assert self.process.poll() is None and time.monotonic() < end, self.log()
            time.sleep(0.1)

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


def answer(server: Server, path: str, body: dict | None = None) -> dict:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{server.address}{path}", content, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
