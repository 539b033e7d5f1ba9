"""Compiled plans without the generation of kernels, which takes most of the time of a test."""

from __future__ import annotations

import functools

import pytest
import torch

from engine.runtime.device import compiled


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torch trace what is compiled, and divide it into forward and backward as always, but
    run torch's own kernels. Generated ones are tested in `tests/engine/runtime/test_compiled.py`.
    """
    backend = "aot_eager_decomp_partition"
    monkeypatch.setattr(
        compiled.torch, "compile", functools.partial(torch.compile, backend=backend)
    )
