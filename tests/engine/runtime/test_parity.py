"""Law 1: streamed training equals plain transformers + clip_grad_norm_ + torch.optim.AdamW, in
float32.
"""

from __future__ import annotations

import pytest

from engine.planning.schedule.choices import PlanChoices
from tests.support.optimizers import ORACLES
from tests.support.parity import compare, uneven
from tests.support.tiny import FAMILIES

pytestmark = pytest.mark.computing


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_training_equals_plain_training(family, tied):
    compare(family, tied, 2, PlanChoices().changed(micro_batches=2))


@pytest.mark.parametrize("optimizer", ORACLES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_one_micro_batch(family, optimizer):
    compare(family, False, 1, PlanChoices().changed(micro_batches=1), optimizer=optimizer)


@pytest.mark.parametrize("main_grad", ["device", "host"])
def test_rounds(main_grad):
    """In float32 the host's sum is as exact as the device's."""
    compare("qwen2", True, 4, PlanChoices().changed(micro_batches=4, rounds=2, main_grad=main_grad))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(rounds=3, main_grad="device", blocks_without_recompute=2),
        dict(offloaded_block_inputs=True, block_input_rings=1),
    ],
    ids=["plain", "rounds", "block inputs on the host"],
)
def test_uneven_micro_batches(changes):
    compare("qwen2", False, 3, PlanChoices().changed(micro_batches=3, **changes), uneven, tokens=36)


@pytest.mark.parametrize("optimizer", ORACLES)
@pytest.mark.parametrize("main_grad,rounds", [("vertical", 1), ("device", 2), ("host", 2)])
def test_the_optimizer_on_the_device(main_grad, rounds, optimizer):
    compare(
        "llama",
        rounds == 2,
        2,
        PlanChoices().changed(
            micro_batches=2,
            rounds=rounds,
            main_grad=main_grad,
            blocks_kept_in_slots=1,
            blocks_without_recompute=1,
            device_updated_units=("embed", "block 0", "block 2", "head"),
            update_buffers=2,
        ),
        optimizer=optimizer,
    )
