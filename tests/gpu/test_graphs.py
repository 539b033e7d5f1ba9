"""CUDA graphs of blocks: replayed steps have the bits of steps whose kernels are launched one by
one, also for rows of documents, and what cannot be recorded runs as it is.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.config.adapters import Adapters
from engine.runtime.device.cuda_backend import CudaBackend, cuda_available
from engine.training.weights.adapter_weights import initialize_adapters
from tests.support.block_graphs import PLAN_FAMILIES, WHOLE
from tests.support.same_bits import assert_same_bits
from tests.support.tiny import VOCAB, Batch, plain_model, streamed, tiny_config

pytestmark = [
    pytest.mark.computing,
    pytest.mark.skipif(not cuda_available(), reason="graphs are recorded on a GPU"),
]

STEPS = 6


@pytest.fixture(autouse=True)
def one_order_of_sums():
    """Kernels whose order of sums varies would differ without graphs, too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def batches_of(count, shape, seed, documents):
    """Micro-batches of random tokens. documents: each row is cut into up to so many."""
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        ids = generator.integers(3, VOCAB, shape)
        labels = np.full(shape, -100)
        labels[:, :-1] = ids[:, 1:]
        positions = None
        if documents:
            positions = np.tile(np.arange(shape[1]), (shape[0], 1))
            for row in positions:
                cuts = np.unique(generator.integers(1, shape[1], generator.integers(0, documents)))
                for cut in cuts:
                    row[cut:] -= row[cut]
        made.append(Batch(ids, labels, positions, ids.size, int((labels >= 0).sum())))
    return made


def planes_after(choices, graphs, family="qwen3", shapes=((2, 32),), documents=0, parts=None):
    """The planes after some steps, why blocks are not recorded, and the bytes reserved after each
    step. parts: adapters that are trained; None where the model is.
    """
    plain = plain_model(tiny_config(family))
    backend = CudaBackend()
    choices = choices.changed(graphs=graphs)
    how = dict(backend=backend, dtype="bfloat16", max_grad_norm=0.5, tokens=128, parts=parts)
    run = streamed(plain, choices, **how)
    if parts is not None:
        initialize_adapters(run.model, run.host_states, seed=7)
    reserved = []
    for step in range(1, STEPS * len(shapes) + 1):
        shape = shapes[step % len(shapes)]
        batches = batches_of(choices.batching.micro_batches, shape, step, documents)
        run.engine.train_step(step, batches, 1e-2)
        run.engine.drain()
        reserved.append(backend.memory()["reserved"])
    planes = run.kept_planes()
    problem = run.engine.unrecorded
    run.close()
    backend.close()
    return planes, problem, reserved


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("plan_family", PLAN_FAMILIES)
def test_replayed_blocks_have_the_same_bits(plan_family, compiled):
    choices = WHOLE.changed(**PLAN_FAMILIES[plan_family], compiled=compiled)
    planes, problem, reserved = planes_after(choices, graphs=True)
    assert not problem
    assert_same_bits(planes, planes_after(choices, graphs=False)[0])
    assert len(set(reserved[2:])) == 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_blocks_with_adapters_above_a_frozen_embedding(compiled):
    choices = WHOLE.changed(compiled=compiled, blocks_without_recompute=2)
    planes, problem, _ = planes_after(choices, True, parts=Adapters(rank=4))
    assert not problem
    assert_same_bits(planes, planes_after(choices, False, parts=Adapters(rank=4))[0])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_rows_of_documents_and_several_shapes(compiled):
    choices = WHOLE.changed(compiled=compiled, blocks_without_recompute=3)
    shapes = ((2, 64), (1, 48))
    planes, problem, _ = planes_after(choices, True, shapes=shapes, documents=9)
    assert not problem
    assert_same_bits(planes, planes_after(choices, False, shapes=shapes, documents=9)[0])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mixtral", "qwen3_moe", "mamba"])
def test_every_family_trains_whether_it_can_be_recorded_or_not(family):
    for documents in (0, 5):
        planes, problem, _ = planes_after(WHOLE, True, family, documents=documents)
        print(family, documents, problem)
        assert_same_bits(planes, planes_after(WHOLE, False, family, documents=documents)[0])
