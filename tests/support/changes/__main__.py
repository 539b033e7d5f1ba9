"""`python -m tests.support.changes [NAME...]`: makes changes that break the engine, one at a time,
and says which test notices each.

Every change runs the tests that are likely to notice it. `--engine` runs all tests of the engine on
those that survive. `--keep FILE` keeps the outcomes, so that a run that was ended goes on where it
was. `--page` writes docs/changes.md. The exit code is 1 when a change survives without a reason.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from engine.paths import PROGRAM_ROOT
from tests.support.changes.copies import BROKEN, CAUGHT, ENGINE, LIKELY, SURVIVED, Copy, Outcome
from tests.support.changes.record import Change, DoesNotApply
from tests.support.changes.records import AREAS, CHANGES
from tests.support.changes.table import PAGE, in_words, page


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    patterns = arguments.names or ["*"]
    chosen = [c for c in CHANGES if any(fnmatch.fnmatch(c.name, p) for p in patterns)]
    if not chosen:
        print("No change has such a name.", file=sys.stderr)
        return 2
    try:
        for change in chosen:
            change.applied((PROGRAM_ROOT / change.file).read_text(encoding="utf-8"))
    except DoesNotApply as error:
        print(error, file=sys.stderr)
        return 2
    outcomes = kept_outcomes(arguments.keep)
    with Copies(arguments.jobs) as copies:
        waiting = [change for change in chosen if change.name not in outcomes]
        if waiting and not arguments.unchecked:
            failing = failing_unchanged(copies, waiting)
            if failing:
                print(f"The tests fail without any change: {', '.join(failing)}", file=sys.stderr)
                return 2
        stages = [LIKELY, ENGINE] if arguments.engine else [LIKELY]
        for stage in stages:
            for change, outcome in outcomes_of(copies, waiting, stage):
                print(in_words(change, outcome), flush=True)
                outcomes[change.name] = outcome
                keep(arguments.keep, outcomes)
            waiting = [
                change
                for change in chosen
                if outcomes[change.name].verdict == SURVIVED
                and outcomes[change.name].stage == LIKELY
            ]
    if arguments.page:
        (PROGRAM_ROOT / PAGE).write_text(page(AREAS, outcomes), encoding="utf-8")
    return summed_up(chosen, outcomes)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.changes", description=__doc__.partition("\n\n")[2]
    )
    parser.add_argument("names", nargs="*", help="names of changes, with * (default: all)")
    parser.add_argument("--engine", action="store_true", help="all engine tests on survivors")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="outcomes so far, as JSON")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE}")
    parser.add_argument(
        "--unchecked", action="store_true", help="do not run the tests without a change first"
    )
    return parser.parse_args(argv)


class Copies:
    """So many copies of the tree that as many changes can be tried at once."""

    def __init__(self, jobs: int):
        self.jobs = max(1, jobs)
        self._place = tempfile.TemporaryDirectory(prefix="ramstream-changes-")
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, cwd=PROGRAM_ROOT, capture_output=True, text=True)
        for number in range(self.jobs):
            folder = Path(self._place.name) / str(number)
            self._free.put(Copy(folder, PROGRAM_ROOT, done.stdout.strip()))

    def use(self, work, *arguments):
        """Returns `work(copy, *arguments)`, with a copy that nothing else uses meanwhile."""
        copy = self._free.get()
        try:
            return work(copy, *arguments)
        finally:
            self._free.put(copy)

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        while not self._free.empty():
            self._free.get().close()
        self._place.cleanup()


def failing_unchanged(copies: Copies, changes: Sequence[Change]) -> list[str]:
    """Returns the likely tests that fail although nothing was changed: they prove nothing."""
    tests = sorted({test for change in changes for test in change.tests})
    with ThreadPoolExecutor(copies.jobs) as pool:
        found = pool.map(lambda test: copies.use(Copy.run_tests, (test,), 600.0), tests)
        return [test for test, (verdict, _) in zip(tests, found) if verdict != SURVIVED]


def outcomes_of(
    copies: Copies, changes: Sequence[Change], stage: str
) -> Iterator[tuple[Change, Outcome]]:
    """Yields each change with its outcome, as soon as it is known."""
    with ThreadPoolExecutor(copies.jobs) as pool:
        running = {pool.submit(copies.use, Copy.try_change, c, stage): c for c in changes}
        for future in as_completed(running):
            yield running[future], future.result()


def kept_outcomes(file: Path | None) -> dict[str, Outcome]:
    """Returns the outcomes in `file` of the records as they are now. A change that survived without
    a reason is made again, because a test may have been written for it.
    """
    if file is None or not file.exists():
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))
    found = {row["change"]: Outcome(**row) for row in rows}
    return {
        change.name: found[change.name]
        for change in CHANGES
        if change.name in found
        and found[change.name].digest == change.digest
        and (change.survives or found[change.name].verdict == CAUGHT)
    }


def keep(file: Path | None, outcomes: dict[str, Outcome]) -> None:
    if file is not None:
        rows = [outcome.to_dict() for outcome in outcomes.values()]
        file.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def summed_up(chosen: Sequence[Change], outcomes: dict[str, Outcome]) -> int:
    """Prints the sums, and returns the exit code."""
    of = {change: outcomes[change.name].verdict for change in chosen}
    caught = [change for change in chosen if of[change] == CAUGHT]
    print(f"{len(chosen)} changes: {len(caught)} caught, {len(chosen) - len(caught)} not.")
    wrong = [f"{c.name} survives without a reason" for c in chosen if is_missed(c, of[c])]
    wrong += [f"{c.name} breaks the import of the tests" for c in chosen if of[c] == BROKEN]
    wrong += [f"{c.name} is caught, although it has a reason" for c in caught if c.survives]
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


def is_missed(change: Change, verdict: str) -> bool:
    return verdict == SURVIVED and not change.survives


if __name__ == "__main__":
    sys.exit(main())
