"""Packed documents do not see each other: loss and gradients of a packed row equal those of the
documents alone, or the test at load finds that they do not and packing is off, by name.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.config.settings import ModelConfig
from engine.model.blocks.block_inputs import tensors_in
from engine.model.build.attention import Heads, group_by_group
from engine.model.build.attention_documents import Documents, Pattern
from engine.model.build.build import build_model
from engine.model.build.packing_trial import Packing, packing_of
from engine.model.build.tiny_config import shrunk
from engine.planning.schedule.choices import PlanChoices
from engine.planning.shape.activation_sizes import DOCUMENTS
from engine.planning.shape.catalog import entry_of
from tests.support.families import tiny_family_config
from tests.support.library_version import AS_RECORDED, NOT_AS_RECORDED, another_version_may_refuse
from tests.support.packed_rows import LENGTHS, NOT_PACKED, PACKED, WHY_NOT_PACKED, packed_and_apart
from tests.support.sets import FAMILY_SWEEP, slow_but
from tests.support.tiny import MOST_USED, VOCAB, Batch, plain_model, streamed, tiny_config

pytestmark = pytest.mark.computing


def gradients(
    plain, batches: list[Batch], choices: PlanChoices | None = None, config=None
) -> tuple[float, torch.Tensor]:
    run = streamed(
        plain,
        choices or PlanChoices().changed(micro_batches=len(batches)),
        max_grad_norm=None,
        tokens=48,
        config=config,
    )
    device_updates = []
    run.engine.train_step(1, batches, 0.0, device_updates.append)
    run.engine.drain()
    gradient = torch.cat(
        [run.host_states.tensor(unit.name, "grad").clone() for unit in run.model.units]
    )
    run.close()
    return device_updates[0].loss, gradient


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("family", slow_but(PACKED, MOST_USED, FAMILY_SWEEP))
def test_packed_documents_do_not_see_each_other(family):
    config = tiny_family_config(family)
    plain = plain_model(config)
    packed, apart = packed_and_apart()
    with another_version_may_refuse():
        loss, gradient = gradients(plain, packed, config=config)
    loss_apart, gradient_apart = gradients(plain, apart, config=config)
    assert loss == pytest.approx(loss_apart, rel=1e-5)
    assert difference(gradient, gradient_apart) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "gpt_oss", "llama4_text"])
def test_the_comparison_can_tell(family):
    """Without positions that restart, the documents see each other."""
    plain = plain_model(tiny_family_config(family))
    packed, apart = packed_and_apart()
    mixed = [dataclasses.replace(packed[0], position_ids=None)]
    assert difference(gradients(plain, mixed)[1], gradients(plain, apart)[1]) > 1e-3


@pytest.mark.skipif(not AS_RECORDED, reason=NOT_AS_RECORDED)
@pytest.mark.parametrize("family", slow_but(NOT_PACKED, ("bloom", "mamba"), FAMILY_SWEEP))
def test_a_family_whose_documents_see_each_other_is_found(family):
    packing = packing_of(tiny_family_config(family))
    assert not packing.safe and packing.problem == WHY_NOT_PACKED


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "phi3", "qwen3_moe"]
)
def test_configurations_of_real_size_are_told_by_a_small_model(family):
    packing = packing_of(CONFIG_MAPPING[family]())
    assert packing.safe and packing.attention == DOCUMENTS


GEMMA_4 = ("google/gemma-4-E2B-it", "google/gemma-4-26B-A4B-it")
"""In the first, late layers take keys and values of earlier ones. The second has experts."""


def small_gemma_4(model_id: str):
    config = AutoConfig.for_model(**entry_of(model_id).config_of(model_id)).text_config
    return config, shrunk(config)


@pytest.mark.parametrize("model_id", GEMMA_4)
def test_layers_with_values_of_their_own_keep_them_in_a_small_model(model_id):
    config, small = small_gemma_4(model_id)
    heads = [layer.head_dim for layer in small.per_layer_config]
    assert heads == [512 if kind == "full_attention" else 256 for kind in small.layer_types]
    assert len(heads) == 4 and heads[-1] == 512
    keys = {layer.num_key_value_heads for layer in small.per_layer_config}
    assert keys == {min(config.per_layer_config[0].num_key_value_heads, 2)}
    shared = 2 if config.num_kv_shared_layers else 0
    assert small.num_kv_shared_layers == shared and len(set(heads[: 4 - shared])) == 2


@pytest.mark.slow("a small model has heads of the published sizes")
def test_documents_of_a_published_gemma_4_do_not_see_each_other():
    _, small = small_gemma_4(GEMMA_4[0])
    small.hidden_size, small.vocab_size, small.vocab_size_per_layer_input = 64, VOCAB, VOCAB
    packing = packing_of(small)
    assert packing.safe and packing.attention == DOCUMENTS
    plain, (packed, apart) = plain_model(small), packed_and_apart()
    loss, gradient = gradients(plain, packed, config=small)
    loss_apart, gradient_apart = gradients(plain, apart, config=small)
    assert loss == pytest.approx(loss_apart, rel=1e-5)
    # 1e-4 by rounding, as its attention is not scaled; more than 1 if they see each other.
    assert difference(gradient, gradient_apart) < 1e-3


def test_a_part_that_the_small_model_lacks_is_not_believed():
    class Recurrence(torch.nn.Module):
        """Stands for a layer that no layer of the small model was like."""

    assert Packing(DOCUMENTS, "", frozenset({"Sequential"})).of(torch.nn.Sequential()).safe
    found = Packing(DOCUMENTS, "", frozenset({"Sequential"})).of(torch.nn.Sequential(Recurrence()))
    assert not found.safe and "Recurrence" in found.problem


ROPES = {
    "longrope": (
        "phi3",
        dict(
            max_position_embeddings=4096,
            original_max_position_embeddings=32,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 32,
            },
        ),
    ),
    "dynamic": (
        "llama",
        dict(
            max_position_embeddings=32,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        ),
    ),
}


@pytest.mark.parametrize("rope", ROPES)
def test_a_rope_that_depends_on_the_length_of_a_row_packs_short_rows_alone(rope):
    """Documents of 40 and 3 tokens depend on each other beyond a limit of 32, those of rows of 32
    do not.
    """
    family, changes = ROPES[rope]
    config = tiny_config(family, **changes)
    packing = packing_of(config)
    assert packing.safe and packing.longest == 32
    assert packing.problem_of(32) == "" and "beyond 32 tokens" in packing.problem_of(33)
    plain = plain_model(config)
    for lengths, see_each_other in (((3, 40), True), ((3, 29), False)):
        packed, apart = packed_and_apart((lengths,))
        assert (
            difference(gradients(plain, packed)[1], gradients(plain, apart)[1]) > 1e-5
        ) == see_each_other


def test_positions_become_documents_on_the_host():
    documents = Documents.of(packed_and_apart()[0][0].position_ids, torch.from_numpy)
    assert documents.lengths == LENGTHS
    assert documents.longest == 20
    assert not documents.whole
    assert documents.starts(None).tolist() == [0, 9, 13, 24, 25, 45, 48]
    assert documents.starts(8).tolist() == [0, 8, 9, 13, 21, 24, 25, 33, 41, 45, 48]
    assert Documents.whole_rows(3, 5, torch.from_numpy).starts(None).tolist() == [0, 5, 10, 15]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4_text", "gpt_oss"])
def test_no_tokens_by_tokens_mask_is_made(family):
    model = build_model(tiny_family_config(family), ModelConfig(source=family, dtype="float32"))
    batch = packed_and_apart()[0][0]
    positions = torch.from_numpy(batch.position_ids)
    for given_positions in (None, positions):
        with torch.no_grad():
            captured = model.skeleton.capture(torch.zeros_like(positions), given_positions)
        for arguments in captured.arguments:
            found = tensors_in(arguments.args) + tensors_in(arguments.kwargs)
            assert not any(list(tensor.shape).count(positions.shape[1]) > 1 for _, tensor in found)
            assert given_positions is None or isinstance(
                arguments.kwargs["attention_mask"], Pattern
            )


@pytest.mark.parametrize("family, dropout", [("gemma3_text", 0.0), ("gpt2", 0.2)])
def test_packed_rows_give_the_same_bits_under_any_plan(family, dropout):
    plain = plain_model(tiny_family_config(family, dropout=dropout))
    packed, _ = packed_and_apart()
    expected = gradients(plain, packed)
    depth = plain.config.num_hidden_layers
    for choices in (
        PlanChoices().changed(blocks_kept_in_slots=depth, blocks_without_recompute=depth),
        PlanChoices().changed(slots=1, offloaded_block_inputs=True),
    ):
        loss, gradient = gradients(plain, packed, choices)
        assert loss == expected[0] and torch.equal(gradient, expected[1])


@pytest.mark.parametrize("window, chunk", [(None, None), (3, None), (None, 4)])
def test_a_mask_for_short_rows_is_what_the_documents_see(window, chunk):
    documents = Documents(tuple(LENGTHS), torch.from_numpy)
    mask = documents.mask(window, chunk, torch.float32)
    expected = torch.full((2, 1, 24, 24), -torch.inf)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            for query in range(length):
                for key in range(query + 1):
                    if (window is None or query - key < window) and (
                        chunk is None or query // chunk == key // chunk
                    ):
                        expected[row, 0, start + query, start + key] = 0.0
            start += length
    assert torch.equal(mask, expected)
    assert documents.mask(window, chunk, torch.float32) is mask


@pytest.mark.parametrize("masked", [False, True])
def test_queries_that_share_keys_give_the_same_group_by_group(masked):
    """As a GPU computes them in float32: heads in their order, and the gradients of shared keys
    summed.
    """
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(2, heads, 11, 8, generator=generator, requires_grad=True) for heads in (6, 2, 2)
    )
    dense = (
        torch.zeros(11, 11).masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
        if masked
        else None
    )
    found = group_by_group(Heads(query, key, value), dense, not masked, 0.0, 0.3)
    wanted = F.scaled_dot_product_attention(
        query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), is_causal=True, scale=0.3
    ).transpose(1, 2)
    weights = torch.randn(wanted.shape, generator=generator)
    torch.testing.assert_close(found, wanted)
    for ours, theirs in zip(
        *(
            torch.autograd.grad((out * weights).sum(), (query, key, value))
            for out in (found, wanted)
        )
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "llama4_text"])
def test_short_rows_are_the_same_under_a_mask_as_document_by_document(family, monkeypatch):
    plain = (
        plain_model(tiny_config(family))
        if family != "llama4_text"
        else plain_model(tiny_family_config(family))
    )
    packed, _ = packed_and_apart()
    at_once, gradient = gradients(plain, packed)
    monkeypatch.setattr("engine.model.build.attention._MASKED_AT_ONCE", 0)
    apart, gradient_apart = gradients(plain, packed)
    assert at_once == pytest.approx(apart, rel=1e-5)
    assert (gradient - gradient_apart).abs().max() < 1e-4 * gradient_apart.abs().max()
