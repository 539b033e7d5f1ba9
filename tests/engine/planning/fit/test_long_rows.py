"""Long rows run in sequence chunks only where nothing fits without them, and the report counts the
sequence chunks.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.config.settings import ModelConfig
from engine.model.blocks.pytree_paths import tensors_of
from engine.model.blocks.tiled_module import tile_sequence
from engine.model.build.build import build_model
from engine.model.build.measure_shape import shape_of
from engine.planning.fit.buffer_sizes import state_bytes
from engine.planning.fit.choose import choose, least_choices
from engine.planning.fit.cost_model import Cost, MicroBatch, step_seconds
from engine.planning.fit.job import Job, Target
from engine.planning.fit.memory_items import MemoryItem
from engine.planning.fit.simulate_step import predicted_seconds
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlanChoices
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.saved_attention_sizes import attention_room
from engine.planning.shape.sequence_tiling import SEQUENCE_CHUNKS, TiledBlock, sequence_chunks_for
from engine.planning.shape.serialize import pack, unpack
from engine.text import GIB
from tests.support.chosen import FAST_RATES, big_shape, config
from tests.support.sets import slow_but
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.computing

MEASURED = "it measures models; a plain run measures one"
TILED = TiledBlock(38000.0, 83056.0, 433069056.0, 52336.0, 234496.0, 1086324736.0, 203693056)
"""A block of Qwen2.5 7B, as it is measured."""


def with_tiling() -> ModelShape:
    shape = big_shape()
    units = [
        dataclasses.replace(unit, tiled=TILED) if unit in shape.blocks else unit
        for unit in shape.units
    ]
    return dataclasses.replace(shape, units=tuple(units))


def planned(shape: ModelShape, length: int, gib: float, ram: float = 240, **more):
    job = Job(shape, config(train__batch_size=1), length, **more)
    return choose(job, Target("cuda", round(gib * GIB), round(ram * GIB), FAST_RATES))


def items(chosen) -> dict[MemoryItem, int]:
    return {item.kind: item.bytes for item in chosen.gpu_items}


@pytest.mark.parametrize(("length", "gib"), [(4096, 23), (262_144, 140)])
def test_the_plan_is_unchanged_where_memory_suffices(length, gib):
    chosen = planned(with_tiling(), length, gib)
    assert chosen.choices.kernels.tile_tokens == 0
    assert chosen == planned(big_shape(), length, gib)


@pytest.mark.parametrize(
    ("length", "gib", "chunk"), [(524_288, 140, 16_384), (131_072, 23, 16_384)]
)
def test_rows_that_fit_with_tiling_alone(length, gib, chunk):
    chosen = planned(with_tiling(), length, gib)
    assert chosen.gpu_bytes <= gib * GIB
    assert chosen.choices.kernels.tile_tokens == chunk
    assert not chosen.choices.kernels.compiles_blocks
    assert planned(big_shape(), length, gib).gpu_bytes > 1.1 * gib * GIB
    job = Job(with_tiling(), config(train__batch_size=1), length)
    least = least_choices(job, Target("cuda", gib * GIB, 240 * GIB))
    assert min(each.gpu_bytes for each in least) <= chosen.gpu_bytes


def test_the_disk_takes_what_ram_lacks_beside_tiling():
    job = Job(with_tiling(), config(train__batch_size=1, engine__disk="/tmp"), 131_072)
    target = Target("cuda", 23 * GIB, 90 * GIB, FAST_RATES)
    without, on_disk = (choose(job, replace(target, disk_free=free)) for free in (0, 1000 * GIB))
    assert without.choices.kernels.tile_tokens == on_disk.choices.kernels.tile_tokens == 16_384
    kept = [
        state_bytes(job.shape, each.choices) + each.offloaded_input_bytes
        for each in (without, on_disk)
    ]
    assert kept[0] > target.host_free > kept[1]
    assert on_disk.choices.placement.disk_offloaded_units > 0


def test_rows_that_are_not_long_have_no_tiling():
    assert [sequence_chunks_for(length) for length in (1024, 16_384)] == [(), ()]
    assert sequence_chunks_for(16_385) == SEQUENCE_CHUNKS
    chosen = planned(with_tiling(), 16_384, 8)
    assert chosen.choices.kernels.tile_tokens == 0
    assert chosen.gpu_bytes > 8 * GIB


def test_the_report_counts_what_a_tiled_block_takes():
    length, hidden = 131_072, 131_072 * 3584 * 2
    chosen = planned(with_tiling(), length, 23)
    assert chosen.choices.activations.blocks_without_recompute == 0
    found = items(chosen)
    inside = 52336 * length + 234496 * 16_384 + 1086324736
    assert found[MemoryItem.WORKING_SET] == inside == TILED.peak_bytes(length, 16_384)
    outside = 83056 * length + 433069056
    assert TILED.peak_bytes(length, 4_096) == outside < inside
    assert found[MemoryItem.BLOCK_INPUT_RINGS] == 2 * hidden
    assert found[MemoryItem.HIDDEN_STATES] == hidden
    (working,) = [each for each in chosen.gpu_items if each.kind == MemoryItem.WORKING_SET]
    assert working.note == "backward of one block on 131,072 tokens, in sequence chunks of 16,384"
    roomy = planned(with_tiling(), 524_288, 140)
    kept = roomy.choices.activations.blocks_without_recompute
    assert kept > 0
    of_block = TILED.kept_bytes(524_288) + 4 * hidden  # with its input
    assert items(roomy)[MemoryItem.KEPT_ACTIVATIONS] == kept * of_block


def test_ram_that_is_free_keeps_what_attention_returned():
    """Each block has 3,584 features of 2 bytes and 28 heads."""
    length, of_token = 524_288, 2 * 3584 + 4 * 28
    found = [planned(with_tiling(), length, 140, ram) for ram in (170, 200, 230)]
    counts = [each.choices.activations.attention_blocks for each in found]
    assert 0 < counts[0] < counts[1] < counts[2]
    for chosen, count in zip(found, counts):
        hidden, room = length * 3584 * 2, attention_room(of_token, length)
        block_inputs = 28 - chosen.choices.activations.blocks_without_recompute
        assert chosen.offloaded_input_bytes == block_inputs * hidden + count * room
        assert items(chosen)[MemoryItem.BLOCK_INPUT_RINGS] == 2 * (hidden + room)
        assert chosen.gpu_bytes <= 140 * GIB
    seconds = [seconds_of(each) for each in found]
    shorter = FAST_RATES.attention * (seconds[0] - seconds[2]) / (counts[2] - counts[0])
    assert shorter == pytest.approx(with_tiling().attention.flops(1, length), rel=0.1)


def seconds_of(chosen) -> float:
    """The predicted seconds of a step, as they are simulated. The closed form is near them."""
    shape, rows = (
        with_tiling(),
        MicroBatch(1, 524_288, tile_tokens=chosen.choices.kernels.tile_tokens),
    )
    seconds = predicted_seconds(shape, chosen.choices, FAST_RATES, rows, "cuda")
    closed = step_seconds(Cost(shape, FAST_RATES, rows, True), chosen.choices, 0.0)
    assert seconds == pytest.approx(closed, rel=0.05)
    return seconds


@pytest.mark.parametrize(
    "changes",
    [
        dict(attention_blocks=5),
        dict(attention_blocks=4, blocks_without_recompute=1),
        dict(offloaded_block_inputs=False),
        dict(tile_tokens=0),
        dict(attention_bytes=0),
        dict(disk_offloaded_block_inputs=1),
        dict(blocks_per_saved_input=2),
    ],
)
def test_attention_that_cannot_be_kept_is_refused(changes):
    choices = PlanChoices().changed(
        offloaded_block_inputs=True, tile_tokens=16_384, attention_blocks=2, attention_bytes=7280
    )
    blocks = [f"block {number}" for number in range(4)]
    assert build_step_plan(blocks, False, choices).with_attention == ("block 2", "block 3")
    with pytest.raises(ValueError, match="attention"):
        build_step_plan(blocks, False, choices.changed(**changes))


def test_a_resumed_run_keeps_its_tiling():
    chosen = planned(with_tiling(), 131_072, 23)
    assert chosen.rounding["tile_tokens"] == 16_384
    again = planned(with_tiling(), 131_072, 140, rounding=chosen.rounding)
    assert again.choices.kernels.tile_tokens == 16_384


def test_backward_computes_what_is_tiled_once_more():
    shape, tokens = with_tiling(), 131_072
    whole = Cost(shape, FAST_RATES, MicroBatch(1, tokens), False)
    tiled = Cost(shape, FAST_RATES, MicroBatch(1, tokens, tile_tokens=16_384), False)
    assert tiled.forward("block 0") == whole.forward("block 0")
    again = 2 * TILED.parameter_count * tokens / FAST_RATES.matmul
    more = tiled.backward("block 0") - whole.backward("block 0")
    assert more == pytest.approx(again, rel=0.2)


def test_a_shape_with_tiling_is_stored_as_it_is():
    shape = with_tiling()
    assert unpack(pack({"bfloat16": shape}), "bfloat16", "qwen") == shape


@pytest.mark.parametrize("family", slow_but(["qwen2", "mixtral"], ["qwen2"], MEASURED))
def test_tiled_blocks_are_measured(family):
    """A block keeps its two norms' outputs, queries, keys, values and what attention returns."""
    model = build_model(tiny_config(family), ModelConfig(source="tiny", dtype="bfloat16"))
    for unit in shape_of(model).blocks:
        assert unit.tiled is not None
        hidden, shared = 2 * 32, 2 * 16
        state, norms, attention = hidden, 2 * hidden, 2 * hidden + 2 * shared + 4 * 4
        assert unit.tiled.kept == state + norms + attention
        assert unit.tiled.kept < unit.activations.per_token
        assert unit.tiled.peak_bytes(1 << 20, 4096) > unit.tiled.kept_bytes(1 << 20)


