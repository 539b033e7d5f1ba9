"""Evaluation and sampling sweep over the units once for many micro-batches, and the loss is that of
plain transformers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.planning.fit.sampling_memory import CacheCost
from engine.planning.schedule.build import build_forward_plan
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import Lane
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.verify_plan import PlanError, verify_plan
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.sampling.answers import AnswerLimits
from engine.runtime.step import inference_passes
from engine.runtime.step.cross_entropy import cross_entropies
from tests.support.tiny import Streamed, plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOSS_BOUND = {"float32": 2e-7, "bfloat16": 2e-4}
"""Measured: 3e-8 and 6e-5. Logits in bf16 that were not upcast would be off by 4e-4 to 2e-3, a mean
of the means of micro-batches by 0.1.
"""
FAMILIES = ("qwen3", "gemma3_text", "gpt2", "mixtral")


class CountingBackend(CpuBackend):
    """It counts the ops that it is given, by lane."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[Lane] = Counter()

    def submit(self, lane, waits, work):
        self.counts[lane] += 1
        return super().submit(lane, waits, work)

    def fetches(self) -> int:
        """Returns how many units were fetched since the last call."""
        count = self.counts[Lane.H2D]
        self.counts.clear()
        return count


def uneven_batches():
    """Returns micro-batches whose rows, lengths and shares of loss tokens differ."""
    return [
        *random_batches(3, rows=2, length=12, seed=1, masked=0.1),
        *random_batches(2, rows=1, length=7, seed=2, masked=0.9),
        *random_batches(3, rows=2, length=9, seed=3, masked=0.6),
    ]


def opened(choices: PlanChoices, layers: int = 6, dtype: str = "float32") -> Streamed:
    config = tiny_config("qwen3", num_hidden_layers=layers)
    return streamed(plain_model(config), choices, backend=CountingBackend(), dtype=dtype)


def reference_loss(model: torch.nn.Module, batches) -> float:
    """Returns the mean over tokens, with float32 cross-entropies of the model's own logits."""
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for batch in batches:
            logits = model(input_ids=torch.from_numpy(batch.input_ids), use_cache=False).logits
            labels = torch.from_numpy(batch.labels).reshape(-1)
            logits = logits.float().view(-1, logits.shape[-1])
            total += float(F.cross_entropy(logits, labels, reduction="sum"))
            count += batch.loss_tokens
    return total / count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_that_of_transformers(family, dtype):
    config, batches = tiny_config(family), uneven_batches()
    run = streamed(plain_model(config), PlanChoices().changed(micro_batches=2), dtype=dtype)
    reference = plain_model(config).to(DTYPES[dtype])
    expected = reference_loss(reference, batches)
    assert run.engine.evaluate(batches) == pytest.approx(expected, rel=LOSS_BOUND[dtype])
    run.close()


def packed_batches():
    """Returns micro-batches of rows of several documents, one of which has no loss at all."""
    batches = []
    for seed, lengths in enumerate([(5, 4, 7), (9, 7), (16,)]):
        (batch,) = random_batches(1, rows=2, length=16, seed=seed, masked=0.3)
        positions = np.concatenate([np.arange(length) for length in lengths])
        labels = batch.labels.copy()
        labels[:, np.cumsum(lengths) - 1] = -100
        labels[1, :] = np.where(seed == 1, -100, labels[1, :])
        batches.append(
            dataclasses.replace(
                batch,
                labels=labels,
                position_ids=np.stack([positions] * 2),
                loss_tokens=int((labels >= 0).sum()),
            )
        )
    return batches


def document_losses(model: torch.nn.Module, batch, row: int) -> list[tuple[float, int]]:
    """Returns the sum of cross-entropies and the labels of each document of a packed row that has
    any, computed with the document alone.
    """
    starts = [*np.flatnonzero(batch.position_ids[row] == 0), batch.input_ids.shape[1]]
    found = []
    for start, end in itertools.pairwise(starts):
        ids = torch.from_numpy(batch.input_ids[row : row + 1, start:end])
        labels = torch.from_numpy(batch.labels[row, start:end])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
        if count := int((labels >= 0).sum()):
            found.append((float(F.cross_entropy(logits, labels, reduction="sum")), count))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_has_the_loss_of_transformers(family):
    """In chunks of five positions, which end within rows, and with several sweeps."""
    config, batches = tiny_config(family), uneven_batches()
    run = streamed(plain_model(config), PlanChoices().changed(micro_batches=2), loss_chunk=5)
    found = run.engine.evaluate_rows(batches)
    rows = [
        dataclasses.replace(
            batch,
            input_ids=batch.input_ids[row : row + 1],
            labels=batch.labels[row : row + 1],
            loss_tokens=int((batch.labels[row] >= 0).sum()),
        )
        for batch in batches
        for row in range(len(batch.labels))
    ]
    rows = [row for row in rows if row.loss_tokens]
    assert found.tokens.tolist() == [row.loss_tokens for row in rows]
    expected = [reference_loss(plain_model(config), [row]) * row.loss_tokens for row in rows]
    np.testing.assert_allclose(found.sums, expected, rtol=1e-6, atol=1e-6)
    assert found.loss == pytest.approx(found.sums.sum() / found.tokens.sum(), rel=1e-6)
    run.close()


