"""Blocks that share a template keep what is their own, and blocks of unlike kinds share none."""

from __future__ import annotations

import pytest
import torch

from engine.planning.schedule.choices import PlanChoices
from tests.support.families import tiny_family_config
from tests.support.tiny import plain_loss, plain_model, random_batches, streamed

pytestmark = pytest.mark.computing

CHOICES = PlanChoices().changed(micro_batches=2)
LENGTH = 12
"""Rows are longer than the window of sliding attention, which has eight tokens."""
BIAS = "e_score_correction_bias"


def test_every_block_computes_with_its_own_buffers():
    """The routers of three blocks of one kind send tokens to unlike experts."""
    plain = plain_model(tiny_family_config("deepseek_v3"))
    buffers = {name: b for name, b in plain.named_buffers() if name.endswith(BIAS)}
    for number, buffer in enumerate(buffers.values()):
        buffer.copy_(8.0 * torch.tensor([0, 1, 2, 3]).roll(number))
    run, batches = streamed(plain, CHOICES), random_batches(2, length=LENGTH)
    for name, buffer in buffers.items():
        run.model.persistent_buffers()[name].copy_(buffer)
    found = run.engine.evaluate(batches)
    shared = [unit.kind for unit in run.model.blocks]
    run.close()
    assert len(buffers) == 3 and len(set(shared)) == 2
    with torch.no_grad():
        expected = plain_loss(plain, batches).item()
        for buffer in buffers.values():
            buffer.copy_(next(iter(buffers.values())))
        alike = plain_loss(plain, batches).item()
    assert found == pytest.approx(expected, rel=1e-5) != pytest.approx(alike, rel=1e-4)


@pytest.mark.parametrize("family", ["smollm3", "cohere2"])
def test_blocks_of_equal_shapes_and_unlike_attention_share_no_template(family):
    """Rotary or not, sliding or full: attributes of modules tell, not the shapes."""
    plain = plain_model(tiny_family_config(family))
    run, batches = streamed(plain, CHOICES), random_batches(2, length=LENGTH)
    shapes = {tuple(spec.shape for spec in u.layout.parameters) for u in run.model.blocks}
    kinds = {unit.kind for unit in run.model.blocks}
    found = run.engine.evaluate(batches)
    run.close()
    with torch.no_grad():
        assert found == pytest.approx(plain_loss(plain, batches).item(), rel=1e-5)
    assert len(shapes) == 1 and len(kinds) == 2
