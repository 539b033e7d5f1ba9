"""A fixture that reads folders of models into planes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.model.build.pretrained_files import load_config
from engine.model.build.units import StreamedModel
from engine.runtime.host.host_states import HostStates
from engine.training.weights.weights import load_pretrained
from tests.support.checkpoints_of_families import bf16_model


@pytest.fixture
def poured():
    """Returns a function that reads a folder into planes, for a model that computes in bf16."""
    opened = []

    def pour(folder: Path) -> tuple[StreamedModel, HostStates]:
        model = bf16_model(folder, load_config(str(folder)))
        states = HostStates(model.layouts, "bfloat16", threads=1)
        opened.append(states)
        states.allocate_weights()
        load_pretrained(model, str(folder), states)
        return model, states

    yield pour
    for each in opened:
        each.close()
