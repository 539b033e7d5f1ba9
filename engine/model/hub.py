"""Models of the Hugging Face hub are brought into the hub's own cache before they are read.

The transfer tells its progress, and is given up at once when that is asked for. So a process of its
own does it (engine/model/hub_download.py): a program that looks up a name, opens a connection or
waits for a silent server can only be stopped by ending its process.
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

from engine.errors import FitError, ModelError
from engine.helper_process import HelperProcess, ending
from engine.model.hub_cache import cached_config, cached_files, cached_weights, is_offline
from engine.paths import resolve_source
from engine.progress import Progress
from engine.words import in_hours

_PROGRAM = "from engine.model.hub_download import serve; serve()"
_VARIABLES = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
_ERRORS = {"ModelError": ModelError, "FitError": FitError}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
LOOK_SECONDS = 0.2
"""The caller is asked this often whether to give up."""
RATE_SECONDS = 30.0
"""The rate of a download is that of its last seconds, this many."""
KNOWN_SECONDS = 3.0
"""The rate is unknown before this time has passed."""
SILENT_SECONDS = 10.0
"""A hub that sends nothing for this long is mentioned."""
_fetched: dict[str, dict[str, Path]] = {}
"""After a source was fetched, the cache had these files of it."""


def fetch(source: str, weights: bool, progress: Progress, check: Callable[[], None]) -> None:
    """Brings the missing files of a hub model into the hub's cache.

    These are configuration and tokenizer and, with `weights`, the safetensors. A source that is no
    hub id is left alone. A hub that does not answer is no error where the cache has what is needed.

    `check` is called until it is known whether anything is to be downloaded, and then `progress`,
    both several times a second. What they raise gives up at once, and what has come is kept. Raises
    ModelError for what the hub does not give and for a lost connection, FitError where the disk has
    too little space.
    """
    if resolve_source(source) is not None or not _HUB_ID.fullmatch(source):
        return
    if is_offline():
        reason: str | None = "offline mode is on: HF_HUB_OFFLINE"
    else:
        reason = _transfer(source, weights, progress, check)
    _fetched[source] = cached_files(source)
    if reason is None:
        return
    if cached_config(source) is None:
        if is_offline():
            return  # whoever reads the configuration says what is missing
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
    """Tells whether nobody needs to be asked for a hub model again.

    So it is when this process has fetched it, or found that the cache has to do, and what it found
    is still there.
    """
    files = _fetched.get(source)
    if not files:
        return False
    return all(file.exists() for file in files.values())


def _transfer(
    source: str, weights: bool, progress: Progress, check: Callable[[], None]
) -> str | None:
    """Returns None when all is in the cache, else why the hub could not be asked."""
    pace: _Pace | None = None
    with contextlib.closing(HelperProcess(_PROGRAM, _VARIABLES, quiet=True)) as process:
        # A process that has ended already is told from its answer below.
        with contextlib.suppress(BrokenPipeError):
            process.send(json.dumps({"source": source, "weights": weights}).encode() + b"\n")
        while True:
            answer = process.next_line(LOOK_SECONDS)
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
                progress(pace.done, pace.total, pace.words())


def _reason(answer: dict[str, Any], process: HelperProcess, source: str) -> str | None:
    """Returns what the last answer gives as a reason, None where all has come; raises its error."""
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
    """A pace tells how far a download is and how fast, from what its process says.

    `done` stays below `total` until all is in its place. Both are bytes.
    """

    def __init__(self) -> None:
        self.done = 0
        self.total = 0
        self.files = 0
        self.of = 0
        """There are this many files in all."""
        self._began = time.monotonic()
        self._grew = self._began
        """Something came at this time for the last time."""
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

    def words(self) -> str:
        """Returns the state in words, such as `3 of 7 files, about 12 min left`."""
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
