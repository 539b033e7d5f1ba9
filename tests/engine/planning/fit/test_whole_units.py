"""An optimizer that needs units whole gets plans in which none is cut, and refuses settings that
would cut one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import ConfigError
from engine.planning.fit.choose import choose
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.job import Job, Target, numbers_of_ranks
from engine.text import GIB
from tests.support.chosen import FAST_RATES, big_shape, config

MUON = {"train__optimizer": "muon"}


def chosen(gpu: float, **changes) -> Chosen:
    target = Target("cuda", round(gpu * GIB), 150 * GIB, FAST_RATES)
    shape = big_shape().with_optimizer("muon")
    return choose(Job(shape, config(**MUON, **changes), 1024), target)


@pytest.mark.parametrize(("gpu", "rows"), [(24, 32), (80, 148)])
def test_no_unit_is_cut(gpu, rows):
    choices = chosen(gpu, train__batch_size=rows).choices
    assert choices.updates.update_chunks == 1 and not choices.gradients.gradients_on_gpu
    assert numbers_of_ranks(config(**MUON, train__batch_size=rows), 4, {}) == (1,)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("engine.gradients", {"engine__gradients": "gpu"}),
        ("engine.disk", {"engine__disk": "/disk"}),
    ],
)
def test_settings_that_cut_units_are_refused_by_name(name, changes):
    job = Job(big_shape().with_optimizer("muon"), config(**MUON, **changes), 1024)
    with pytest.raises(ConfigError, match=f"{name}: muon updates a unit as a whole"):
        choose(job, Target("cuda", 80 * GIB, 200 * GIB, FAST_RATES, 1 << 50))


@pytest.mark.parametrize("numbers", [{"ranks": 2}, {"ranks": 2, "nodes": 2}])
def test_several_gpus_and_nodes_are_refused_with_what_to_do(numbers):
    job = Job(big_shape().with_optimizer("muon"), config(**MUON), 1024, **numbers)
    with pytest.raises(ConfigError) as caught:
        choose(job, Target("cuda", 80 * GIB, 200 * GIB, FAST_RATES, 1 << 50))
    assert str(caught.value) == (
        "engine.gpus: muon trains on one GPU of one node; set engine.gpus to 1 and start one node, "
        "or set train.optimizer to adamw."
    )


def test_a_model_whose_matrices_are_not_all_linear_is_refused_by_name():
    shape = replace(big_shape(), non_linear_matrix="model.layers.0.mixer.A_log")
    target = Target("cuda", 80 * GIB, 200 * GIB, FAST_RATES)
    with pytest.raises(ConfigError) as caught:
        choose(Job(shape.with_optimizer("muon"), config(**MUON), 1024), target)
    assert str(caught.value) == (
        "train.optimizer: muon would orthogonalize updates of model.layers.0.mixer.A_log of "
        f"{shape.model_type}, which has two dimensions but is not the weight of one linear layer; "
        "set train.optimizer to adamw."
    )
    choose(Job(shape, config(), 1024), target)