@pytest.mark.slow(MEASURED)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_is_kept_is_what_autograd_saves(family):
    """The block runs on the CPU, with values. Rows are shorter than a window."""
    config_of = tiny_config(family, max_position_embeddings=512, **LONG_WINDOW.get(family, {}))
    model = build_model(config_of, ModelConfig(source="tiny", dtype="float32"))
    tokens, unit = 256, model.blocks[1]
    captured = model.skeleton.capture(torch.zeros(1, tokens, dtype=torch.long), None)
    block = copy.deepcopy(unit.block).to_empty(device="cpu")
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.1)
    block.__dict__.pop("forward", None)
    tile_sequence(block, model.tiled_parts(unit), 64)
    leaf = torch.randn_like(captured.hidden).requires_grad_()
    own = [leaf, *block.parameters(), *block.buffers(), *tensors_of(captured.arguments[1].nested)]
    shared, saved = {_address(each) for each in own}, {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if _address(tensor) not in shared:
            saved[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        out = captured.arguments[1].call(block, leaf)
    kept = shape_of(model).blocks[1].tiled.kept_bytes(tokens)
    of_weights = 2 * 4 * 8  # what norms of queries and keys keep of their weights
    assert sum(saved.values()) - kept == (of_weights if family == "gemma3_text" else 0)
    assert out.requires_grad


LONG_WINDOW = {"gemma3_text": {"sliding_window": 512}}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
