"""Settings for all tests: the two tiers, how tests share processes, and what no test may touch.

A plain `pytest` runs the first tier, which covers every room in a few minutes. `pytest
--everything` runs the second tier too: the tests that are marked
`@pytest.mark.everything("the reason")`, and those that tests/second_tier.yaml lists.
CONTRIBUTING.md says what belongs where.

No test asks a hub: some families' code looks for kernels there and waits for the answer. Nor does
a test find tokens that another test left, because each test has a cache of its own.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import tempfile
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import yaml

from engine.machine.primitive_cache import bound_kept_kernels

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as launch.py does
bound_kept_kernels()  # as it does, too
# With models this small, threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Images of containers often forbid Python to keep what it has compiled. Each process of pytest
# would compile all tests again, and each process that a test starts all of the engine.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
_shared = tempfile.TemporaryDirectory(prefix="ramstream-tests-")
os.environ["RAMSTREAM_CACHE"] = _shared.name  # for what is made once for a module
_numbers = itertools.count()

gc.disable()  # reading all tests makes some million objects, of which none is garbage

MOST_PROCESSES = 4
"""A run takes this many processes at most: each imports torch and collects all tests."""

ALONE = "GPU"
"""The group of the tests that need a GPU has this name."""
IN_BROWSER = "/browser/"
"""The files of tests that need a browser have this in their paths."""

FAMILIES = "families"
SWEEPS = {
    "test_bf16_logits.py",
    "test_families.py",
    "test_packing.py",
    "test_sampling_families.py",
}
"""These files sweep over the same 140 families. In one process, the code of a family is imported
once, and its packing is tried once.
"""

LIST = Path(__file__).parent / "second_tier.yaml"
"""This file lists tests of the second tier."""
NOTHING_LISTED = {"reasons": {"sweep": "it is one of many cases"}, "whole": [], "tests": {}}

MOST_CASES = 4
"""A plain run has so many cases of a test, spread evenly over all; the others are a sweep."""
SWEEP = "sweep"

NTH_CASE = int(os.environ.get("RAMSTREAM_NTH_CASE", "16"))
"""Of the cases that a plain run leaves out, the second tier has one of sixteen, and all with 1.
"""

PLAIN = pytest.StashKey[set[str]]()
"""The configuration of a run has under this key the names of those collected tests that a plain run
has.
"""
WHOLE = pytest.StashKey[set[str]]()
"""Under this key are the names of the tests that keep all their cases."""
LEFT_OUT = pytest.StashKey[int]()
"""The configuration of a run counts under this key the tests that its tier leaves out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--everything",
        action="store_true",
        help="also run the tests that a plain run leaves out (marked `everything`)",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns how many processes `-n auto` starts: one for each core, and none beside pytest itself
    for files that are named, which are done sooner than another process has started.
    """
    paths = [Path(str(argument).split("::")[0]) for argument in config.args]
    if paths and all(path.suffix == ".py" for path in paths):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processes = min(cores or 1, MOST_PROCESSES)
    return processes if processes > 1 else 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the second tier unless it is asked for. What takes longest comes first: tests in a
    browser, those that need the GPU, and sweeps over families. Then come those that only compute: a
    busy machine disturbs none of them.
    """
    config.stash[WHOLE] = _mark_listed(items)
    config.stash[PLAIN] = {
        item.nodeid for item in items if item.get_closest_marker("everything") is None
    }
    named = _named_tests(config)
    left_out = [item for item in items if not _is_wanted(item, config, named)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _is_wanted(item, config, named)]
    config.stash[LEFT_OUT] = len(left_out)
    first = {ALONE: 1, FAMILIES: 2}

    def place(item: pytest.Item) -> tuple[int, bool]:
        is_quiet = item.get_closest_marker("computing") is None
        group = _group(item.nodeid)
        return 0 if IN_BROWSER in group else first.get(group, len(first) + 1), is_quiet

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object):
    """Returns a scheduler that gives the tests of a group to one process, one after another."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Groups(config, log)


def _group(nodeid: str) -> str:
    """Returns the group of a test. The tests of a file are one group, with what is made once for
    them. Tests that need the GPU are one group too, because they would take its memory from each
    other. So are the sweeps over all families.
    """
    file = nodeid.split("::")[0]
    if "/gpu/" in file:
        return ALONE
    return FAMILIES if file.rpartition("/")[2] in SWEEPS else file


def _mark_listed(items: list[pytest.Item]) -> set[str]:
    """Marks the tests of the second tier that the file lists, and those that are too many cases for
    a plain run. Returns the names of the tests that keep all their cases.
    """
    listed = yaml.safe_load(LIST.read_text(encoding="utf-8")) if LIST.exists() else NOTHING_LISTED
    reasons = listed["reasons"]
    cases: Counter[tuple[Path, str]] = Counter()
    chosen = set()
    """The cases of these tests were chosen where they stand (`tests.support.tiers.in_tiers`)."""
    for item in items:
        if item.get_closest_marker("everything"):
            chosen.add(item.nodeid.split("[")[0])
        if LIST.parent not in item.path.parents or item.get_closest_marker("everything"):
            continue
        test = item.name.split("[")[0]
        cases[item.path, test] += 1
        found = listed["tests"].get(item.path.relative_to(LIST.parent).as_posix())
        if isinstance(found, dict):
            found = found.get(test)
        if isinstance(found, int):
            found = SWEEP if cases[item.path, test] > found else None
        elif isinstance(found, dict):
            found = SWEEP if (cases[item.path, test] - 1) % found["every"] else None
        if found is not None:
            item.add_marker(pytest.mark.everything(reasons[found]))
    whole = set(listed["whole"])
    for each in _too_many(items, chosen | whole):
        each.add_marker(pytest.mark.everything(reasons[SWEEP]))
    return whole


def _too_many(items: list[pytest.Item], chosen: set[str]) -> list[pytest.Item]:
    """Returns the cases of tests in the plain run that are more than it has of one test, except
    for those whose cases were `chosen`.
    """
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        test = item.nodeid.split("[")[0]
        is_plain = item.get_closest_marker("everything") is None
        if LIST.parent in item.path.parents and is_plain and test not in chosen:
            cases[test].append(item)
    left_out = []
    for own in cases.values():
        if len(own) > MOST_CASES:
            kept = {place * len(own) // MOST_CASES for place in range(MOST_CASES)}
            left_out += [each for place, each in enumerate(own) if place not in kept]
    return left_out


def _is_wanted(item: pytest.Item, config: pytest.Config, named: set[tuple[Path, str]]) -> bool:
    """Whether `item` is in the first tier, or the command line asks for the second one: with
    `--everything`, with `-m` and the marker's name, or with the name of the test. Of the cases of a
    sweep, the second tier has some, unless the test is named.
    """
    marker = item.get_closest_marker("everything")
    if marker is None:
        return True
    if not marker.args:
        raise pytest.UsageError(f"{item.nodeid} is marked `everything` without a reason")
    name = item.nodeid.partition("::")[2]
    if (item.path, name) in named or (item.path, name.split("[")[0]) in named:
        return True
    if not config.option.everything and "everything" not in config.option.markexpr:
        return False
    is_case = "[" in name and item.nodeid.split("[")[0] not in config.stash[WHOLE]
    # The checksum chooses the same cases each time.
    return not is_case or zlib.crc32(item.nodeid.encode()) % NTH_CASE == 0


def _named_tests(config: pytest.Config) -> set[tuple[Path, str]]:
    """Returns file and name of the tests that the command line names, as in `file.py::test` or
    `file.py::test[parameter]`.
    """
    named = set()
    for argument in map(str, config.args):
        path, _, name = argument.partition("::")
        if name:
            named.add(((config.invocation_params.dir / path).resolve(), name))
    return named


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session):
    """Tells in the last line how many tests were left out, and how to run them."""
    config = session.config
    if hasattr(config, "workeroutput"):  # a process of xdist, whose words nobody reads
        config.workeroutput["left_out"] = config.stash.get(LEFT_OUT, 0)
        return (yield)
    result = yield
    left_out = config.stash.get(LEFT_OUT, 0)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if left_out and reporter is not None:
        tests = "1 test was" if left_out == 1 else f"{left_out:,} tests were"
        how = "RAMSTREAM_NTH_CASE=1" if config.option.everything else "`pytest --everything`"
        reporter.write_line(f"{tests} left out; {how} runs them too.")
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Takes over the count of a process of xdist; each of them has collected the same tests."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[LEFT_OUT] = output.get("left_out", 0)


def pytest_collection_finish() -> None:
    """Lets memory be collected again: all that was imported until now stays."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Freezes what is imported by now: of some million objects, no collection of memory looks at
    those again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    """Returns the folder of the test's own cache. It is numbered here, since pytest would look for
    a free name among those of all tests before.
    """
    folder = Path(_shared.name) / f"test-{next(_numbers)}"
    folder.mkdir()
    monkeypatch.setenv("RAMSTREAM_CACHE", str(folder))
    return folder
