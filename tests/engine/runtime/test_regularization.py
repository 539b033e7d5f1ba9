"""Label smoothing and noise on embeddings: training equals plain transformers with the same, any
plan and any ranks give the same bits, and nothing else is changed by them.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from engine.config.regularization import NO_REGULARIZATION
from engine.config.trained_parts import Parts
from engine.data.batches.packing import one_each
from engine.data.batches.rows import DocumentTokens, Order, RowSet, batches
from engine.errors import ModelError
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.compiled import compiled_function
from engine.runtime.step.cross_entropy import IGNORED, smoothed
from engine.runtime.step.neftune import RowNoise, StepNoise
from tests.support.bf16_parity import Rows, compare_in_bf16
from tests.support.compiled import needs_compiler
from tests.support.families import tiny_family_config
from tests.support.family_parity import SUPPORTED
from tests.support.gradients_on_gpu import EMBED_AND_HEAD, TALL
from tests.support.parity import compare, uneven
from tests.support.rank_parity import IN_ORDER, UNTIED
from tests.support.regularized import PlainStep
from tests.support.regularized_plans import BASE, BOTH, NOISY, SMOOTHED, planes_after
from tests.support.same_bits import SAME_BITS, assert_same_bits
from tests.support.sets import FAMILY_SWEEP, slow_but
from tests.support.tiny import FAMILIES, Batch, plain_model, random_batches, streamed, tiny_config
from tests.support.traced import without_kernels
from tests.support.trained_ranks import Job, train

pytestmark = [pytest.mark.slow("a plain run has shorter tests of the same"), pytest.mark.computing]

KINDS = {"smoothed": SMOOTHED, "noisy": NOISY, "both": BOTH}
FEW = ("llama", "gemma3_text", "gpt2")


# ------------------------------------------------------------------ beside plain transformers


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", slow_but(FAMILIES, FEW, FAMILY_SWEEP))
def test_training_in_float32_equals_plain_training(family, tied):
    """Gemma scales what it looks up, before the noise; GPT-2 adds positions, after it."""
    compare(family, tied, 2, BASE, regularization=BOTH)


@pytest.mark.parametrize("kind", ["smoothed", "noisy"])
def test_each_alone_equals_plain_training(kind):
    compare("qwen2", True, 2, BASE, regularization=KINDS[kind])


def test_rows_of_several_lengths_have_noise_of_their_own_strength():
    def made(_: int, seed: int) -> list[Batch]:
        found, first = [], 0
        for batch in uneven(3, seed):
            rows, length = batch.input_ids.shape
            lengths = np.arange(length - rows + 1, length + 1)
            for row, own in enumerate(lengths):
                batch.labels[row, own - 1 :] = -100
            count = int((batch.labels >= 0).sum())
            places = np.arange(first, first + rows)[::-1]
            found.append(
                dataclasses.replace(batch, places=places, lengths=lengths, loss_tokens=count)
            )
            first += rows
        return found

    choices = PlanChoices().changed(
        micro_batches=3, rounds=3, main_grad="device", blocks_without_recompute=1
    )
    compare("llama", False, 3, choices, made, 36, BOTH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", slow_but(FEW, ("llama",), FAMILY_SWEEP))
def test_training_in_bf16_equals_plain_training(family, kind):
    compare_in_bf16(tiny_config(family), Rows(2, 12, 7), BASE, regularization=KINDS[kind], steps=10)


# ------------------------------------------------------------------ the smoothed loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.1, 0.9])
@pytest.mark.parametrize(
    "how",
    [
        "eager",
        pytest.param(
            "compiled",
            marks=[needs_compiler, pytest.mark.slow("torch compiles the loss, for seconds")],
        ),
    ],
)
@pytest.mark.usefixtures("quick_compiler")
def test_the_smoothed_loss_and_its_gradient_are_those_of_transformers(how, smoothing, dtype):
    """Positions that are ignored, as those that fill up a compiled chunk are, count nowhere."""
    loss_of = smoothed(smoothing)
    if how == "compiled":
        loss_of = compiled_function(loss_of, "A smoothed loss")
    logits = (4 * torch.randn(24, 97, generator=torch.Generator().manual_seed(3))).to(dtype)
    labels = torch.arange(24) * 3
    labels[20:] = IGNORED
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    found = loss_of(ours, labels)
    expected = LabelSmoother(epsilon=smoothing)((theirs.float(),), labels) * 20
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    found.backward()
    expected.backward()
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=bound, atol=1e-7)
    assert not ours.grad[20:].any()
    if how == "compiled":
        assert loss_of.ran and not loss_of.problem


@pytest.mark.slow("torch traces the blocks of four runs, for some seconds")
@pytest.mark.usefixtures("quick_compiler")
def test_a_compiled_plan_smooths_its_loss_and_no_other_run_s(monkeypatch):
    """A process has one compiled loss for each number."""
    without_kernels(monkeypatch)
    compiled = BASE.changed(compiled=True)
    plain, losses = plain_model(tiny_config("llama")), {}
    for name, regularization in {"plain": NO_REGULARIZATION, **KINDS}.items():
        for choices in (BASE, compiled) if name in KINDS else (BASE,):
            run = streamed(plain, choices, regularization=regularization)
            applied = []
            run.engine.train_step(1, random_batches(2), 0.0, applied.append)
            run.engine.drain()
            assert not run.engine.uncompiled
            losses[name, choices.kernels.compiled] = applied[0].loss
            run.close()
    for name in KINDS:
        assert losses[name, True] == pytest.approx(losses[name, False], rel=1e-5)
    assert len({round(loss, 4) for loss in losses.values()}) == 4


# ------------------------------------------------------------------ any plan


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "names", [list(SAME_BITS)[0::4], list(SAME_BITS)[1::4], list(SAME_BITS)[2::4]], ids=str
)
def test_any_plan_gives_the_same_bits(names, dtype):
    expected = planes_after(BASE, BOTH, dtype)
    for name in names:
        choices = BASE.changed(**SAME_BITS[name])
        assert_same_bits(planes_after(choices, BOTH, dtype), expected)


def test_an_embedding_that_is_trained_in_chunks_gets_the_same_noise():
    expected = planes_after(BASE, BOTH, vocabulary=TALL)
    embed_and_head = BASE.changed(**EMBED_AND_HEAD)
    assert_same_bits(planes_after(embed_and_head, BOTH, vocabulary=TALL), expected)


def test_a_frozen_embedding_gets_noise_too():
    last = Parts(last_blocks=1)
    found = {kind: planes_after(BASE, KINDS[kind], parts=last) for kind in ("smoothed", "both")}
    kept = BASE.changed(blocks_without_recompute=1)
    assert_same_bits(planes_after(kept, BOTH, parts=last), found["both"])
    assert any(not torch.equal(*pair) for pair in zip(found["both"], found["smoothed"]))


@pytest.mark.parametrize("dtype, ranks", [("float32", 2), ("bfloat16", 3)])
def test_ranks_have_the_bits_of_one_rank(dtype, ranks):
    job = Job("llama", dtype, 3, ranks, UNTIED, IN_ORDER | {"regularization": BOTH})
    several, one = train(ranks, job), train(1, job)
    several.assert_same_bits(one)
    assert [loss for loss, _ in several.steps] == [loss for loss, _ in one.steps]
    plain = train(1, dataclasses.replace(job, engine=IN_ORDER))
    assert [loss for loss, _ in plain.steps] != [loss for loss, _ in one.steps]


# ------------------------------------------------------------------ the noise of a row


@pytest.fixture
def rows() -> RowSet:
    lengths = np.random.default_rng(4).integers(2, 40, 21)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(starts[-1], dtype=np.int32) % 90
    documents = DocumentTokens(ids, np.ones(len(ids), bool), starts)
    return RowSet(documents, one_each(21), 0, Order(7, shuffle=True))


def noise_of_step(rows: RowSet, step: int, size: int, pad_up_to: int, seed: int = 42):
    """Returns the noise of each row of a step of 8 rows, by its place in the step, without padding;
    and its tokens.
    """
    found = {}
    for batch in batches(rows, 8, size, step, pad_up_to):
        of_rows = torch.from_numpy(StepNoise(5.0, seed, step).of_rows(batch))
        zeros = torch.zeros(*batch.input_ids.shape, 16)
        noise = RowNoise(of_rows).added_to(zeros)
        for line, (place, length) in enumerate(zip(batch.places, batch.lengths)):
            found[int(place)] = noise[line, :length], batch.input_ids[line, :length]
    return found


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_row_has_the_same_noise_in_any_micro_batch_and_with_any_padding(rows, step):
    """Step 3 goes on in the next epoch."""
    expected = noise_of_step(rows, step, 8, 0)
    assert sorted(expected) == list(range(8))
    for size, pad_up_to in [(1, 0), (2, 0), (3, 0), (4, 40), (8, 40)]:
        found = noise_of_step(rows, step, size, pad_up_to)
        assert sorted(found) == list(range(8))
        for place, (noise, ids) in found.items():
            assert np.array_equal(ids, expected[place][1])
            assert torch.equal(noise, expected[place][0])


def test_steps_rows_and_seeds_have_different_noise(rows):
    drawn = [
        noise_of_step(rows, 1, 4, 0),
        noise_of_step(rows, 2, 4, 0),
        noise_of_step(rows, 1, 4, 0, seed=43),
    ]
    first = [noise[0, 0].item() for one in drawn for noise, _ in one.values()]
    assert len(set(first)) == 24


def test_noise_is_uniform_within_its_bounds():
    """Alpha over the root of tokens times width, as in transformers; rows, tokens and columns are
    independent.
    """
    tokens, width, alpha = 96, 512, 5.0
    batch = Batch(np.zeros((3, tokens)), None, None, 0, 0, np.arange(3), np.array([96, 48, 96]))
    of_rows = torch.from_numpy(StepNoise(alpha, 1, 9).of_rows(batch))
    noise = RowNoise(of_rows).added_to(torch.zeros(3, tokens, width)).double()
    for row, length in enumerate((96, 48, 96)):
        bound = alpha / np.sqrt(length * width)
        scaled = noise[row] / bound
        assert 0.999 < scaled.abs().max() <= 1.0
        assert abs(scaled.mean()) < 0.01 and abs(3 * scaled.var() - 1) < 0.02
        shares = torch.histc(scaled, 20, -1, 1) / scaled.numel() * 20
        assert (shares - 1).abs().max() < 0.1
        noise[row] = scaled * np.sqrt(3)
    for one, other in [
        (noise[0], noise[2]),
        (noise[:, 1:], noise[:, :-1]),
        (noise[:, :, 1:], noise[:, :, :-1]),
        (noise[0, :, 7:], noise[0, :, :-7]),
    ]:
        assert abs((one * other).mean()) < 5 / np.sqrt(one.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_in_chunks_is_that_of_numpy_to_the_bit(monkeypatch, dtype):
    """Each number has an exact value, on any device and in chunks of any size."""
    batch = dataclasses.replace(
        random_batches(1, 3, 10)[0], places=np.array([5, 0, 2**20]), lengths=np.array([9, 10, 4])
    )
    how = PlainStep(BOTH, number=17, seed=2**32 - 1)
    expected = torch.from_numpy(how.noise(batch, 33)).to(dtype)
    vectors = torch.randn(3, 10, 33).to(dtype)
    of_rows = torch.from_numpy(StepNoise(8.0, 2**32 - 1, 17).of_rows(batch))
    for numel in (1, 100, 1 << 22):
        monkeypatch.setattr("engine.runtime.step.neftune._CHUNK_NUMEL", numel)
        assert torch.equal(RowNoise(of_rows).added_to(vectors), vectors + expected)


# ------------------------------------------------------------------ training alone


def test_evaluations_scores_and_samples_are_without():
    plain, found = plain_model(tiny_config("llama")), []
    for regularization in (NO_REGULARIZATION, BOTH):
        run = streamed(plain, BASE, regularization=regularization)
        evaluated = run.engine.evaluate_rows(random_batches(3, seed=5))
        logits = run.engine.last_logits([[5, 6, 7], [8, 9]])
        found.append((evaluated.loss, evaluated.sums.tolist(), logits))
        run.close()
    assert found[0][:2] == found[1][:2] and torch.equal(found[0][2], found[1][2])


def test_a_dry_run_has_noise_and_changes_nothing():
    run = streamed(plain_model(tiny_config("llama")), BASE, regularization=BOTH)
    before = [run.host_states.tensor(unit.name, "weight_high").clone() for unit in run.model.units]
    run.engine.dry_run(random_batches(2))
    after = [run.host_states.tensor(unit.name, "weight_high") for unit in run.model.units]
    assert all(map(torch.equal, before, after))
    run.close()


def test_a_model_that_looks_up_twice_is_refused_by_name():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(9, 4)

        def get_input_embeddings(self):
            return self.table

        def forward(self, ids):
            return self.table(ids) + self.table(ids)

    model = Twice()
    noise = RowNoise(torch.zeros(2, 1, dtype=torch.int64))
    twice = pytest.raises(ModelError, match="Twice looks its tokens up 2 times.*neftune_alpha to 0")
    with twice, noise.in_lookups_of(model):
        model(torch.tensor([[1, 2]]))
    assert not model.table._forward_hooks


@pytest.mark.parametrize("family", slow_but(SUPPORTED, FEW, FAMILY_SWEEP))
def test_every_family_looks_its_tokens_up_once_and_gets_the_noise(family):
    model = plain_model(tiny_family_config(family))
    batch = random_batches(1, 2, 6)[0]
    noise = RowNoise(torch.from_numpy(StepNoise(50.0, 1, 1).of_rows(batch)))
    ids = torch.from_numpy(batch.input_ids)
    with torch.no_grad():
        without = model(input_ids=ids, use_cache=False).logits
        with noise.in_lookups_of(model):
            found = model(input_ids=ids, use_cache=False).logits
    assert not torch.allclose(found, without)
