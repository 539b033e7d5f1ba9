"""A copy of the tree in which changes are made, and what its tests say of each."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.paths import PROGRAM_ROOT
from tests.support.changes.record import Change
from tests.support.changes.warm import LIBRARIES, TOO_LONG, WarmProcess

LIKELY, ENGINE = "likely tests", "all tests of the engine"
"""The stages of a change."""
CAUGHT, SURVIVED, BROKEN = "caught", "survived", "broken"
"""What became of a change: a test failed; all tests passed; the tests could not even start, so that
the change says nothing about them.
"""
SECONDS = {LIKELY: 240.0, ENGINE: 1800.0}
"""A change that makes the tests run for longer is caught: they pass in less."""
ENGINE_TESTS = ("tests/engine",)
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)

_ages = itertools.count(1)


@dataclass(frozen=True)
class Outcome:
    """What became of one change."""

    change: str
    verdict: str
    test: str
    """This test failed first; empty unless the change was caught."""
    stage: str
    seconds: float
    commit: str
    """The tree was at this commit."""
    digest: str
    """The record had this checksum. Where it has another one now, the outcome means nothing."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tree_files(root: Path) -> list[str]:
    """Returns the files of the tree at `root` that git knows or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (root / name).is_file()]


class Copy:
    """A copy of a tree. One change at a time is made in it and undone again."""

    def __init__(
        self,
        folder: Path,
        root: Path = PROGRAM_ROOT,
        commit: str = "",
        libraries: tuple[str, ...] = LIBRARIES,
    ):
        self.folder = folder
        self._commit = commit
        self._process = WarmProcess(libraries)
        for name in tree_files(root):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)

    def close(self) -> None:
        """Ends the process that runs the tests. The files stay."""
        self._process.close()

    def try_change(self, change: Change, stage: str) -> Outcome:
        """Makes the change, runs the tests of `stage`, and undoes the change."""
        path = self.folder / change.file
        original, times = path.read_bytes(), path.stat()
        began = time.monotonic()
        try:
            change.apply(self.folder)
            # Python and numba tell by size and time whether a file has changed, so each change has
            # a time of its own.
            age = times.st_mtime - 10.0 * next(_ages)
            os.utime(path, (age, age))
            tests = change.tests if stage == LIKELY else ENGINE_TESTS
            verdict, test = self.run_tests(tests, SECONDS[stage])
        finally:
            path.write_bytes(original)
            os.utime(path, (times.st_atime, times.st_mtime))
        seconds = round(time.monotonic() - began, 1)
        return Outcome(change.name, verdict, test, stage, seconds, self._commit, change.digest)

    def run_tests(self, tests: tuple[str, ...], seconds: float) -> tuple[str, str]:
        """Runs tests of the copy until the first fails. Returns a verdict and the failed test."""
        options = [
            "-x",
            "-q",
            "-n",
            "0",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "--tb=no",
            "-rfE",
        ]
        if (self.folder / "tests" / "conftest.py").exists():
            options.append("--ci")  # what a commit must pass has to notice the change
        code, shown = self._process.run(self.folder, [*options, *tests], seconds)
        if code == TOO_LONG:
            return CAUGHT, f"no test: {seconds:.0f} s were not enough"
        if code == 0:
            return SURVIVED, ""
        failed = FAILURE.search(shown)
        if code == 1 and failed:
            return CAUGHT, failed[1]
        if code < 0:
            return CAUGHT, f"no test: the process died by signal {-code}"
        return BROKEN, shown.strip().splitlines()[-1] if shown.strip() else "nothing was said"
