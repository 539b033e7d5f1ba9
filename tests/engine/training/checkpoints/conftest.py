"""Host states and checkpoints for the tests of this folder."""

from __future__ import annotations

import pytest

from engine.runtime.host.host_states import HostStates
from engine.training.checkpoints import staging, unit_files
from engine.training.checkpoints.checkpoint import Contents, write_checkpoint
from tests.support.filled_states import content, fill, layouts
from tests.support.streamed_weights import poured  # noqa: F401  a fixture


@pytest.fixture
def new_states():
    made = []

    def make(
        dtype: str = "bfloat16", seed: int | None = None, weights_only: bool = False, **shape
    ) -> HostStates:
        states = HostStates(layouts(**shape), dtype, threads=1)
        made.append(states)
        states.allocate_weights()
        if not weights_only:
            states.allocate_states()
        if seed is not None:
            fill(states, seed)
        return states

    yield make
    for states in made:
        states.close()


@pytest.fixture(params=[1000, 4096], ids=["uneven chunks", "whole pages"])
def small_chunks(monkeypatch, request):
    """Planes of a few KiB are written in several chunks: through the page cache, and directly."""
    monkeypatch.setattr(staging, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(unit_files, "ALIGNED_BYTES", 5000 if request.param == 1000 else 4096)


# ---------------------------------------------------------------------- damage


@pytest.fixture
def two(tmp_path, new_states):
    """Checkpoints of steps 1 and 2, and what each holds."""
    states, held = new_states(seed=1), {}
    for step in (1, 2):
        fill(states, step)
        write_checkpoint(tmp_path, step, Contents(states, {"step": step}), keep=5)
        held[step] = content(states)
    return tmp_path, held
