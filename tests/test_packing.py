"""Packed documents do not see each other: loss and gradients of a packed row equal those of the documents alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model import PACKING_FAMILIES
from engine.planner import PlanChoices
from tests.tiny import VOCAB, Batch, plain_model, streamed, tiny_config

LENGTHS = (9, 4, 11)


def packed_and_apart() -> tuple[list[Batch], list[Batch]]:
    generator = np.random.default_rng(5)
    documents = [generator.integers(3, VOCAB, n) for n in LENGTHS]
    labels = [np.append(d[1:], -100) for d in documents]
    count = sum(n - 1 for n in LENGTHS)
    packed = Batch(np.concatenate(documents)[None], np.concatenate(labels)[None],
                   np.concatenate([np.arange(n) for n in LENGTHS])[None], sum(LENGTHS), count)
    apart = [Batch(d[None], t[None], None, len(d), len(d) - 1) for d, t in zip(documents, labels)]
    return [packed], apart


def gradients(plain, batches: list[Batch]) -> tuple[float, torch.Tensor]:
    run = streamed(plain, PlanChoices(micro_batches=len(batches)), max_grad_norm=None)
    homes = []
    run.engine.train_step(1, batches, 0.0, homes.append)
    run.engine.drain()
    flat = torch.cat([run.store.tensor(unit.name, "grad").clone() for unit in run.model.units])
    run.close()
    return homes[0].loss, flat


@pytest.mark.parametrize("family", sorted(PACKING_FAMILIES))
def test_packed_documents_do_not_leak(family):
    plain = plain_model(tiny_config(family))
    packed, apart = packed_and_apart()
    loss, flat = gradients(plain, packed)
    loss_apart, flat_apart = gradients(plain, apart)
    assert loss == pytest.approx(loss_apart, rel=1e-5)
    assert (flat - flat_apart).norm() / flat_apart.norm() < 1e-5
    # Without positions that restart, the documents would see each other: the comparison can tell.
    leaking = [Batch(packed[0].input_ids, packed[0].labels, None, packed[0].tokens, packed[0].loss_tokens)]
    assert (gradients(plain, leaking)[1] - flat_apart).norm() / flat_apart.norm() > 1e-3
