"""The helper process of a session, which feeds its trackers. Its owner is
`engine.runs.trackers.attached`.

The first line of its input names the run's folder and the trackers. The second line has the state
in which the session ended and up to which line the record is to be sent. Where the input ends
without it, the owner is gone, and all that the record has is sent. Each line of the output is a
JSON object: the `tracker`, and `what` went wrong.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from engine.helper_process import take_output
from engine.runs.record.run_folder import RunFolder
from engine.runs.trackers.feed import Ending, Feed
from engine.runs.trackers.ledger import Ledger
from engine.runs.trackers.open_tracker import open_tracker
from engine.runs.trackers.tracked import tracked_run

PROGRAM = "from engine.runs.trackers.worker import main; main()"
ALONE_SECONDS = 60.0
"""Seconds after which the helper ends without its owner."""
_POLL_SECONDS = 0.1


def main() -> None:
    """Feeds the trackers of one session, then ends this process."""
    output = take_output()
    asked = msgspec.json.decode(sys.stdin.buffer.readline() or b"{}")
    if asked:
        feeds = _start(asked, output)
        ending = threading.Thread(target=_wait_for_end, args=(feeds,), daemon=True)
        ending.start()
        while any(feed.is_alive for feed in feeds):
            for feed in feeds:
                feed.check()
            time.sleep(_POLL_SECONDS)
    output.flush()
    # What a tracker's package would still do at an exit was done when its run was closed.
    os._exit(0)


def _start(asked: dict[str, Any], output: BinaryIO) -> list[Feed]:
    folder = RunFolder(Path(asked["folder"]))
    run = tracked_run(folder)
    ledger = Ledger(folder.path)
    writing = threading.Lock()

    def report(name: str, what: str) -> None:
        with writing:
            output.write(msgspec.json.encode({"tracker": name, "what": what}) + b"\n")
            output.flush()

    feeds = [
        Feed(run, partial(open_tracker, name), ledger.of(name), partial(report, name))
        for name in asked["trackers"]
    ]
    for feed in feeds:
        feed.start()
    return feeds


def _wait_for_end(feeds: list[Feed]) -> None:
    line = sys.stdin.buffer.readline()
    ending: dict[str, Any] = {"state": "interrupted", "seq": None}
    if line:
        ending = msgspec.json.decode(line)
    for feed in feeds:
        feed.end(Ending(ending["state"], ending["seq"]))
    if not line:
        time.sleep(ALONE_SECONDS)
        os._exit(1)
