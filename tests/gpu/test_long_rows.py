"""Long rows in sequence chunks on a GPU: what a step takes is what the report counts, and attention
that is kept has the bits of attention that runs again.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.config.settings import ModelConfig, TrainConfig
from engine.model.build.measure_shape import shape_of
from engine.planning.fit.device_memory import DeviceMemory, Sizer
from engine.planning.fit.job import Job
from engine.planning.fit.memory_items import MemoryItem
from engine.planning.schedule.choices import PlanChoices
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.saved_attention_sizes import returned_bytes
from engine.runtime.device.cuda_backend import CudaBackend
from engine.text import GIB
from engine.tools.bench.steps import Planes, RunSettings, random_rows, run_steps
from tests.support.attention_calls import AttentionCalls
from tests.support.tiny import plain_model, random_batches, streamed

pytestmark = pytest.mark.gpu

TOKENS, VOCABULARY = 32_768, 8_192
SETTINGS = {
    "model": {"source": "random", "init": "random"},
    "data": {"source": "random tokens", "packing": False},
    "train": {"batch_size": 1},
}
NOT_TENSORS = (MemoryItem.ALLOCATOR_SLACK, MemoryItem.CUDA_CONTEXT)


def config_of(layers: int) -> PretrainedConfig:
    """Returns the configuration of some blocks of a model with half a billion parameters."""
    return CONFIG_MAPPING["qwen2"](
        vocab_size=VOCABULARY,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
    )


def test_the_peak_of_a_tiled_step_is_the_predicted_one():
    config = config_of(6)
    gc.collect()
    others = torch.cuda.memory_allocated()  # what earlier tests of this process have left
    backend = CudaBackend()
    try:
        planes = Planes.open(config, backend, ModelConfig(source="random", init="random"))
        try:
            shape = shape_of(planes.model)  # before a step, which moves parts of the model
            peaks = {size: peak_of(planes, shape, size) for size in (0, 4096)}
        finally:
            planes.close()
    finally:
        backend.close()
    (measured, predicted), (whole_rows, _) = peaks[4096], peaks[0]
    measured, whole_rows = measured - others, whole_rows - others
    assert measured == pytest.approx(predicted, rel=0.08)
    assert measured < 0.6 * whole_rows, "sequence chunks take much less than whole rows"


def peak_of(planes: Planes, shape: ModelShape, tile_tokens: int) -> tuple[int, int]:
    """The most bytes that were allocated in two steps, and the predicted ones."""
    choices = PlanChoices().changed(
        offloaded_block_inputs=True, block_input_rings=1, tile_tokens=tile_tokens
    )
    job = Job(shape, TrainConfig.from_dict(SETTINGS), TOKENS)
    memory = DeviceMemory("cuda", 60 * GIB, 60 * GIB, 60 * GIB)
    sizer = Sizer(job, memory, False, tile_tokens)
    planes.use(shape.optimizer, choices)
    settings = RunSettings(choices, 2, 1e-4, sizer.loss_chunk)
    figures = run_steps(planes, random_rows([1], TOKENS, VOCABULARY), settings)
    items = sizer.items(1, choices)
    return figures.peak, sum(item.bytes for item in items if item.kind not in NOT_TENSORS)


@pytest.mark.parametrize("packed", [False, True])
def test_attention_that_is_kept_has_the_bits_of_attention_that_runs_again(deterministic, packed):
    plain, found = plain_model(config_of(2)), {}
    for blocks in (0, 1, 2):
        found[blocks] = step_of(plain, blocks, packed)
    for blocks in (1, 2):
        assert found[blocks][0] == found[0][0], "losses"
        assert torch.equal(found[blocks][1], found[0][1]), "gradients"
        assert found[0][2] - found[blocks][2] == blocks, "kernels of attention"


def test_cudnn_attention_is_kept():
    """Deterministic mode excludes it."""
    plain = plain_model(config_of(2))
    again, kept = step_of(plain, 0, False), step_of(plain, 2, False)
    assert again[0] == kept[0] and again[2] - kept[2] == 2
    assert (again[1] - kept[1]).norm() < 2**-7 * again[1].norm()


def step_of(plain: torch.nn.Module, blocks: int, packed: bool) -> tuple[float, torch.Tensor, int]:
    """Returns the loss and the gradients of a step in which so many blocks keep what attention
    returned, and how often its kernels ran.
    """
    of_token = returned_bytes(896, 14, 2) if blocks else 0
    choices = PlanChoices().changed(
        offloaded_block_inputs=True,
        block_input_rings=1,
        tile_tokens=4096,
        attention_blocks=blocks,
        attention_bytes=of_token,
    )
    backend, applied = CudaBackend(), []
    run = streamed(
        plain, choices, backend=backend, dtype="bfloat16", tokens=TOKENS, loss_chunk=4096
    )
    (batch,) = random_batches(1, rows=1, length=TOKENS, vocabulary=VOCABULARY)
    if packed:  # three documents
        places = np.arange(TOKENS)
        batch.position_ids = (
            places - np.select([places >= 30_000, places >= 9_001], [30_000, 9_001])
        )[None]
    with AttentionCalls() as kernels:
        run.engine.train_step(1, [batch], 0.0, applied.append)
        run.engine.drain()
    gradients = [run.host_states.tensor(unit.name, "grad").float() for unit in run.model.units]
    run.close()
    return applied[0].loss, torch.cat(gradients), kernels.count
