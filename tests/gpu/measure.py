"""Models of chosen size through the engine, and what makes the host wait."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.data.batches.rows import MicroBatch
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.backend import Backend
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.tools.bench.steps import Planes, RunSettings, random_rows, run_steps


def llama(depth: int, width: int, vocabulary: int = 512):
    """A llama of any depth, all of whose other sizes follow from its width."""
    return CONFIG_MAPPING["llama"](
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def synchronizations(
    engine: StreamingEngine,
    number: int,
    batches: Sequence[MicroBatch],
    rate: float,
    on_applied=None,
) -> Counter[str]:
    """Where calls of one step, and of `on_applied` after it, made the host wait for the device:
    CUDA's own debug mode tells. Every step must be applied.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.train_step(number, batches, rate, on_applied)
            engine.drain()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{w.filename.rsplit('/', 1)[-1]}:{w.lineno}"
        for w in caught
        if "synchroniz" in str(w.message).lower()
    )


def peak_at_depth(
    backend: Backend, depth: int, width: int, rows: int = 4, length: int = 512
) -> tuple[int, int]:
    """(peak device bytes, host parameters) of two steps with block inputs on the host."""
    planes = Planes.open(llama(depth, width), backend)
    try:
        batches = random_rows([rows, rows], length, 512)
        figures = run_steps(
            planes,
            batches,
            RunSettings(
                PlanChoices().changed(micro_batches=2, offloaded_block_inputs=True), 2, 1e-4
            ),
        )
        return figures.peak, planes.model.parameter_count
    finally:
        planes.close()