def test_packed_rows_have_the_losses_of_their_documents():
    config, batches = tiny_config("qwen3"), packed_batches()
    run = streamed(plain_model(config), PlanChoices().changed(micro_batches=2), loss_chunk=7)
    found = run.engine.evaluate_rows(batches)
    plain = plain_model(config).eval()
    expected = [
        document
        for batch in batches
        for row in range(2)
        for document in document_losses(plain, batch, row)
    ]
    assert len(expected) > 4 and found.tokens.tolist() == [count for _, count in expected]
    np.testing.assert_allclose(found.sums, [loss for loss, _ in expected], rtol=2e-6)
    run.close()


def test_rows_have_the_same_bits_in_other_micro_batches_and_sweeps(monkeypatch):
    run = opened(PlanChoices().changed(micro_batches=2))
    batches = uneven_batches()
    whole = run.engine.evaluate_rows(batches)
    monkeypatch.setattr(inference_passes, "SWEEP_MICRO_BATCHES", 1)
    apart = run.engine.evaluate_rows(iter(batches))
    assert whole.sums.tobytes() == apart.sums.tobytes()
    assert whole.loss == apart.loss == run.engine.evaluate(batches)
    run.close()


def test_the_sum_has_the_bits_of_torch():
    """The log-probabilities are computed once for the sum and for the rows."""
    torch.manual_seed(0)
    for dtype in DTYPES.values():
        logits = torch.randn(257, 1000).to(dtype) * 8
        labels = torch.randint(0, 1000, (257,))
        labels[::3] = -100
        total, each = cross_entropies(logits, labels)
        assert total.equal(F.cross_entropy(logits.float(), labels, reduction="sum"))
        assert each.equal(F.cross_entropy(logits.float(), labels, reduction="none"))


def test_one_sweep_fetches_each_unit_once():
    """Eight micro-batches once took 64 fetches, where a training step takes 12."""
    run = opened(PlanChoices().changed(micro_batches=8))
    batches = random_batches(8, seed=4)
    run.backend.fetches()
    run.engine.evaluate(batches)
    assert run.backend.fetches() == 8  # embed, six blocks, head
    run.engine.train_step(1, batches, 1e-3)
    run.engine.drain()
    assert run.backend.fetches() == 12
    run.close()


@pytest.mark.parametrize(
    "changes, fetches",
    [
        # Two micro-batches at a time: four groups, of which each fetches the streamed blocks.
        (dict(offloaded_block_inputs=True), 2 + 4 * 6),
        (dict(offloaded_block_inputs=True, blocks_kept_in_slots=4), 2 + 4 + 4 * 2 - 3 * 2),
        (dict(offloaded_block_inputs=True, blocks_kept_in_slots=6), 2 + 6),
    ],
    ids=["all streamed", "two streamed", "all resident"],
)
def test_groups_that_fit_fetch_no_more_than_they_must(changes, fetches):
    """Resident units, and those whose slot still holds them, are not fetched again."""
    run = opened(PlanChoices().changed(micro_batches=2, **changes))
    batches = random_batches(8, seed=4)
    run.backend.fetches()
    loss = run.engine.evaluate(batches)
    assert run.backend.fetches() == fetches
    whole = opened(PlanChoices().changed(micro_batches=8))
    assert loss == whole.engine.evaluate(batches)
    run.close()
    whole.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_those_of_one_micro_batch_at_a_time(dtype):
    batches = uneven_batches()
    run = opened(PlanChoices().changed(micro_batches=2, blocks_kept_in_slots=2), dtype=dtype)
    total, count = 0.0, 0
    for batch in batches:
        counted = dataclasses.replace(batch, loss_tokens=1)
        total += run.engine.evaluate([counted])
        count += batch.loss_tokens
    assert run.engine.evaluate(batches) == total / count
    run.close()


def test_more_sweeps_than_one_keep_what_has_its_own_slot(monkeypatch):
    monkeypatch.setattr(inference_passes, "SWEEP_MICRO_BATCHES", 2)
    run = opened(PlanChoices().changed(micro_batches=2, blocks_kept_in_slots=3))
    run.backend.fetches()
    loss = run.engine.evaluate(random_batches(5, seed=4))
    assert run.backend.fetches() == 8 + 2 * 3
    monkeypatch.undo()
    assert run.engine.evaluate(random_batches(5, seed=4)) == loss
    run.close()


