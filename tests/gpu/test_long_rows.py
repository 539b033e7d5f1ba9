"""Long rows in tiles on a GPU: what a step takes is what the report counts."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.bench.steps import Planes, RunSettings, random_rows, run_steps
from engine.config.settings import ModelConfig, TrainConfig
from engine.fit.job import Job
from engine.fit.memory_items import MemoryItem
from engine.fit.sizes import DeviceMemory, Sizer
from engine.model.measure_shape import shape_of
from engine.model.shape import ModelShape
from engine.plan.choices import PlanChoices
from engine.runtime.cuda_backend import CudaBackend
from engine.words import GIB

pytestmark = pytest.mark.gpu

TOKENS, VOCABULARY = 32_768, 8_192
SETTINGS = {
    "model": {"source": "random", "init": "random"},
    "data": {"source": "random tokens", "packing": False},
    "train": {"batch_size": 1},
}
NOT_TENSORS = (MemoryItem.ALLOCATOR_SLACK, MemoryItem.CUDA_CONTEXT)


def test_the_peak_of_a_step_in_tiles_is_the_predicted_one():
    config = CONFIG_MAPPING["qwen2"](
        vocab_size=VOCABULARY,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=6,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
    )
    backend = CudaBackend()
    try:
        planes = Planes.open(config, backend, ModelConfig(source="random", init="random"))
        try:
            shape = shape_of(planes.model)  # before a step, which moves parts of the model
            peaks = {tile: peak_of(planes, shape, tile) for tile in (0, 4096)}
        finally:
            planes.close()
    finally:
        backend.close()
    measured, predicted = peaks[4096]
    assert measured == pytest.approx(predicted, rel=0.08)
    assert measured < 0.6 * peaks[0][0], "tiles take much less than whole rows"


def peak_of(planes: Planes, shape: ModelShape, tile_tokens: int) -> tuple[int, int]:
    """The most bytes that were allocated in two steps, and the predicted ones."""
    choices = PlanChoices(host_boundaries=True, boundary_rings=1, tile_tokens=tile_tokens)
    job = Job(shape, TrainConfig.from_dict(SETTINGS), TOKENS)
    memory = DeviceMemory("cuda", 60 * GIB, 60 * GIB, 60 * GIB)
    sizer = Sizer(job, memory, False, tile_tokens)
    planes.use(shape.optimizer, choices)
    settings = RunSettings(choices, 2, 1e-4, sizer.loss_chunk)
    figures = run_steps(planes, random_rows([1], TOKENS, VOCABULARY), settings)
    items = sizer.items(1, choices)
    return figures.peak, sum(item.bytes for item in items if item.kind not in NOT_TENSORS)
