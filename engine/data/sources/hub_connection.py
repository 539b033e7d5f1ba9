"""Whether the hub can be reached. Without a connection to the hub, `datasets` repeats a request for
23 seconds before it fails or uses its cache.

So the connection is tried first, with one request. Where there is none, `datasets` uses its cache
alone, and reports at once whether the data set is there.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from engine.errors import DataError, first_line

Loaded = TypeVar("Loaded")

PATIENCE_SECONDS = 4.0
"""Seconds within which the hub must answer."""
GLANCE_SECONDS = 0.3
"""Seconds that a mere check waits for the answer."""
OFFLINE = "offline mode is on: HF_HUB_OFFLINE"
KNOWN_SECONDS = 10.0
"""Seconds for which it is known whether the hub answered, so that it is not asked again."""


def from_hub_or_cache(source: str, load: Callable[[], Loaded]) -> Loaded:
    """Returns what `load` returns, a function that opens the hub's data set `source` through
    `datasets`.

    Without a connection, `load` finds only what is in the cache of `datasets`. Raises DataError if
    the data set is not there. All other errors of `load` are passed on.
    """
    reason = why_cut_off()
    if reason is None:
        return load()
    try:
        with _CACHE_ALONE():
            return load()
    except ConnectionError:
        raise DataError(
            f"This computer cannot reach Hugging Face ({reason}), and the data set {source} is not "
            "downloaded yet."
        ) from None


def why_cut_off() -> str | None:
    """Returns why the hub cannot be reached, as a part of a sentence, or None if it answers.

    It takes at most `PATIENCE_SECONDS`.
    """
    import datasets

    if datasets.config.HF_HUB_OFFLINE:
        return OFFLINE
    return _CONNECTION.why_cut_off()


def why_cut_off_lately() -> str | None:
    """Returns why the hub could not be reached when it was last asked, or None. It is asked anew
    where that is old, but not waited for much longer than `GLANCE_SECONDS`, since a page is checked
    at each pause in typing. Offline mode is ignored.
    """
    return _CONNECTION.why_cut_off_lately()


class _Connection:
    """A connection remembers for some seconds whether the hub answered."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._asked: float | None = None
        """Time of the monotonic clock at which the hub was last asked."""
        self._reason: str | None = None

    def why_cut_off(self) -> str | None:
        with self._asking:
            if self._asked is None or time.monotonic() - self._asked > KNOWN_SECONDS:
                self._reason = _ask()
                self._asked = time.monotonic()
            return self._reason

    def why_cut_off_lately(self) -> str | None:
        asking = threading.Thread(target=self.why_cut_off, name="hub-connection", daemon=True)
        asking.start()
        asking.join(GLANCE_SECONDS)
        return self._reason


_CONNECTION = _Connection()


def _ask() -> str | None:
    """Asks the hub for its first page; returns why it did not answer, or None."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # Looking up a name has no time limit of its own, so another thread waits for it.
    threading.Thread(
        target=lambda: answers.put(_request()), name="hub-connection", daemon=True
    ).start()
    try:
        return answers.get(timeout=PATIENCE_SECONDS)
    except queue.Empty:
        return f"it gave no answer within {PATIENCE_SECONDS:.0f} s"


def _request() -> str | None:
    from huggingface_hub import constants, get_session

    try:
        # The library's own client knows the proxies and certificates of this machine.
        answer = get_session().head(
            constants.ENDPOINT, timeout=PATIENCE_SECONDS, follow_redirects=False
        )
    except Exception as error:  # noqa: BLE001  every error means that there is no connection
        return _failure_text(error)
    if answer.status_code >= 500:
        return f"it answered {answer.status_code}"
    return None


def _failure_text(error: BaseException) -> str:
    """Returns why a request failed, as a part of a sentence."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return "its name cannot be looked up; this machine may be offline"
        if isinstance(cause, ConnectionRefusedError):
            return "it refuses connections"
        cause = cause.__cause__ or cause.__context__
    return first_line(error)


class _CacheAlone:
    """A context in which `datasets` makes no request and uses only its cache."""

    def __init__(self) -> None:
        self._switching = threading.Lock()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        import datasets

        # `datasets` has no argument for this. Its setting belongs to the process, so one thread at
        # a time changes it. Another thread that uses the hub meanwhile has no connection either.
        with self._switching:
            datasets.config.HF_HUB_OFFLINE = True
            try:
                yield
            finally:
                datasets.config.HF_HUB_OFFLINE = False


_CACHE_ALONE = _CacheAlone()
