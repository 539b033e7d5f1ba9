"""Fixtures that several tests of this folder use."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from engine.runs.record.events import PlanBuilt
from tests.support.bad_rows import bad_row  # noqa: F401  a fixture
from tests.support.disk_offloading import train
from tests.support.gpu_resident_runs import Written, keep_on_gpu  # noqa: F401  a fixture
from tests.support.trained_runs import events_of


@pytest.fixture(scope="module")
def in_ram(tmp_path_factory) -> Callable[..., Written]:
    """Returns what a run with these settings writes whose planes are all in RAM. It is asked before
    a test changes anything, and trains once for all tests of a file.
    """
    folder = tmp_path_factory.mktemp("in-ram")

    @functools.cache
    def written(**values) -> Written:
        run = train(folder, "runs", **values)
        choices = events_of(run, PlanBuilt)[0].choices
        assert choices["gpu_resident_units"] == choices["disk_offloaded_units"] == 0
        return Written.by(run)

    return written
