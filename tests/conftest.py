"""Settings for all tests: the three sets, how tests share processes, and what no test may touch.

- `pytest` runs all tests that are not slow. Slow tests are marked where they stand, with the
  reason: `@pytest.mark.slow("it tokenizes 17 MB, for 15 seconds")`.
- `pytest --ci`, as `.ci/run` calls it, also runs the slow tests. Of a sweep, which is a test with
  many cases, it has the cases that are chosen in tests/sweeps.yaml.
- `pytest --everything` runs all cases of all tests.

Tests that the command line names (`FILE::test`) run in any case.

No test asks a hub: some families' code looks for kernels there and waits for the answer. Nor does
a test find tokens that another test left, because each test has a cache of its own.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
import yaml

from engine.machine.primitive_cache import bound_kept_kernels
from engine.model.build import measure_shape
from engine.model.build.activations import block_shapes
from engine.model.build.units import StreamedModel
from engine.paths import PROGRAM_ROOT

pytest.register_assert_rewrite("tests.support")  # a failure there tells the values, too
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as launch.py does
bound_kept_kernels()  # as it does, too
# An installation has no `engine` on the module path, not even one that leads to this source tree.
_path = (str(PROGRAM_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(_path)))
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

ON_A_GPU = "/gpu/"
"""The files of tests that need a GPU have this in their paths."""
ALONE = "GPU"
"""The group of all tests that need a GPU, where its memory has room for one process alone."""
ROOM_FOR_SEVERAL = 40 << 30
"""A GPU of this many bytes has room for the tests of several processes, each of which takes a few
GiB at most.
"""
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

BROWSER_PROCESSES = 2
"""So many processes begin with the tests in a browser where there are more: each starts a browser
and a server, and these tests often wait for their page. The others begin with the other tests.
"""

SWEEPS_FILE = Path(__file__).parent / "sweeps.yaml"
SWEEP = "a plain run has the cases that tests/sweeps.yaml chooses"

ALL = pytest.StashKey[set[str]]()
"""The configuration of a run has under this key the names of all tests that it has collected."""
PLAIN = pytest.StashKey[set[str]]()
"""Under this key are the names of those that are not slow."""
LEFT_OUT = pytest.StashKey[int]()
"""The configuration of a run counts under this key the tests that its set leaves out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--everything",
        action="store_true",
        help="run all cases of all tests, slow ones too",
    )
    parser.addoption(
        "--ci",
        action="store_true",
        help="also run slow tests, with the cases of sweeps that tests/sweeps.yaml chooses",
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
    """Leaves out what is not in the set that is asked for. What takes longest comes first: tests
    in a browser, those that need the GPU, and sweeps over families. Then come those that only
    compute: a busy machine disturbs none of them.
    """
    sweeps = _read_sweeps()
    _mark_sweeps(items, sweeps)
    config.stash[ALL] = {item.nodeid for item in items}
    config.stash[PLAIN] = {item.nodeid for item in items if item.get_closest_marker("slow") is None}
    named = _named_tests(config)
    left_out = [item for item in items if not _is_wanted(item, config, named, sweeps)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _is_wanted(item, config, named, sweeps)]
    config.stash[LEFT_OUT] = len(left_out)
    first = (IN_BROWSER, ON_A_GPU, FAMILIES)

    def place(item: pytest.Item) -> tuple[int, bool]:
        is_quiet = item.get_closest_marker("computing") is None
        kind = _kind(item.nodeid)
        return first.index(kind) if kind in first else len(first), is_quiet

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object):
    """Returns a scheduler that gives the tests of a group to one process, one after another."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

        def _assign_work_unit(self, node) -> None:
            """Hands the first group that this process should run to it, else the first one."""
            for group in self.workqueue:
                if (IN_BROWSER in group) == _is_for_browser(node.gateway.id, self.numnodes):
                    self.workqueue.move_to_end(group, last=False)
                    break
            super()._assign_work_unit(node)

    return Groups(config, log)


def _is_for_browser(worker: str, workers: int) -> bool:
    """Returns whether a process of xdist runs the tests in a browser before others. worker: `gw0`
    is the first of the processes. workers: their number.
    """
    return workers <= BROWSER_PROCESSES or int(worker.removeprefix("gw")) < BROWSER_PROCESSES


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Lets the processes whose tests take longest, those in a browser, have a core first."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and not _is_for_browser(worker, int(os.environ["PYTEST_XDIST_WORKER_COUNT"])):
        os.nice(10)


def _group(nodeid: str) -> str:
    """Returns the group of a test. The tests of a file are one group, with what is made once for
    them, and the sweeps over all families are one. On a GPU the cases of a test are a group: most
    of their time is that of the compiler, on one core. Where the GPU is small all of them are one,
    because they would take its memory from each other.
    """
    kind = _kind(nodeid)
    if kind == ON_A_GPU:
        return nodeid.split("[")[0] if _has_room_for_several() else ALONE
    return FAMILIES if kind == FAMILIES else nodeid.split("::")[0]


def _kind(nodeid: str) -> str:
    file = nodeid.split("::")[0]
    if file.rpartition("/")[2] in SWEEPS and ON_A_GPU not in file:
        return FAMILIES
    return next((part for part in (IN_BROWSER, ON_A_GPU) if part in file), "")


@functools.cache
def _has_room_for_several() -> bool:
    try:
        pynvml.nvmlInit()
        memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError:
        return False
    return memory.total >= ROOM_FOR_SEVERAL


def _read_sweeps() -> dict[str, dict]:
    """Returns for each sweep, by the name of its test, the cases that `plain` and `ci` have."""
    if not SWEEPS_FILE.exists():
        return {}
    files = yaml.safe_load(SWEEPS_FILE.read_text(encoding="utf-8"))
    return {
        f"tests/{file}::{test}": chosen
        for file, tests in files.items()
        for test, chosen in tests.items()
    }


def _mark_sweeps(items: list[pytest.Item], sweeps: dict[str, dict]) -> None:
    """Marks the cases of sweeps as slow that a plain run does not have."""
    for item in items:
        test, _, case = item.nodeid.partition("[")
        plain = sweeps.get(test, {}).get("plain")
        if plain is not None and case[:-1] not in plain:
            item.add_marker(pytest.mark.slow(SWEEP))


def _is_wanted(
    item: pytest.Item,
    config: pytest.Config,
    named: set[tuple[Path, str]],
    sweeps: dict[str, dict],
) -> bool:
    """Whether `item` is in the set that the command line asks for, or is named there."""
    marker = item.get_closest_marker("slow")
    if marker is None:
        return True
    if not marker.args:
        raise pytest.UsageError(f"{item.nodeid} is marked `slow` without a reason")
    name = item.nodeid.partition("::")[2]
    test, _, case = item.nodeid.partition("[")
    if (item.path, name) in named or (item.path, name.split("[")[0]) in named:
        return True
    if config.option.everything or "slow" in config.option.markexpr:
        return True
    in_ci = sweeps.get(test, {"ci": "all"}).get("ci", [])
    return config.option.ci and (in_ci == "all" or case[:-1] in in_ci)


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
        tests, them = (
            ("1 test was", "it") if left_out == 1 else (f"{left_out:,} tests were", "them")
        )
        reporter.write_line(f"{tests} left out; `pytest --everything` runs {them} too.")
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


@pytest.fixture(scope="session")
def collected(request) -> dict[str, set[str]]:
    """Returns the names of all tests that this run has collected, and of those that are not slow,
    by the words `all` and `plain`.
    """
    return {"all": request.config.stash[ALL], "plain": request.config.stash[PLAIN]}


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Freezes what is imported by now: of some million objects, no collection of memory looks at
    those again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def measured_once():
    """Measures the blocks of equal models once in a process, not in each of its runs, which would
    take 0.2 s of a core each.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("count_activations", "tiled_blocks"):
            patch.setattr(measure_shape, name, _once_for_equal_models(getattr(measure_shape, name)))
        yield


def _once_for_equal_models(measure: Callable[[StreamedModel], Any]) -> Callable:
    found: dict[tuple, Any] = {}

    def measured(model: StreamedModel) -> Any:
        kinds = [block_shapes(model, unit) for unit in model.blocks]
        parts = [model.tiled_parts(unit) for unit in model.blocks]
        config = model.config.to_dict() | {"_name_or_path": ""}
        key = type(model.skeleton.model), str(config), model.dtype, str(kinds), str(parts)
        if key not in found:
            found[key] = measure(model)
        return found[key]

    return measured


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    """Returns the folder of the test's own cache. It is numbered here, since pytest would look for
    a free name among those of all tests before.
    """
    folder = Path(_shared.name) / f"test-{next(_numbers)}"
    folder.mkdir()
    monkeypatch.setenv("RAMSTREAM_CACHE", str(folder))
    return folder
