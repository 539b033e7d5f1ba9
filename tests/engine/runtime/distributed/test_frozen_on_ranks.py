"""Ranks share frozen weights, wherever these are: in RAM, which has them once, and on the devices.
Adapters and parts are trained alike by all plans for several ranks, and by several nodes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.config.adapters import Adapters
from engine.config.trained_parts import Parts
from engine.planning.layout.layout import ParameterSpec, lay_out
from engine.runtime.host.cross_node_planes import Nodes, NodeShards
from tests.support.planes_of_nodes import trained_planes
from tests.support.tiny import random_batches
from tests.support.worker_groups import (
    forked_workers,  # noqa: F401  a fixture
    started_group,
)

SWEEP = "it starts one to three processes, for five seconds or more"
PARTS = {
    "adapters": Adapters(rank=4),
    "some": Adapters(rank=3, targets=("model.layers.1.self_attn.q_proj",), save_modules=("norm",)),
    "last block": Parts(last_blocks=1),
}
PLANS = {
    "unsharded reads": dict(unsharded_reads=True),
    "GPU-resident": dict(gpu_resident_units=3),
    "all GPU-resident": dict(gpu_resident_units=5),
    "device_updates": dict(
        gradients_on_gpu=True, device_updated_units=("block 1",), update_buffers=1
    ),
}
CASES = [
    ("adapters", "unsharded reads"),
    ("some", "GPU-resident"),
    ("adapters", "all GPU-resident"),
    ("adapters", "device_updates"),
    ("last block", "unsharded reads"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("frozen") / "model"


def found_by(model: Path, ranks: int, nodes: int = 1, **choices) -> tuple[dict, float]:
    """Returns the planes after three steps, and the loss of an evaluation."""
    with started_group(model, ranks, 4, nodes, **choices) as workers:
        before = frozen_of(workers.host_states)
        workers.train(1, 2, 3)
        assert frozen_of(workers.host_states) == before and before
        loss = workers.engine.evaluate(random_batches(3))
        return trained_planes(workers), loss


def frozen_of(states) -> dict[str, bytes]:
    """Returns the weights of each unit that are not trained."""
    found = {}
    for unit, layout in states.layouts.items():
        begin, end = layout.frozen_range("float32")
        if begin < end:
            found[unit] = states.content(unit, "weight_high", begin, end).tobytes()
    return found


@pytest.fixture(scope="module")
def usual(model):
    made: dict[str, tuple[dict, float]] = {}

    def get(name: str) -> tuple[dict, float]:
        if name not in made:
            made[name] = found_by(model, 2, parts=PARTS[name])
        return made[name]

    return get


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_plan_gives_the_same_bits(model, usual, case):
    name, plan = case
    found, expected = found_by(model, 2, parts=PARTS[name], **PLANS[plan]), usual(name)
    assert found == expected


@pytest.mark.slow(SWEEP)
@pytest.mark.parametrize("name, choices", [("adapters", {}), ("some", {"gpu_resident_units": 2})])
def test_nodes_with_copies_train_what_one_node_trains(model, usual, name, choices):
    found, loss = found_by(model, 1, 2, parts=PARTS[name], **choices)
    expected, of_one = usual(name)
    assert loss == pytest.approx(of_one, rel=1e-5)
    for key, held in found.items():
        ours, theirs = (np.frombuffer(each, np.float32) for each in (held, expected[key]))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6, err_msg=str(key))


def test_frozen_weights_are_divided_among_no_nodes():
    layout = lay_out("block 0", [ParameterSpec("a", "a", (64, 8), True, frozen=True)])
    with pytest.raises(ValueError, match="frozen weights are divided among no nodes"):
        NodeShards({"block 0": layout}, "float32", lambda: "adamw", Nodes(2, ranks=2))
