"""Runs that begin with weights as publishers store them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from engine.train.run import start_run
from tests.support.folders import make_config
from tests.support.multimodal import make_multimodal
from tests.support.pickled_folders import pickle_weights
from tests.support.trained_runs import execute

pytestmark = pytest.mark.computing


def weights_of(folder) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def trained(tmp_path, **values):
    """The run's folder, after it has finished."""
    run = start_run(make_config(tmp_path, **values), tmp_path / "runs")
    ended = execute(run)
    assert ended.state == "finished", ended.reason
    return run.folder


@pytest.mark.parametrize("files", [1, 2])
def test_a_run_of_pickled_weights_is_that_of_the_same_safetensors(tmp_path, files):
    values = {"output.export": True, "train.steps": 3}
    first = weights_of(trained(tmp_path, **values).export_path)
    pickle_weights(tmp_path / "model", files)
    second = trained(tmp_path, **values).export_path
    assert not list(second.glob("*.bin"))
    again = weights_of(second)
    assert again.keys() == first.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name


def test_untouched_weights_of_a_pickled_model_are_copied_bit_by_bit(tmp_path):
    source = make_multimodal(tmp_path / "model", "gemma3")
    before = pickle_weights(source, 2)
    values = {"model.source": str(source), "output.export": True, "train.learning_rate": 1e-30}
    export = trained(tmp_path, **values).export_path
    after = weights_of(export)
    assert after.keys() == before.keys() and any("vision" in name for name in after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert not list(export.glob("*.bin*"))
