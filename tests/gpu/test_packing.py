"""Packed rows on a GPU, with blocks of real size: what the documents alone give, in memory that
does not grow with the square of the row, and without waiting for the device.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.planning.schedule.choices import PlanChoices
from engine.planning.shape.activation_sizes import DOCUMENTS
from engine.runtime.device.cuda_backend import CudaBackend
from tests.gpu.measure import synchronizations
from tests.support.tiny import Batch, plain_model, streamed

pytestmark = pytest.mark.gpu

VOCAB = 512
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    max_position_embeddings=32768,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 256},
    "gemma3_text": {"sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {
        "attention_chunk_size": 256,
        "interleave_moe_layer_step": 3,
        "intermediate_size_mlp": 4096,
        "intermediate_size": 4096,
        "layer_types": ["chunked_attention", "full_attention"],
    },
}


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def family_config(family: str):
    return CONFIG_MAPPING[family](**SIZES | FAMILIES[family])


def batches(lengths: list[int]) -> tuple[Batch, list[Batch]]:
    """One packed row of documents of `lengths`, and the documents alone."""
    generator = np.random.default_rng(2)
    documents = [generator.integers(3, VOCAB, n) for n in lengths]
    labels = [np.append(d[1:], -100) for d in documents]
    count = sum(n - 1 for n in lengths)
    packed = Batch(
        np.concatenate(documents)[None],
        np.concatenate(labels)[None],
        np.concatenate([np.arange(n) for n in lengths])[None],
        sum(lengths),
        count,
    )
    return packed, [
        Batch(d[None], t[None], None, len(d), len(d) - 1) for d, t in zip(documents, labels)
    ]


def gradients(plain, given: list[Batch], dtype: str = "bfloat16") -> tuple[float, torch.Tensor]:
    tokens = max(batch.input_ids.size for batch in given)
    run = streamed(
        plain,
        PlanChoices().changed(micro_batches=len(given)),
        backend=CudaBackend(),
        dtype=dtype,
        tokens=tokens,
        max_grad_norm=None,
        loss_chunk=1024,
    )
    assert run.model.packing.safe and run.model.packing.attention == DOCUMENTS
    device_updates = []
    run.engine.train_step(1, given, 0.0, device_updates.append)
    run.engine.drain()
    gradient = torch.cat(
        [run.host_states.tensor(unit.name, "grad").float() for unit in run.model.units]
    )
    run.close()
    return device_updates[0].loss, gradient


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_documents_alone_in_bf16(family):
    plain = plain_model(family_config(family), torch.bfloat16)
    packed, apart = batches([700, 40, 1, 1307])
    loss, gradient = gradients(plain, [packed])
    loss_apart, gradient_apart = gradients(plain, apart)
    assert loss == pytest.approx(loss_apart, rel=2e-3)
    difference = (gradient - gradient_apart).norm() / gradient_apart.norm()
    mixed = gradients(
        plain, [Batch(packed.input_ids, packed.labels, None, packed.tokens, packed.loss_tokens)]
    )[1]
    mixed_difference = (mixed - gradient_apart).norm() / gradient_apart.norm()
    # Both ways round to bf16 in other places; what documents see of each other is no rounding.
    assert difference < 3e-2 and mixed_difference > 5 * difference


@pytest.mark.parametrize(
    "lengths", [[100, 40, 1, 371], [700, 40, 1, 1307]], ids=["under a mask", "by document"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_documents_alone_in_fp32(family, lengths):
    plain = plain_model(family_config(family), torch.float32)
    packed, apart = batches(lengths)
    loss, gradient = gradients(plain, [packed], "float32")
    loss_apart, gradient_apart = gradients(plain, apart, "float32")
    assert loss == pytest.approx(loss_apart, rel=1e-5)
    assert (gradient - gradient_apart).norm() < 1e-4 * gradient_apart.norm()


@pytest.mark.parametrize(
    "dtype, family",
    [("float32", "llama"), *(("bfloat16", name) for name in ("llama", "mistral", "gemma3_text"))],
)
def test_memory_of_a_packed_row_grows_with_its_tokens_alone(family, dtype):
    """Twice the tokens may take twice the memory; a mask of a row would take four times as much,
    and for 32,768 tokens a gibibyte at one byte a pair. In float32 no fused kernel lets queries
    share keys, and torch would keep the weights.
    """
    plain, peaks = plain_model(family_config(family), getattr(torch, dtype)), []
    for tokens in (8192, 16384, 32768):
        packed, _ = batches([tokens // 4, tokens // 2, tokens // 4])
        run = streamed(
            plain, PlanChoices(), backend=CudaBackend(), dtype=dtype, tokens=tokens, loss_chunk=1024
        )
        run.engine.train_step(1, [packed], 0.0)
        run.engine.drain()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run.engine.train_step(2, [packed], 0.0)
        run.engine.drain()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        run.close()
        gc.collect()
        torch.cuda.empty_cache()
    first, second = peaks[1] - peaks[0], peaks[2] - peaks[1]
    assert second < 2.2 * first, f"bytes at 8, 16 and 32 k tokens: {peaks}"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_packing_waits_for_nothing(family):
    plain = plain_model(family_config(family), torch.bfloat16)
    packed, _ = batches([700, 40, 1307])
    run = streamed(plain, PlanChoices(), backend=CudaBackend(), dtype="bfloat16", tokens=2047)
    run.engine.train_step(1, [packed], 1e-4)
    run.engine.drain()
    waits = synchronizations(run.engine, 2, [packed], 1e-4)
    run.close()
    assert not any(
        place.startswith(("masking_utils", "attention", "sdpa_attention")) for place in waits
    ), waits


def test_deterministic_kernels_give_the_same_bits_again(deterministic):
    plain = plain_model(family_config("mistral"), torch.bfloat16)
    packed, _ = batches([700, 40, 1307])
    (first_loss, first), (second_loss, second) = (
        gradients(plain, [packed]),
        gradients(plain, [packed]),
    )
    assert first_loss == second_loss and torch.equal(first, second)
