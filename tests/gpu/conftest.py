"""Tests marked `gpu` are skipped where there is no CUDA device, and run with deterministic kernels
where there is one. Tests of lanes also run without one.
"""

from __future__ import annotations

import os

import pytest
import torch

from engine.runtime.device import cuda_backend
from engine.runtime.device.open_backend import give_memory_back
from tests.support.gpu_resident_runs import keep_on_gpu  # noqa: F401  a fixture
from tests.support.lanes import ImmediateStreams, Lanes, lanes_without_a_gpu

# Read when cuBLAS starts; without it its results may differ from call to call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Frees the memory of each test, as a run does at its end: some measure all that is taken."""
    yield
    give_memory_back()


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["threads", pytest.param("cuda", marks=pytest.mark.gpu)])
def lanes(request, monkeypatch):
    """Makes `Lanes`."""
    if request.param == "cuda":
        request.getfixturevalue("deterministic")
        return Lanes
    monkeypatch.setattr(cuda_backend, "torch", ImmediateStreams())
    return lanes_without_a_gpu
