"""`serve`, which `launch.py` calls, connects session, page and server and runs them until the
program ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import uvicorn

from app.application import build_app
from app.form.presets import FIRST_PRESET, read_presets
from app.pages.frame.opening import read_ahead
from app.pages.frame.page import build_page
from app.pages.new.checker import Checker
from app.pages.serve.serve_run import serve_run
from app.server.address import Address, refuse_unusable
from app.server.announcement import announce
from app.server.api_key import KEY_FILE, ApiKey
from app.server.clients import Proxies
from app.server.connections import SHUTDOWN_SECONDS, Connection, server_config
from app.server.guard import GuardPolicy
from app.server.links import publish, withdraw
from app.server.login import resolve_login, tls_options
from app.session.containers import ends_with_this_process, stop_detached, wait_for_end
from app.session.data_in import DataIn, DataOptions
from app.session.serving import Serving
from app.session.session import Session
from app.shared.theme import css_variables, make_theme
from engine.errors import RamstreamError
from engine.paths import named_folder
from engine.runs.record import runs_root
from engine.tools.cli.end_signals import EndSignals, write_line

LOGIN_KEY_FILE = ".login.key"
WARM_UP_PAUSE = 5.0
"""Seconds from a page's first request to the warm-up. By then the page is complete."""


DEFAULT_ADDRESS = Address()


def serve(
    address: Address = DEFAULT_ADDRESS,
    login: bool | str | None = None,
    runs_dir: str | os.PathLike[str] = "runs",
    open_browser: bool = True,
    data_options: DataOptions | None = None,
    served_run: str | None = None,
) -> None:
    """Serves the app until a signal ends it (`engine.tools.cli.end_signals`). A run that is active
    then is stopped and saved; a second Ctrl-C ends the program at once. The model of `served_run`
    answers programs from the start.

    `login` is as for `resolve_login`. Raises RamstreamError if other machines can reach the
    address, directly or by way of a proxy, and there is no password, if the address cannot be used,
    if runs cannot be kept in `runs_dir`, and if the files are not a certificate and its key.
    """
    refuse_unusable(address)
    encryption: dict[str, Any] = {} if address.tls is None else tls_options(*address.tls)
    runs = named_folder(os.fspath(runs_dir))
    proxies = Proxies.named(address.proxies)
    runs_root.refuse_unusable(runs)
    resolved = resolve_login(
        login, address.host, runs / LOGIN_KEY_FILE, address.port, bool(proxies)
    )
    api_key = ApiKey(runs / KEY_FILE)
    policy = GuardPolicy.for_bind(address.host, resolved, proxies, api_key)
    data = DataIn.of_runs(runs, data_options)
    data.uploads.remove_leftovers()
    session = Session(runs)
    serving = Serving(session)
    with EndSignals(lambda _, is_urgent: session.stop(is_urgent)) as signals:
        checker = Checker(session)
        app = build_app(
            session,
            checker,
            build_page(session, checker, has_folders=bool(data.folders.roots)),
            policy,
            data,
            serving,
            theme=make_theme(),
            css=css_variables(),
        )

        async def started() -> None:
            if policy.login is not None:
                publish(policy.login.links, runs, address.url, address.port)
            announce(policy.login, address.url, runs, open_browser)
            if served_run is not None:
                await server.ends_on_error(serve_run(serving, served_run, address.url, api_key))
            await read_ahead(session)  # while the browser starts

        config = server_config(app, address.host, address.port, **encryption)
        threading.Thread(target=_warm_up, args=(session,), name="warm-up", daemon=True).start()
        # All objects that exist now stay until the end. The garbage collector skips them from here
        # on: scanning them would take a third of the time of reading a long record.
        gc.freeze()
        server = _Server(config, started, serving, signals)
        try:
            _run(server, address)
        finally:
            if policy.login is not None:
                withdraw(policy.login.links, runs, address.port)
        end(session)
    if server.error is not None:
        raise server.error


def end(session: Session) -> None:
    """Closes the queue, the jobs and the active run after the server has stopped, and waits for
    them. In a container it does so with runs in processes of their own, too.
    """
    detached = stop_detached(session.runs_dir) if ends_with_this_process() else []
    for run_id in filter(None, (session.active_id, *(folder.id for folder in detached))):
        write_line(f"Stopping and saving {run_id}; press Ctrl-C again to leave at once.")
    session.stop()
    session.jobs.close()
    session.close()
    wait_for_end(detached)


def _run(server: uvicorn.Server, address: Address) -> None:
    """Runs the server until a signal ends it. Raises RamstreamError if the port cannot be used."""
    try:
        server.run()
    except SystemExit:  # uvicorn exits if it cannot bind the port
        raise RamstreamError(
            f"--port {address.port}: {address.host}:{address.port} cannot be used; is another "
            "program there? Choose another port."
        ) from None


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
    """A server that runs `on_started` as a task once its port is open, and ends all streams when it
    stops. It stops at the first of `signals`.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_started: Callable[[], Coroutine[Any, Any, None]],
        serving: Serving,
        signals: EndSignals,
    ):
        super().__init__(config)
        self.error: RamstreamError | None = None
        """Why the server ended by itself."""
        self._on_started = on_started
        self._serving = serving
        self._signals = signals
        # The event loop holds only weak references to its tasks, so this one is kept here.
        self._beside: asyncio.Task[None] | None = None

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._beside = asyncio.create_task(self._on_started())

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn would raise each signal again once it has stopped, and SIGTERM would end the
        # program before the run is saved.
        yield

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._signals.first is not None

    async def ends_on_error(self, work: Awaitable[None]) -> None:
        """Waits for `work`; the server ends if it raises RamstreamError."""
        try:
            await work
        except RamstreamError as error:
            self.error = error
            self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        # Programs that wait for an answer are told first; the server would wait for them.
        ending = asyncio.ensure_future(asyncio.to_thread(self._serving.stop))
        await asyncio.wait({ending}, timeout=SHUTDOWN_SECONDS)
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.end_stream()
        await super().shutdown(sockets)
