"""Runs for tests of the engine to break, and the whole run that a broken one has to equal."""

from __future__ import annotations

import pytest

from engine.training.loop.run import start_run
from tests.support.counted_once import counting_once
from tests.support.folders import make_config
from tests.support.trained_runs import execute

COUNTED = {"fit", "model", "runtime"}
"""In these rooms, tests are about what is counted for a model."""


@pytest.fixture(scope="module", autouse=True)
def models_are_counted_once(request):
    """Counts the activations of a model once for all runs that train it."""
    if request.path.parent.name in COUNTED:
        yield
    else:
        yield from counting_once()


@pytest.fixture
def runs(tmp_path):
    """Returns the folder of the test's runs, which need not exist yet."""
    return tmp_path / "runs"


@pytest.fixture
def preset(tmp_path):
    """Returns the file with the settings of a small run."""
    path = tmp_path / "preset.yaml"
    make_config(tmp_path).save(path)
    return path


@pytest.fixture
def stopped_run(tmp_path, runs):
    """Returns a run that was stopped after step 6, with the checkpoints of two steps."""
    run = start_run(make_config(tmp_path), runs)
    assert execute(run, {6: "stop"}).state == "stopped"
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a run of the same settings that nothing has broken. Tests read it and change nothing,
    so those of a file share it.
    """
    folder = tmp_path_factory.mktemp("whole")
    run = start_run(make_config(folder), folder / "runs")
    assert execute(run).state == "finished"
    return run
