"""An optimizer that needs units whole gets plans in which none is cut, and refuses settings that
would cut one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.optimizers import ADAMW, OPTIMIZERS
from engine.errors import ConfigError
from engine.planning.fit.choose import choose
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.job import Job, Target, numbers_of_ranks
from engine.text import GIB
from tests.support.chosen import FAST_RATES, big_shape, config


@pytest.fixture
def whole_units(monkeypatch):
    monkeypatch.setitem(
        OPTIMIZERS, ADAMW, replace(OPTIMIZERS[ADAMW], grain=None, has_two_passes=False)
    )


def chosen(gpu: float, **changes) -> Chosen:
    target = Target("cuda", round(gpu * GIB), 150 * GIB, FAST_RATES)
    return choose(Job(big_shape(), config(**changes), 1024), target)


@pytest.mark.parametrize(("gpu", "rows"), [(24, 32), (80, 148)])
def test_no_unit_is_cut(whole_units, gpu, rows):
    choices = chosen(gpu, train__batch_size=rows).choices
    assert choices.updates.update_chunks == 1 and not choices.gradients.gradients_on_gpu
    assert numbers_of_ranks(config(train__batch_size=rows), 4, {}) == (1,)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("engine.gradients", {"engine__gradients": "gpu"}),
        ("engine.disk", {"engine__disk": "/disk"}),
        ("engine.gpus", {"engine__gpus": 2}),
    ],
)
def test_settings_that_cut_units_are_refused_by_name(whole_units, name, changes):
    job = Job(big_shape(), config(**changes), 1024, ranks=changes.get("engine__gpus", 1))
    with pytest.raises(ConfigError, match=f"{name}: adamw updates a unit as a whole"):
        choose(job, Target("cuda", 80 * GIB, 200 * GIB, FAST_RATES, 1 << 50))
