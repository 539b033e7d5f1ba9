"""The command `launch.py track`, which sends the curves of a run that is over to its trackers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial

from engine.errors import RunError
from engine.runs.record.run_folder import open_run
from engine.runs.summaries.listing import summarize
from engine.runs.trackers.feed import Ending, Feed
from engine.runs.trackers.known_trackers import KINDS, destinations
from engine.runs.trackers.ledger import Ledger
from engine.runs.trackers.open_tracker import open_tracker
from engine.runs.trackers.tracked import tracked_run
from engine.tools.cli.streams import show

_POLL_SECONDS = 0.1


def track(runs_dir: str | os.PathLike[str], run_id: str, names: Sequence[str] = ()) -> int:
    """Sends what the trackers of a run do not have yet, and returns the exit code: 1 if one of them
    failed. `names` are the trackers; without them, those of the run's settings. Raises RunError for
    a run that is under way or has no trackers, and ConfigError for settings that cannot be read.
    """
    folder = open_run(runs_dir, run_id)
    wanted = tuple(names) or folder.config.output.trackers
    if not wanted:
        raise RunError(f"Run {run_id} has no trackers; name one with --to: {', '.join(KINDS)}.")
    summary = summarize(folder)
    if summary is None or folder.is_running():
        raise RunError(f"Run {run_id} goes on, or has no record; track it when it is over.")
    for sentence in destinations(wanted, folder.path.parent):
        show(sentence)
    failed: set[str] = {name for name in wanted if not KINDS[name].is_installed}

    def report(name: str, what: str) -> None:
        failed.add(name)
        print(f"{KINDS[name].title} {what}; {KINDS[name].remedy}.", file=sys.stderr)

    run, ledger = tracked_run(folder), Ledger(folder.path)
    feeds = [
        Feed(run, partial(open_tracker, name), ledger.of(name), partial(report, name))
        for name in wanted
        if name not in failed
    ]
    for feed in feeds:
        feed.end(Ending(summary.state_text))
        feed.start()
    while any(feed.is_alive for feed in feeds):
        for feed in feeds:
            feed.check()
        time.sleep(_POLL_SECONDS)
    return 1 if failed else 0
