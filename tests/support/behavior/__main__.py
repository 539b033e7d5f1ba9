"""`python -m tests.support.behavior BEFORE [AFTER] [--only AREA,...]`: whether two checkouts do
the same.

Each area runs the program of both checkouts, side by side, and gathers facts; what has to vary is
taken out of them, and the rest must be equal. Differences are printed. Exit code 1 when there is
one that `deliberate.py` does not name.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import shutil
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.behavior.compare import Difference, count, differences
from tests.support.behavior.deliberate import DELIBERATE
from tests.support.behavior.sides import Side

AREAS = {
    "cli": "commands",
    "mistakes": "mistakes",
    "page": "page",
    "records": "records",
    "guard": "guard",
    "login": "login",
    "http": "control",
    "run": "record",
    "starter": "starter",
}
"""By the name that `--only` takes: the module whose `gather` runs one side and returns its facts by
name.
"""
SHOWN = 12
"""Differences of an area that are printed."""
FAILED = "<failed>"
"""What stands for the facts of an area that could not be gathered: a difference, also where both
sides failed alike.
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.behavior", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("before", type=Path, help="checkout of the version that is right")
    parser.add_argument(
        "after",
        type=Path,
        nargs="?",
        default=Path(__file__).resolve().parents[3],
        help="checkout of the version in question (the one of this script by default)",
    )
    parser.add_argument(
        "--only",
        default=",".join(AREAS),
        help=f"areas, with commas between them: {', '.join(AREAS)}",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="a new folder for the facts and what was written",
    )
    parser.add_argument("--all", action="store_true", help="print every difference")
    arguments = parser.parse_args(argv)
    wanted = arguments.only.split(",")
    unknown = [name for name in wanted if name not in AREAS]
    if unknown:
        parser.error(f"there is no area {unknown[0]}; there are {', '.join(AREAS)}")
    for checkout in (arguments.before, arguments.after):
        if not (checkout / "launch.py").is_file():
            parser.error(f"{checkout} is no checkout of the program: it has no launch.py")
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="ramstream-behavior-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return compare(
            arguments.before.resolve(),
            arguments.after.resolve(),
            wanted,
            folder.resolve(),
            None if arguments.all else SHOWN,
        )
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def compare(before: Path, after: Path, wanted: list[str], folder: Path, shown: int | None) -> int:
    """Gather the facts of both sides, area by area, and print what differs; the exit code."""
    print(f"before: {before}\nafter:  {after}\n", flush=True)
    sides = (Side(before, folder / "first"), Side(after, folder / "other"))
    table: list[tuple[str, int, int, int, int, float]] = []
    used: set[str] = set()
    for name in wanted:
        began = time.monotonic()
        module = importlib.import_module(f"tests.support.behavior.{AREAS[name]}")
        with ThreadPoolExecutor(2) as pool:
            facts = list(pool.map(_facts, (module, module), sides))
        for side, found in zip(("first", "other"), facts):
            (folder / f"{side}-{name}.json").write_text(
                json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8"
            )
        reported = [
            Difference(f"{name}{found.path}", found.before, found.after)
            for found in differences(*facts)
        ]
        if not reported and FAILED in facts[0]:
            reported = [Difference(f"{name}/{FAILED}", facts[0][FAILED], facts[1][FAILED])]
        wrong = [found for found in reported if not _is_deliberate(found, used)]
        table.append(
            (
                name,
                len(facts[0]),
                count(facts[0]),
                len(wrong),
                len(reported) - len(wrong),
                time.monotonic() - began,
            )
        )
        for found in wrong[:shown]:
            print(found, flush=True)
        if shown is not None and len(wrong) > shown:
            print(
                f"... and {len(wrong) - shown} more differences in {name}; --all prints them.",
                flush=True,
            )
    _print_table(table)
    for entry in DELIBERATE:
        if entry.path in used:
            print(f"deliberate: {entry.path}: {entry.reason}")
    return 1 if any(row[3] for row in table) else 0


def _facts(module: Any, side: Side) -> dict[str, Any]:
    """The facts of one side; one that cannot be gathered is a difference, not the end."""
    try:
        return module.gather(side)
    except Exception:
        return {FAILED: side.plain(traceback.format_exc())}


def _is_deliberate(found: Difference, used: set[str]) -> bool:
    for entry in DELIBERATE:
        if fnmatch.fnmatchcase(found.path, entry.path):
            used.add(entry.path)
            return True
    return False


def _print_table(table: list[tuple[str, int, int, int, int, float]]) -> None:
    heads = f"{'area':<10}{'things':>8}{'values':>10}{'differences':>13}{'deliberate':>12}"
    print(f"\n{heads}{'seconds':>9}")
    total = ("total", *(sum(row[column] for row in table) for column in range(1, 6)))
    for name, things, values, wrong, wanted, seconds in [*table, total]:
        print(f"{name:<10}{things:>8,}{values:>10,}{wrong:>13,}{wanted:>12,}{seconds:>9.0f}")


if __name__ == "__main__":
    sys.exit(main())