def test_a_long_sweep_is_divided_by_its_tokens(monkeypatch):
    batches = random_batches(4, rows=2, length=8)
    monkeypatch.setattr(inference_passes, "SWEEP_TOKENS", 32)
    assert [len(sweep) for sweep in inference_passes.sweeps(batches)] == [2, 2]
    monkeypatch.setattr(inference_passes, "SWEEP_TOKENS", 1)
    assert [len(sweep) for sweep in inference_passes.sweeps(batches)] == [1, 1, 1, 1]


def test_an_evaluation_after_a_step_has_the_new_weights():
    """Also within a scope of unchanged weights, as an answer that is not finished holds one."""
    run = opened(PlanChoices().changed(micro_batches=2, blocks_kept_in_slots=6))
    batches = random_batches(2, seed=4)
    with run.engine.on_same_weights():
        before = run.engine.evaluate(batches)
        run.engine.train_step(1, batches, 1e-2)
        run.engine.drain()
        run.backend.fetches()
        after = run.engine.evaluate(batches)
        assert run.backend.fetches() == 8
        assert run.engine.evaluate(batches) == after
        assert run.backend.fetches() == 0
    assert run.engine.evaluate(batches) == after < before
    assert run.backend.fetches() == 8
    run.close()


def test_sampling_fetches_resident_units_once():
    run = opened(PlanChoices().changed(blocks_kept_in_slots=4))
    assert isinstance(run.sampler.rows_cost, CacheCost)
    run.backend.fetches()
    (answer,) = run.sampler.generate([[3, 4, 5]], AnswerLimits(5, set()))
    assert len(answer) == 5
    assert run.backend.fetches() == 8 + 4 * 2  # of later tokens, two blocks each
    assert list(run.sampler.stream([3, 4, 5], AnswerLimits(5, set()))) == answer
    assert run.backend.fetches() == 8 + 4 * 2
    run.close()


def test_rows_without_a_cache_share_one_sweep(monkeypatch):
    run = opened(PlanChoices())
    rows = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13], [14] * 6]
    alone = torch.cat([run.engine.last_logits([row]) for row in rows])
    monkeypatch.setattr(inference_passes, "PASS_TOKENS", 8)
    run.backend.fetches()
    together = run.engine.last_logits(rows)
    assert run.backend.fetches() == 8
    torch.testing.assert_close(together, alone)
    run.close()


def test_an_evaluation_can_be_stopped():
    run = opened(PlanChoices().changed(micro_batches=2))
    calls = []

    def look() -> None:
        calls.append(1)
        if len(calls) == 20:
            raise KeyboardInterrupt

    batches = random_batches(4, seed=4)
    expected = run.engine.evaluate(batches)
    with pytest.raises(KeyboardInterrupt):
        run.engine.evaluate(batches, look)
    assert run.engine.evaluate(batches) == expected
    run.close()


def test_a_pass_whose_plan_lacks_a_wait_does_not_run(monkeypatch):
    def without_waits(*arguments) -> StepPlan:
        plan = build_forward_plan(*arguments)
        ops = tuple(dataclasses.replace(op, waits=(), waits_previous=()) for op in plan.ops)
        return dataclasses.replace(plan, ops=ops)

    run = opened(PlanChoices().changed(micro_batches=2))
    monkeypatch.setattr(inference_passes, "build_forward_plan", without_waits)
    with pytest.raises(PlanError):
        run.engine.evaluate(random_batches(2))
    with pytest.raises(PlanError):
        run.engine.last_logits([[3, 4, 5]])
    run.close()


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("resident", [0, 2, 4])
@pytest.mark.parametrize("micro_batches, groups", [(1, 1), (5, 2), (7, 3)])
def test_each_wait_of_a_pass_is_needed(micro_batches, groups, resident, held):
    choices = PlanChoices().changed(
        micro_batches=micro_batches, rounds=groups, blocks_kept_in_slots=resident
    )
    plan = build_forward_plan([f"block {i}" for i in range(4)], True, choices, held)
    verify_plan(plan)
    for op in plan.ops:
        for name in ("waits", "waits_previous"):
            for wait in getattr(op, name):
                left = tuple(other for other in getattr(op, name) if other != wait)
                ops = list(plan.ops)
                ops[op.index] = dataclasses.replace(op, **{name: left})
                with pytest.raises(PlanError):
                    verify_plan(dataclasses.replace(plan, ops=tuple(ops)))
