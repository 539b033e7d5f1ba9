"""`serve`, which `launch.py` calls, connects session, page and server and runs them until the
program ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from app.form.presets import FIRST_PRESET, read_presets
from app.login.clients import Proxies
from app.login.login import LOGIN_VARIABLE, resolve_login, tls_options
from app.pages.checker import Checker
from app.pages.page import build_page
from app.pages.theme import css_variables, make_theme
from app.session.session import Session
from app.web.connections import server_config
from app.web.guard import WILDCARD_HOSTS, GuardPolicy
from app.web.opening import read_ahead
from app.web.server import build_app
from engine.errors import RamstreamError

LOGIN_KEY_FILE = ".login.key"
WARM_UP_PAUSE = 5.0
"""The warm-up begins this many seconds after a page's first request. By then the page is complete.
"""


@dataclass(frozen=True)
class Address:
    """An `Address` is the host and port on which the server listens, and any certificate."""

    host: str = "127.0.0.1"
    port: int = 7860
    tls: tuple[Path, Path] | None = None
    """These are the files of a certificate (with its chain) and of its key, for serving over https.
    """

    proxies: tuple[str, ...] = ()
    """Requests are passed on to the server by proxies with these addresses or networks."""

    @property
    def url(self) -> str:
        """Returns the URL under which a browser on this machine reaches the server."""
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{self._shown_host}:{self.port}/"

    @property
    def _shown_host(self) -> str:
        if self.host in WILDCARD_HOSTS:
            return "127.0.0.1"
        is_ipv6 = ":" in self.host
        return f"[{self.host}]" if is_ipv6 else self.host


DEFAULT_ADDRESS = Address()


def serve(
    address: Address = DEFAULT_ADDRESS,
    login: bool | str | None = None,
    runs_dir: str | os.PathLike[str] = "runs",
    open_browser: bool = True,
) -> None:
    """Serves the app until Ctrl-C. A run that is active then is stopped and saved; a second Ctrl-C
    ends the program at once.

    `login` is "user:password", or True to ask in the terminal; without it, the environment variable
    RAMSTREAM_LOGIN applies. Raises RamstreamError if others can reach the address, directly or by
    way of a proxy, and no login is set, if the address cannot be used, and if the files are not a
    certificate and its key.
    """
    family, place = _resolved(address)
    encryption: dict[str, Any] = {} if address.tls is None else tls_options(*address.tls)
    runs = Path(runs_dir).expanduser().resolve()
    proxies = Proxies.named(address.proxies)
    policy = GuardPolicy.for_bind(
        address.host,
        resolve_login(login, address.host, runs / LOGIN_KEY_FILE, address.port),
        proxies,
    )
    if proxies and policy.login is None:
        raise RamstreamError(
            "--proxy: other machines reach the app through a proxy, so it needs a login; add "
            f"--login or set {LOGIN_VARIABLE}."
        )
    _refuse_if_unusable(address, family, place)
    session = Session(runs)
    checker = Checker(session)
    app = build_app(
        session,
        checker,
        build_page(session, checker, has_login=policy.login is not None),
        policy,
        theme=make_theme(),
        css=css_variables(),
    )
    link = None
    if policy.login is not None:
        link = f"{address.url}?token={policy.login.link_token}"

    async def started() -> None:
        _announce(address.url, link, open_browser)
        await read_ahead(session)  # while the browser starts

    server = _Server(server_config(app, address.host, address.port, **encryption), started)
    threading.Thread(target=_warm_up, args=(session,), name="warm-up", daemon=True).start()
    # All objects that exist now stay until the end. The garbage collector skips them from here on:
    # scanning them would take a third of the time of reading a long record.
    gc.freeze()
    _run_until_ctrl_c(server, address)
    try:
        end(session)
    except KeyboardInterrupt:
        # A second Ctrl-C exits at once: `os._exit` waits for no thread and runs no finalizer.
        os._exit(130)


def end(session: Session) -> None:
    """Closes the queue, the jobs and the active run after the server has stopped. It waits for
    them; a KeyboardInterrupt ends the wait.
    """
    # The queue is closed first, so that it starts nothing while the jobs are being closed.
    session.queue.close()
    session.jobs.close()
    if session.active_id is not None:
        print(
            f"Stopping and saving {session.active_id}; press Ctrl-C again to leave at once.",
            flush=True,
        )
    session.close()


def _resolved(address: Address) -> tuple[int, Any]:
    """Returns the family and the socket address of an address. Raises RamstreamError for a host
    that has none.
    """
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError):
        raise RamstreamError(_no_host(address.host)) from None
    family, _, _, _, place = found[0]
    return family, place


def _refuse_if_unusable(address: Address, family: int, place: Any) -> None:
    """Raises RamstreamError, which blames the host or the port, if the server could not listen
    there.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # The server sets this as well, so that a port is free as soon as its last server has ended.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
        except OSError as error:
            raise RamstreamError(_why_unusable(address, error)) from None


def _why_unusable(address: Address, error: OSError) -> str:
    port = address.port
    if error.errno == errno.EADDRINUSE:
        return f"--port {port}: another program uses it already; choose another port."
    if error.errno == errno.EACCES:
        return f"--port {port}: this user may not use it; choose one from 1024 on."
    return _no_host(address.host)


def _no_host(host: str) -> str:
    return (
        f"--host {host}: this is no address of this machine; leave --host out to listen on "
        "127.0.0.1."
    )


def _run_until_ctrl_c(server: uvicorn.Server, address: Address) -> None:
    """Runs the server until Ctrl-C. Raises RamstreamError if the port cannot be used."""
    try:
        server.run()
    except SystemExit:  # uvicorn exits if it cannot bind the port
        raise RamstreamError(
            f"--port {address.port}: {address.host}:{address.port} cannot be used; is another "
            "program there? Choose another port."
        ) from None
    except KeyboardInterrupt:
        pass


def _warm_up(session: Session) -> None:
    """Loads what the first Start needs, so that the user need not wait for torch.

    It begins only after the first page was opened: loading both at once would double the time that
    the page takes.
    """
    session.was_opened.wait()
    time.sleep(WARM_UP_PAUSE)
    preset = read_presets().get(FIRST_PRESET)
    if preset is not None and preset.config is not None:
        with contextlib.suppress(RamstreamError):
            session.engine.warm_up(preset.config.model)
            gc.freeze()  # the imported modules stay, too


class _Server(uvicorn.Server):
    """A server that runs `on_started` as a task once its port is open."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], Coroutine[Any, Any, None]]):
        super().__init__(config)
        self._on_started = on_started
        # The event loop holds only weak references to its tasks, so this one is kept here.
        self._beside: asyncio.Task[None] | None = None

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._beside = asyncio.create_task(self._on_started())


def _announce(url: str, link: str | None, open_browser: bool) -> None:
    print(f"Ramstream is at {url} (Ctrl-C stops it)", flush=True)
    if link is not None:
        print(f"Open {link} to log in without the password; the link works once.", flush=True)
    if open_browser:
        # The call may block until the browser has started, and the event loop must not block.
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
