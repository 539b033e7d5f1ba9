"""The loss that balances the experts of a mixture: training equals plain transformers with it, any
plan and any ranks give the same bits, and nothing but training steps has it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.config.settings import ModelConfig
from engine.config.trained_parts import Parts
from engine.model.build.build import _BALANCED, build_model
from engine.planning.schedule.choices import PlanChoices
from tests.support.families import tiny_family_config
from tests.support.family_parity import law_one
from tests.support.parity import compare
from tests.support.rank_parity import IN_ORDER
from tests.support.recorders import AgainRecorder, RecordingBackend
from tests.support.same_bits import SAME_BITS, assert_same_bits
from tests.support.sets import FAMILY_SWEEP, slow_but
from tests.support.tiny import Batch, plain_model, random_batches, streamed
from tests.support.traced import without_kernels
from tests.support.trained_ranks import Job, train

pytestmark = [pytest.mark.slow("a plain run has shorter tests of the same"), pytest.mark.computing]

BASE = PlanChoices().changed(micro_batches=2)
COEFFICIENT = 0.3
ASKED = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
FEW = ("mixtral", "qwen3_moe", "ernie4_5_moe")
"""The first block of the last has no router."""


def asked(family: str, **changes):
    return tiny_family_config(family, **ASKED | changes)


def padded(count: int, rows: int = 3, tokens: int = 12, seed: int = 0) -> list[Batch]:
    """Micro-batches of rows of several lengths, with several numbers of labels."""
    found = []
    for number, batch in enumerate(random_batches(count, rows, tokens, seed=seed)):
        lengths = np.array([12, 9 - number, 4])
        for row, length in enumerate(lengths):
            batch.labels[row, length - 1 :] = -100
            batch.input_ids[row, length:] = 0
        loss_tokens = int((batch.labels >= 0).sum())
        found.append(dataclasses.replace(batch, lengths=lengths, loss_tokens=loss_tokens))
    return found


def made(count: int, seed: int) -> list[Batch]:
    return padded(count, seed=seed)


def balanced_loss(model: torch.nn.Module, batches: list[Batch]) -> torch.Tensor:
    """Returns the loss of plain transformers, whose own code makes the part of the routers."""
    total, loss = sum(batch.loss_tokens for batch in batches), torch.zeros(())
    for batch in batches:
        own = torch.arange(batch.input_ids.shape[1]) < torch.from_numpy(batch.lengths)[:, None]
        out = model(
            input_ids=torch.from_numpy(batch.input_ids),
            attention_mask=own.long(),
            output_router_logits=True,
            use_cache=False,
        )
        labels = torch.from_numpy(batch.labels).reshape(-1)
        logits = out.logits.float().view(-1, out.logits.shape[-1])
        loss = loss + F.cross_entropy(logits, labels, reduction="sum") / total
        loss = loss + COEFFICIENT * out.aux_loss.float() * (batch.loss_tokens / total)
    return loss


@pytest.mark.parametrize("family", slow_but(_BALANCED, FEW, FAMILY_SWEEP))
def test_training_equals_plain_training(family):
    law_one(asked(family), True, 12, 3, 10, padded, balanced_loss)


@pytest.mark.parametrize(
    "changes",
    [
        dict(micro_batches=1),
        dict(micro_batches=4, rounds=2, main_grad="device", blocks_without_recompute=2),
        dict(micro_batches=2, offloaded_block_inputs=True),
    ],
    ids=str,
)
def test_it_does_with_other_plans(changes):
    choices, how = (
        PlanChoices().changed(**changes),
        dict(config=asked("mixtral"), loss_of=balanced_loss),
    )
    compare("mixtral", False, choices.batching.micro_batches, choices, made, 36, **how)


def planes_after(choices, dtype="float32", parts=None, backend=None):
    plain = plain_model(asked("qwen3_moe"))
    run = streamed(plain, choices, tokens=36, dtype=dtype, parts=parts, backend=backend)
    return run.planes_after(choices.batching.micro_batches, made=padded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_plan_gives_the_same_bits(dtype):
    expected = planes_after(BASE, dtype=dtype)
    for name in list(SAME_BITS)[::3]:
        choices = BASE.changed(**SAME_BITS[name])
        assert_same_bits(planes_after(choices, dtype=dtype), expected)


def test_blocks_are_not_recorded_and_the_run_says_why():
    """They count what changes from step to step."""
    whole = BASE.changed(gpu_resident_units=6)
    recorded, backend = whole.changed(graphs=True), RecordingBackend(AgainRecorder())
    assert_same_bits(planes_after(recorded, backend=backend), planes_after(whole))
    run = streamed(
        plain_model(asked("qwen3_moe")), recorded, backend=RecordingBackend(AgainRecorder())
    )
    assert "output_router_logits" in run.engine.unrecorded
    run.close()


def test_frozen_blocks_count_too():
    last = Parts(last_blocks=1)
    expected = planes_after(BASE, parts=last)
    assert_same_bits(planes_after(BASE.changed(blocks_without_recompute=1), parts=last), expected)


def test_ranks_have_the_bits_of_one_rank():
    job = Job("mixtral", "bfloat16", 3, 2, {**ASKED, "tie_word_embeddings": False}, IN_ORDER)
    several, one = train(2, job), train(1, job)
    several.assert_same_bits(one)
    assert [loss for loss, _ in several.steps] == [loss for loss, _ in one.steps]
    plain = train(1, dataclasses.replace(job, changes={"tie_word_embeddings": False}))
    assert [loss for loss, _ in plain.steps] != [loss for loss, _ in one.steps]


@pytest.mark.parametrize("family", FEW)
def test_steps_in_bf16_are_nearly_those_of_plain_transformers(family):
    plain = plain_model(asked(family))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    run, applied = streamed(plain, BASE, tokens=36, dtype="bfloat16"), []
    batches = padded(2, seed=1)
    run.engine.train_step(1, batches, 0.0, applied.append)
    run.engine.drain()
    loss = balanced_loss(plain, batches)
    loss.backward()
    assert applied[0].loss == pytest.approx(loss.item(), rel=2e-3)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    assert applied[0].grad_norm == pytest.approx(norm.item(), rel=2e-2)
    run.close()


@pytest.mark.slow("torch traces the blocks of a mixture, for some seconds")
@pytest.mark.usefixtures("quick_compiler")
def test_a_compiled_plan_has_the_same_loss(monkeypatch):
    without_kernels(monkeypatch)
    losses = []
    for choices in (BASE, BASE.changed(compiled=True)):
        run, applied = streamed(plain_model(asked("mixtral")), choices, tokens=36), []
        for step in (1, 2):
            run.engine.train_step(step, padded(2, seed=step), 1e-3, applied.append)
        run.engine.drain()
        assert not run.engine.uncompiled
        losses.append([(each.loss, each.grad_norm) for each in applied])
        run.close()
    for ours, theirs in zip(losses[1], losses[0]):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_evaluations_and_samples_are_without():
    found = []
    for config in (asked("mixtral"), tiny_family_config("mixtral")):
        run = streamed(plain_model(config), BASE, tokens=36)
        run.engine.train_step(1, padded(2, seed=1), 0.0)
        run.engine.drain()
        found.append((run.engine.evaluate(padded(3, seed=5)), run.engine.last_logits([[5, 6, 7]])))
        run.close()
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_the_configuration_is_kept_as_it_is():
    model = build_model(asked("mixtral"), ModelConfig(source="tiny", dtype="float32"))
    assert model.config.output_router_logits is True
    assert model.router_loss.routers == {f"block {at}": "mlp.gate" for at in range(4)}
