"""Models of the Hugging Face hub, brought into the hub's own cache before they are read: with
progress, and given up at once when that is asked for.

The transfer is done by a process of its own (engine/model/hub_download.py): names that are looked
up, connections that are opened and servers that say nothing can only be given up together with the
process that waits for them.
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
"""How often it is asked whether to give up."""
RATE_SECONDS, KNOWN_SECONDS, SILENT_SECONDS = 30.0, 3.0, 10.0
"""The rate is that of so many seconds, and unknown for the first few; a hub that sends nothing for
so long is told.
"""
_fetched: dict[str, dict[str, Path]] = {}
"""By source, the files that the cache had afterwards."""


def fetch(source: str, weights: bool, progress: Progress, check: Callable[[], None]) -> None:
    """Bring the files of a hub model that are not in the hub's cache yet there: configuration and
    tokenizer and, with `weights`, its safetensors. A source that is no hub id is left alone, and so
    is a hub that does not answer where the cache has what is needed.

    `progress` is called several times a second where anything is to come, and `check` until that is
    known; what they raise gives up at once, and what has come is kept. Raises ModelError for what
    the hub does not give and for a lost connection, FitError where the disk has too little space.
    """
    if resolve_source(source) is not None or not _HUB_ID.fullmatch(source):
        return
    reason = (
        "offline mode is on: HF_HUB_OFFLINE"
        if is_offline()
        else _transfer(source, weights, progress, check)
    )
    _fetched[source] = cached_files(source)
    if reason is None or (
        is_offline() and cached_config(source) is None
    ):  # who reads the configuration tells the latter
        return
    if cached_config(source) is None:
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
    """Whether this process has fetched a hub model, or found that the cache has to do, and what it
    found is still there: then nobody is asked for it again.
    """
    files = _fetched.get(source)
    return bool(files) and all(file.exists() for file in files.values())


def _transfer(
    source: str, weights: bool, progress: Progress, check: Callable[[], None]
) -> str | None:
    """None when all is in the cache, else why the hub could not be asked."""
    pace: _Pace | None = None
    with contextlib.closing(HelperProcess(_PROGRAM, _VARIABLES, quiet=True)) as process:
        with contextlib.suppress(BrokenPipeError):  # how it ended is told below
            process.send(json.dumps({"source": source, "weights": weights}).encode() + b"\n")
        while True:
            answer = process.next_line(LOOK_SECONDS)
            if answer is not None and "done" in answer:
                pace = pace or _Pace()
                pace.take(answer)
            elif answer is not None:
                return _ended(answer, process, source, pace, progress)
            if pace is None:
                check()
            else:
                progress(pace.done, pace.total, pace.words())


def _ended(
    answer: dict[str, Any],
    process: HelperProcess,
    source: str,
    pace: _Pace | None,
    progress: Progress,
) -> str | None:
    if "error" in answer:
        raise _ERRORS[answer["error"]](answer["text"])
    if "finished" in answer:
        if pace is not None:
            progress(pace.total, pace.total, f"{pace.of} of {pace.of} files")
        return None
    if "unreachable" in answer:
        return answer["unreachable"]
    raise ModelError(
        f"model.source: the process that downloads {source} ended ({ending(process.wait())}); try "
        "again: what has come is kept."
    )


class _Pace:
    """How far a download is and how fast, from what its process says. `done` stays below `total`
    until all is in its place.
    """

    def __init__(self) -> None:
        self.done = self.total = self.files = self.of = 0
        self._began = self._grew = time.monotonic()
        self._seen: deque[tuple[float, int]] = deque()

    def take(self, answer: dict[str, int]) -> None:
        now = time.monotonic()
        self.total, self.files, self.of = answer["total"], answer["files"], answer["of"]
        done = max(self.done, min(answer["done"], self.total - 1))
        if done > self.done:
            self._grew = now
        self.done = done
        self._seen.append((now, done))
        while now - self._seen[0][0] > RATE_SECONDS:
            self._seen.popleft()

    def words(self) -> str:
        """3 of 7 files, about 12 min left."""
        return f"{self.files} of {self.of} files{self._left(time.monotonic())}"

    def _left(self, now: float) -> str:
        if now - self._grew >= SILENT_SECONDS:
            return f", nothing has come for {in_hours(now - self._grew)}"
        began, first = self._seen[0]
        if now - self._began < KNOWN_SECONDS or self.done <= first:
            return ""
        return (
            ", about "
            f"{in_hours(max(1, (self.total - self.done) * (now - began) / (self.done - first)))} "
            "left"
        )
