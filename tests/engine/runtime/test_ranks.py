"""Several ranks train what one rank trains: to the bit where sums are added in the same order, and
elsewhere to the rounding of fp32.
"""

from __future__ import annotations

import pytest
import torch

from engine.config.settings import ModelConfig
from engine.model.build.build import build_model
from tests.support.optimizers import KINDS, decayed_in, torch_optimizer
from tests.support.rank_parity import EXACT, IN_ORDER, UNTIED, UPDATED_ON_DEVICE, assert_near
from tests.support.sets import FAMILY_SWEEP, slow_but
from tests.support.tiny import MOST_USED, plain_loss, plain_model, random_batches, tiny_config
from tests.support.trained_ranks import InTurn, Job, Trained, train

pytestmark = pytest.mark.computing


# ---------------------------------------------------------------------- to the bit


@pytest.mark.parametrize("dtype, ranks", [("float32", 2), ("bfloat16", 3)])
@pytest.mark.parametrize("family", slow_but(MOST_USED, ("llama", "mixtral"), FAMILY_SWEEP))
def test_ranks_with_one_micro_batch_have_the_bits_of_one_rank(family, dtype, ranks):
    """Weights are gathered as they are, sums are rounded once, and updates see the whole step."""
    job = Job(family, dtype, 3, ranks, UNTIED, IN_ORDER)
    several, one = train(ranks, job), train(1, job)
    several.assert_same_bits(one)
    assert [loss for loss, _ in several.steps] == [loss for loss, _ in one.steps]
    for (_, ours), (_, theirs) in zip(several.steps, one.steps):
        assert ours == pytest.approx(theirs, rel=1e-6)  # a norm is added up shard by shard


@pytest.mark.parametrize("ranks, optimizer", [(2, "adamw_bf16"), (3, "adamw_8bit")])
def test_so_they_have_where_moments_are_rounded(optimizer, ranks, monkeypatch):
    """No shard cuts a block of codes, and random bits depend on the place in the whole unit."""
    monkeypatch.setattr("engine.config.optimizers.SMALL", 256)
    job = Job("qwen3", "bfloat16", 3, ranks, UNTIED, IN_ORDER | {"optimizer": optimizer})
    train(ranks, job).assert_same_bits(train(1, job))


@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("device_updates", UPDATED_ON_DEVICE)
def test_so_they_have_where_optimizers_run_on_the_device(device_updates, optimizer, monkeypatch):
    """A shard is updated in chunks of its own, each with its part of the sum."""
    monkeypatch.setattr("engine.config.optimizers.SMALL", 256)
    job = Job("qwen3", "bfloat16", 2, 2, UNTIED, IN_ORDER | {"optimizer": optimizer})
    several, one = (train(ranks, job, **UPDATED_ON_DEVICE[device_updates]) for ranks in (2, 1))
    several.assert_same_bits(one)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("family", slow_but(EXACT, ("ernie4_5_moe",), FAMILY_SWEEP))
def test_so_they_have_where_weights_stay_in_fp32(family, ranks):
    """Whatever shard a router begins in, every rank computes with all bits of it."""
    job = Job(family, "bfloat16", 2, ranks, {}, IN_ORDER, exact=True)
    train(ranks, job).assert_same_bits(train(1, job))


def test_so_they_have_with_dropout():
    """A row is masked alike on whichever rank it is."""
    dropout = dict(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    job = Job("gpt2", "bfloat16", 2, 2, UNTIED | dropout, IN_ORDER)

    def trained(ranks: int, job: Job) -> Trained:
        return train(ranks, job, lambda _: InTurn())

    one = trained(1, job)
    trained(2, job).assert_same_bits(one)
    without = trained(1, Job("gpt2", "bfloat16", 2, 2, UNTIED, IN_ORDER))
    assert without.steps[0][0] != pytest.approx(one.steps[0][0], rel=1e-3)


def test_masks_do_not_depend_on_how_many_micro_batches_a_rank_has():
    dropout = dict(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    job = Job("gpt2", "float32", 2, 4, dropout)
    one, two = (train(ranks, job, lambda _: InTurn()) for ranks in (1, 2))
    assert_near(two, one)


# ---------------------------------------------------------------------- to the rounding of fp32


@pytest.mark.parametrize("ranks, tied", [(2, True), (4, False)])
@pytest.mark.parametrize("family", slow_but(MOST_USED, ("gemma3_text",), FAMILY_SWEEP))
def test_ranks_train_what_one_rank_trains(family, ranks, tied):
    job = Job(family, steps=10, changes={"tie_word_embeddings": tied})
    assert_near(train(ranks, job), train(1, job))


@pytest.mark.parametrize("ranks, tied", [(2, True), (3, False)])
def test_so_they_do_where_each_round_adds_up_shards(ranks, tied):
    job = Job("qwen3", steps=10, micro_batches=3 * ranks, changes={"tie_word_embeddings": tied})
    shards = dict(rounds=3, main_grad="shards")
    found = train(ranks, job, **shards)
    assert_near(found, train(1, job))
    found.assert_same_bits(train(ranks, job, **shards))


def test_ranks_train_what_plain_torch_trains():
    config = tiny_config("qwen3", tie_word_embeddings=True)
    job = Job("qwen3", steps=10, changes={"tie_word_embeddings": True})
    found, plain = train(2, job), plain_model(config)
    layouts = build_model(config, ModelConfig(source="tiny", dtype="float32")).layouts
    optimizer = torch_optimizer(dict(plain.named_parameters()), decayed_in(layouts))
    for step, (ours, our_norm) in enumerate(found.steps, start=1):
        loss = plain_loss(plain, random_batches(job.micro_batches, seed=step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert ours == pytest.approx(loss.item(), rel=2e-5)
        assert our_norm == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    weights = dict(plain.named_parameters())
    seen = set()
    for layout in layouts:
        plane = found.planes[layout.unit, "weight_high"]
        for spec, offset in zip(layout.parameters, layout.offsets):
            mine = plane[offset : offset + spec.numel].view(spec.shape)
            torch.testing.assert_close(mine, weights[spec.full_name].detach(), rtol=1e-4, atol=2e-5)
            seen.add(spec.full_name)
    assert seen == set(weights)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_in_bf16_a_gradient_differs_by_its_last_bit_alone(tied):
    """Sums over ranks are fp32 sums in another order. They are rounded once, after all are added:
    of 2**15 numbers, about one ends on the other side, by one unit in the last place.
    """
    job = Job("qwen3", "bfloat16", 1, 4, {"tie_word_embeddings": tied})
    one, two = train(1, job), train(2, job)
    differing = total = 0
    for (unit, plane), theirs in one.planes.items():
        if plane != "grad":
            continue
        steps = (_ordered(two.planes[unit, plane]) - _ordered(theirs)).abs()
        assert steps.max() <= 1, unit
        differing, total = differing + int(steps.sum()), total + steps.numel()
    assert differing <= 10 < total / 2000


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Returns the place of each bf16 number among all of them, int32 [n]."""
    bits = values.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
