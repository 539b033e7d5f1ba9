"""Models from the Hugging Face hub, downloaded into the hub's own cache before they are read.

The transfer reports its progress, and can be cancelled at any moment. So a separate process does it
(engine/model/hub/hub_download.py): code that looks up a name, opens a connection or waits for a
silent server can be stopped only by ending its process.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.data.sources.hub_connection import OFFLINE
from engine.errors import FitError, ModelError
from engine.helper_process import HelperProcess, ending
from engine.model.hub.hub_cache import cached_config, cached_files, cached_weights, is_offline
from engine.paths import is_path, resolve_source
from engine.progress import Progress
from engine.text import in_hours

_PROGRAM = "from engine.model.hub.hub_download import serve; serve()"
_VARIABLES = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
_ERRORS = {"ModelError": ModelError, "FitError": FitError}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
POLL_SECONDS = 0.2
"""Seconds between two moments at which the caller can cancel the transfer."""
RATE_SECONDS = 30.0
"""Seconds before now over which the rate of a download is averaged."""
KNOWN_SECONDS = 3.0
"""Seconds until the rate is known."""
SILENT_SECONDS = 10.0
"""Seconds without anything from the hub after which the progress mentions it."""
_fetched: dict[str, dict[str, Path]] = {}
"""Files that were in the cache after each source was fetched."""


def is_hub_id(source: str) -> bool:
    """Returns whether a source is the id of a model of the hub, and nothing of this machine."""
    is_id = HUB_ID.fullmatch(source) is not None and not is_path(source)
    return is_id and resolve_source(source) is None


def fetch(source: str, weights: bool, progress: Progress, check: Callable[[], None]) -> None:
    """Copies the missing files of a model from the hub into the hub's cache.

    These are the configuration, the tokenizer and, with `weights`, the weight files. Nothing is
    done for a source that is not a hub id. It is not an error if the hub does not answer but the
    cache has all that is needed.

    `check` is called several times a second until it is known whether anything must be downloaded,
    and after that `progress`. An exception from either cancels the transfer at once; downloaded
    bytes are kept. Raises ModelError for files that the hub does not provide and for a lost
    connection, and FitError if the disk has too little space.
    """
    if not is_hub_id(source):
        return
    if is_offline():
        reason: str | None = OFFLINE
    else:
        reason = _transfer(source, weights, progress, check)
    _fetched[source] = cached_files(source)
    if reason is None:
        return
    if cached_config(source) is None:
        if is_offline():
            return  # reading the configuration will report what is missing
        raise ModelError(
            f"model.source: {source!r} is neither a local folder nor a model that the hub gave "
            f"({reason}); check the name or your connection."
        )
    if weights and cached_weights(source) is None:
        raise ModelError(
            f"model.source: the weights of {source} are not in the Hugging Face cache, and the hub "
            f"did not give them ({reason}); check your connection, or give a folder that has them."
        )


def is_fetched(source: str) -> bool:
    """Returns whether a hub model can be read without another network request.

    This is so if this process has fetched the model, or has found that only the cache is available,
    and the files found then still exist.
    """
    files = _fetched.get(source)
    if not files:
        return False
    return all(file.exists() for file in files.values())


def _transfer(
    source: str, weights: bool, progress: Progress, check: Callable[[], None]
) -> str | None:
    """Returns None when all files are in the cache, or else the reason why the hub could not be
    reached.
    """
    pace: _Pace | None = None
    with contextlib.closing(HelperProcess(_PROGRAM, _VARIABLES, quiet=True)) as process:
        # If the process has already ended, the code that reads its answer below notices it.
        with contextlib.suppress(BrokenPipeError):
            process.send(json.dumps({"source": source, "weights": weights}).encode() + b"\n")
        while True:
            answer = process.next_line(POLL_SECONDS)
            if answer is not None and "done" in answer:
                if pace is None:
                    pace = _Pace()
                pace.take(answer)
            elif answer is not None:
                reason = _reason(answer, process, source)
                if reason is None and pace is not None:
                    progress(pace.total, pace.total, f"{pace.of} of {pace.of} files")
                return reason
            if pace is None:
                check()
            else:
                progress(pace.done, pace.total, pace.text())


def _reason(answer: dict[str, Any], process: HelperProcess, source: str) -> str | None:
    """Returns the reason in the last answer, or None if all files have arrived. If the answer is an
    error, raises it.
    """
    if "error" in answer:
        raise _ERRORS[answer["error"]](answer["text"])
    if "finished" in answer:
        return None
    if "unreachable" in answer:
        return answer["unreachable"]
    raise ModelError(
        f"model.source: the process that downloads {source} ended ({ending(process.wait())}); try "
        "again: what has come is kept."
    )


class _Pace:
    """A pace computes the progress and the rate of a download from its process's reports.

    `done` stays below `total` until all files are in place. Both are in bytes.
    """

    def __init__(self) -> None:
        self.done = 0
        self.total = 0
        self.files = 0
        self.of = 0
        """The total number of files."""
        self._began = time.monotonic()
        self._grew = self._began
        """The time when bytes last arrived."""
        self._seen: deque[tuple[float, int]] = deque()

    def take(self, answer: dict[str, int]) -> None:
        now = time.monotonic()
        self.total = answer["total"]
        self.files = answer["files"]
        self.of = answer["of"]
        done = max(self.done, min(answer["done"], self.total - 1))
        if done > self.done:
            self._grew = now
        self.done = done
        self._seen.append((now, done))
        while now - self._seen[0][0] > RATE_SECONDS:
            self._seen.popleft()

    def text(self) -> str:
        """Returns the state as text, such as `3 of 7 files, about 12 min left`."""
        return f"{self.files} of {self.of} files{self._left(time.monotonic())}"

    def _left(self, now: float) -> str:
        if now - self._grew >= SILENT_SECONDS:
            return f", nothing has come for {in_hours(now - self._grew)}"
        began, first = self._seen[0]
        came = self.done - first
        if now - self._began < KNOWN_SECONDS or came <= 0:
            return ""
        seconds = (self.total - self.done) * (now - began) / came
        return f", about {in_hours(max(1, seconds))} left"
