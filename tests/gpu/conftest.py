"""Tests marked `gpu` are skipped where there is no CUDA device, and run with deterministic kernels
where there is one.
"""

from __future__ import annotations

import os

import pytest
import torch

# Read when cuBLAS starts; without it its results may differ from call to call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
