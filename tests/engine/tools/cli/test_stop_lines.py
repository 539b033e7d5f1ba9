"""What the terminal says when a signal arrives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.runtime.collectives.rank import RankInfo
from engine.tools.cli.train import STEP_IS_FINISHED, _Screen
from engine.training.loop.run import start_run
from tests.support.folders import make_config


@pytest.mark.parametrize("is_urgent", [False, True])
@pytest.mark.parametrize("nodes", [1, 2])
def test_nodes_that_finish_their_step_say_what_is_not_saved(tmp_path, capfd, nodes, is_urgent):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    run.compute_with(SimpleNamespace(place=RankInfo(0, 1, nodes)))
    _Screen(run).interrupt(15, is_urgent)
    run.close()
    found = capfd.readouterr().err
    assert "Stopping after this step and saving" in found
    assert (STEP_IS_FINISHED in found) is (nodes == 2 and is_urgent)
