"""Runs with Muon resume to the bit, and do not take over what another optimizer kept."""

from __future__ import annotations

import pytest

from engine.training.loop.run import resume_run, start_run
from tests.support.folders import make_config, make_model
from tests.support.trained_runs import execute, files_of, resumed_to_the_end, trained

pytestmark = pytest.mark.computing

METHODS = {
    "full": {},
    "parts": {"train.method": "parts", "train.last_blocks": 1},
    "lora": {"train.method": "lora", "train.lora_rank": 4},
}


def train(tmp_path, name: str, at_step=None, **values):
    usual = {
        "train.optimizer": "muon",
        "output.checkpoint_every": 2,
        "output.keep_checkpoints": 9,
    }
    return trained(make_config(tmp_path, **usual | values), tmp_path / name, at_step)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("full", "bfloat16"), ("parts", "float32"), ("lora", "bfloat16")],
)
def test_a_stopped_run_goes_on_to_the_bit(tmp_path, dtype, method):
    values = METHODS[method] | {"model.dtype": dtype}
    whole = train(tmp_path, "whole", **values)
    stopped = train(tmp_path, "stopped", {3: "stop"}, **values)
    assert files_of(resumed_to_the_end(stopped))[8] == files_of(whole)[8]


@pytest.mark.parametrize(("kept", "asked"), [("adamw", "muon"), ("muon", "adamw")])
def test_states_of_another_optimizer_are_refused(tmp_path, kept, asked):
    stopped = train(tmp_path, "runs", {3: "stop"}, **{"train.optimizer": kept})
    again = resume_run(stopped.folder.path.parent, stopped.folder.id, [f"train.optimizer={asked}"])
    ended = execute(again)
    assert ended.state == "failed"
    assert "train.optimizer" in ended.reason
    assert "which changes what is kept of earlier gradients" in ended.reason


def test_a_run_that_trains_other_matrices_is_refused(tmp_path):
    make_model(tmp_path / "model", "mixtral")
    values = METHODS["lora"] | {"train.lora_target_parameters": ["experts.down_proj"]}
    config = make_config(tmp_path, **values | {"train.optimizer": "muon"})
    ended = execute(start_run(config, tmp_path / "runs"))
    assert ended.state == "failed"
    assert "train.optimizer: muon would orthogonalize updates of" in ended.reason
