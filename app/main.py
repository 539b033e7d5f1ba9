"""`serve`, which `launch.py` calls: session, page and server put together, from their start to
their end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
import webbrowser
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvicorn

from app.form.presets import FIRST_PRESET, read_presets
from app.pages.checker import Checker
from app.pages.page import build_page
from app.pages.theme import css_variables, make_theme
from app.session.session import Session
from app.web.connections import server_config
from app.web.guard import WILDCARD_HOSTS, GuardPolicy
from app.web.login import resolve_login, tls_options
from app.web.opening import read_ahead
from app.web.server import build_app
from engine.errors import RamstreamError

LOGIN_KEY_FILE = ".login.key"
WARM_UP_PAUSE = 5.0
"""Seconds from a page's first request until it shows everything, and some more."""


def serve(
    host: str = "127.0.0.1",
    port: int = 7860,
    login: bool | str | None = None,
    runs_dir: str | os.PathLike[str] = "runs",
    open_browser: bool = True,
    tls: tuple[Path, Path] | None = None,
) -> None:
    """Serve the app until Ctrl-C; a run that is going on is then stopped and saved (a second Ctrl-C
    leaves at once).

    `login`: "user:password", True to ask in the terminal, else what RAMSTREAM_LOGIN says. `tls`:
    files of a certificate (with its chain) and its key, to serve by https. Raises RamstreamError
    for an address that others can reach without a login, for one that cannot be used, and for files
    that are no certificate and key.
    """
    encryption = {} if tls is None else tls_options(*tls)
    runs = Path(runs_dir).expanduser().resolve()
    policy = GuardPolicy.for_bind(host, resolve_login(login, host, runs / LOGIN_KEY_FILE))
    session = Session(runs)
    checker = Checker(session)
    app = build_app(
        session,
        checker,
        build_page(session, checker),
        policy,
        theme=make_theme(),
        css=css_variables(),
    )
    address = f"http{'s' if tls else ''}://{_shown_host(host)}:{port}/"
    link = f"{address}?token={policy.login.link_token}" if policy.login is not None else None

    async def started() -> None:
        _announce(address, link, open_browser)
        await read_ahead(session)  # while the browser starts

    server = _Server(server_config(app, host, port, **encryption), started)
    threading.Thread(target=_warm_up, args=(session,), name="warm-up", daemon=True).start()
    # what is here stays: looking for garbage in it would take a third of the time of reading a long
    # record
    gc.freeze()
    try:
        server.run()
    except SystemExit:
        raise RamstreamError(
            f"--port {port}: {host}:{port} cannot be used; is another program there? Choose "
            "another port."
        ) from None
    except KeyboardInterrupt:
        pass
    try:
        end(session)
    except KeyboardInterrupt:
        os._exit(130)


def end(session: Session) -> None:
    """What is left to do once nobody is served any more. A KeyboardInterrupt ends the wait."""
    session.queue.close()  # first: nothing may start while the jobs are waited for
    session.jobs.close()
    if session.active_id is not None:
        print(
            f"Stopping and saving {session.active_id}; press Ctrl-C again to leave at once.",
            flush=True,
        )
    session.close()


def _warm_up(session: Session) -> None:
    """Prepare for the first Start, so that a person does not wait for torch; not while the first
    page is loaded, which would take twice as long.
    """
    session.was_opened.wait()
    time.sleep(WARM_UP_PAUSE)
    preset = read_presets().get(FIRST_PRESET)
    if preset is not None and preset.config is not None:
        with contextlib.suppress(RamstreamError):
            session.engine.warm_up(preset.config.model)
            gc.freeze()  # what has been imported


class _Server(uvicorn.Server):
    """Runs `on_started` once the port is open, beside what it serves."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], Coroutine[Any, Any, None]]):
        super().__init__(config)
        self._on_started = on_started
        self._beside: asyncio.Task[None] | None = None

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._beside = asyncio.create_task(self._on_started())


def _announce(address: str, link: str | None, open_browser: bool) -> None:
    print(f"Ramstream is at {address} (Ctrl-C stops it)", flush=True)
    if link is not None:
        print(f"Open {link} to log in without the password; the link works once.", flush=True)
    if open_browser:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def _shown_host(host: str) -> str:
    if host in WILDCARD_HOSTS:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
