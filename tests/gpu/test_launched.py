"""Processes that `torchrun` starts, one on each GPU: they meet through NCCL, on one node or on two,
compute what one run with processes of its own computes, and end with it.
"""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
import torch

from engine.training.loop.run import start_run
from tests.support.folders import make_config
from tests.support.launches import SETTINGS, preset_of
from tests.support.trained_launches import figures, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices"),
]
ON_GPUS = {
    "engine.device": "cuda",
    "engine.kernels": "eager",
    "engine.across_nodes": "replicate",
}


@pytest.mark.parametrize("nodes, ranks", [(1, 2), (2, 1)])
def test_it_trains_what_a_run_with_processes_of_its_own_trains(tmp_path, nodes, ranks):
    preset = preset_of(tmp_path / "preset", **ON_GPUS)
    own = make_config(tmp_path / "preset", **SETTINGS | ON_GPUS | {"engine.gpus": 2})
    run = start_run(own, tmp_path / "plain")
    assert run.execute().state == "finished"
    runs = trained(tmp_path, preset, nodes, ranks, 0, subprocess.Popen)
    np.testing.assert_allclose(figures(runs), figures(tmp_path / "plain"), rtol=1e-5)
