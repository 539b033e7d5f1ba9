"""Law 2 with adapters: any plan gives the same bits, also where adapters drop a part of their
input, and a recompute drops the same.
"""

from __future__ import annotations

import pytest
import torch

from engine.config.adapters import Adapters
from engine.training.weights.adapter_weights import initialize_adapters
from tests.support.plans_with_adapters import BASE, planes_after
from tests.support.same_bits import assert_same_bits
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config
from tests.support.traced import without_kernels

pytestmark = pytest.mark.computing

PLANS = {
    "one slot": dict(slots=1),
    "three slots": dict(slots=3, prefetch_depth=2),
    "resident": dict(blocks_kept_in_slots=2),
    "kept": dict(blocks_without_recompute=2),
    "block inputs on the host": dict(offloaded_block_inputs=True, block_input_rings=1),
    "GPU-resident": dict(gpu_resident_units=2),
    "all GPU-resident": dict(gpu_resident_units=5),
    "GPU-resident apart": dict(
        gpu_resident_units=2, gpu_resident_apart=True, slots=3, prefetch_depth=2
    ),
    "gradients on the GPU": dict(gradients_on_gpu=True),
    "device updates": dict(device_updated_units=("block 1",), update_buffers=2),
}
EVERYWHERE = Adapters(rank=4)
DROPPING = Adapters(rank=4, dropout=0.3)
SOME = Adapters(rank=4, targets=("model.layers.1.self_attn.q_proj",), save_modules=("norm",))
"""Nothing of the first block is trained, so it has no backward."""


CASES = {"everywhere": EVERYWHERE, "dropping": DROPPING, "some": SOME}


@pytest.fixture(scope="module")
def reference():
    return {
        (case, dtype): planes_after(BASE, CASES[case], dtype)
        for case in CASES
        for dtype in ("float32", "bfloat16")
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("plan", PLANS)
def test_any_plan_gives_the_same_bits(reference, plan, case, dtype):
    choices = BASE.changed(**PLANS[plan])
    assert_same_bits(planes_after(choices, CASES[case], dtype), reference[case, dtype])


def test_dropout_changes_what_is_learned(reference):
    pairs = zip(reference["everywhere", "float32"], reference["dropping", "float32"])
    assert any(not torch.equal(one, other) for one, other in pairs)


@pytest.mark.slow("torch compiles several blocks, for five seconds or more")
def test_blocks_with_adapters_are_compiled(monkeypatch):
    """Compiled ones learn what eager ones do, and nothing is left uncompiled."""
    without_kernels(monkeypatch)
    plain = plain_model(tiny_config("llama"))
    found = []
    for is_compiled in (False, True):
        choices = BASE.changed(compiled=is_compiled)
        run = streamed(plain, choices, parts=EVERYWHERE)
        initialize_adapters(run.model, run.host_states, seed=7)
        losses = []
        for step in (1, 2):
            batches = random_batches(2, seed=step)
            run.engine.train_step(step, batches, 1e-2, lambda home: losses.append(home.loss))
            run.engine.drain()
        seconds, problems = run.engine.templates.compiling
        assert not problems and (seconds > 0) == is_compiled
        found.append(losses)
        run.close()
    assert found[1] == pytest.approx(found[0], rel=1e-5)
