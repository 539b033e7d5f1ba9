"""No test asks a hub: some families' code looks for kernels there, and waits for the answer. Nor
does a test find tokens that another one left: each has a cache of its own.
"""

from __future__ import annotations

import gc
import os
import tempfile

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as launch.py does
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # for models this small, threads only wait for each other
_shared = tempfile.TemporaryDirectory(prefix="ramstream-tests-")
os.environ["RAMSTREAM_CACHE"] = _shared.name  # for what is made once for a module


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Each file's tests stay in one process, with what is made once for them. Those that need the
    GPU or a browser run one after another: they would take its memory or its time from each other.
    """
    for item in items:
        alone = item.path.parent.name in ("browser", "gpu")
        item.add_marker(pytest.mark.xdist_group("alone" if alone else item.path.stem))


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """What is imported by now stays: of some million objects, no collection of memory looks at
    those again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """The folder of the cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("RAMSTREAM_CACHE", str(folder))
    return folder
