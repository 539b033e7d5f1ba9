"""Host stores and checkpoints for the tests of this folder."""

from __future__ import annotations

import pytest

from engine.runtime.host.host_states import HostStates
from engine.training.checkpoints import staging, unit_files
from engine.training.checkpoints.checkpoint import Contents, write_checkpoint
from tests.support.stores import content, fill, layouts
from tests.support.streamed_weights import poured  # noqa: F401  a fixture


@pytest.fixture
def new_store():
    made = []

    def make(
        dtype: str = "bfloat16", seed: int | None = None, weights_only: bool = False, **shape
    ) -> HostStates:
        store = HostStates(layouts(**shape), dtype, threads=1)
        made.append(store)
        store.allocate_weights()
        if not weights_only:
            store.allocate_states()
        if seed is not None:
            fill(store, seed)
        return store

    yield make
    for store in made:
        store.close()


@pytest.fixture(params=[1000, 4096], ids=["uneven pieces", "whole pages"])
def small_pieces(monkeypatch, request):
    """Planes of a few KiB are written in several pieces: through the page cache, and directly."""
    monkeypatch.setattr(staging, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(unit_files, "ALIGNED_BYTES", 5000 if request.param == 1000 else 4096)


# ---------------------------------------------------------------------- damage


@pytest.fixture
def two(tmp_path, new_store):
    """Checkpoints of steps 1 and 2, and what each holds."""
    store, held = new_store(seed=1), {}
    for step in (1, 2):
        fill(store, step)
        write_checkpoint(tmp_path, step, Contents(store, {"step": step}), keep=5)
        held[step] = content(store)
    return tmp_path, held
