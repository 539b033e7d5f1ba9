"""Checkpoints with the states of an optimizer that cannot be converted are refused."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config.optimizers import StateFormat
from engine.errors import CheckpointError
from engine.planning.layout.layout import WEIGHT_PLANES
from engine.planning.layout.optimizer_states import StateRange
from engine.runtime.host.host_states import HostStates
from engine.runtime.optimizer.moment_conversion import read_moments, write_moments
from engine.training.checkpoints.checkpoint import Contents, write_checkpoint
from engine.training.checkpoints.restore import load_checkpoint, load_newest_checkpoint
from tests.support.filled_states import content, fill, layouts


@pytest.fixture
def of_optimizer():
    made = []

    def make(optimizer: str, seed: int) -> HostStates:
        states = HostStates(layouts(), "bfloat16", threads=1)
        made.append(states)
        states.allocate_weights()
        states.allocate_states(optimizer=optimizer)
        fill(states, seed)
        return states

    yield make
    for states in made:
        states.close()


@pytest.mark.parametrize(
    ("kept", "asked"), [("adamw", "muon"), ("adamw_8bit", "muon"), ("muon", "adamw")]
)
def test_states_are_not_converted_to_or_from_muon(tmp_path, of_optimizer, kept, asked):
    info = write_checkpoint(tmp_path, 1, Contents(of_optimizer(kept, 1), {"step": 1}), keep=2)
    states = of_optimizer(asked, 2)
    before = content(states)
    for load, path in ((load_checkpoint, info.path), (load_newest_checkpoint, tmp_path)):
        with pytest.raises(
            CheckpointError, match=f"has the states of {kept}, which .* to those of {asked}; set"
        ):
            load(path, states, {})
    assert content(states) == before
    load_checkpoint(info.path, states, {}, WEIGHT_PLANES)  # weights are the same with each
    assert content(states) != before


def test_elements_without_a_moment_are_neither_read_nor_written():
    part, plane = StateRange(0, 8, StateFormat.NONE, 0), np.empty(0, np.uint8)
    with pytest.raises(ValueError, match="elements 0 to 8 have no exp_avg_sq"):
        read_moments(plane, part, "exp_avg_sq")
    with pytest.raises(ValueError, match="elements 0 to 8 have no exp_avg_sq"):
        write_moments(plane, part, "exp_avg_sq", np.zeros(8, np.float32))
