"""A training of the same shape in the usual way for models that fit: weights, gradients and moments
are all on the device, with plain transformers and torch's fused AdamW. Streaming is compared with
this training, on the same device and in the same run.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.config.settings import ModelConfig
from engine.data.batches.rows import MicroBatch, micro_batch_bounds
from engine.errors import FitError
from engine.model.build.library import empty_model
from engine.model.build.skeleton import find_layers
from engine.model.build.units import TORCH_DTYPES
from engine.planning.shape.activation_sizes import DOCUMENTS
from engine.runtime.device.backend import Backend
from engine.runtime.device.compiled import compiled_function, set_up_compiler
from engine.runtime.step.cross_entropy import LossChunks, cross_entropy
from engine.tools.bench.steady import Steady, steady

STATE_COPIES = 4
"""Values of each parameter, all in the model's dtype: a weight, a gradient and two moments."""
LEAST_STEPS = 4


@dataclass(frozen=True)
class ResidentSettings:
    """Settings of a training with all states on the device."""

    recompute: bool
    """Blocks are checkpointed."""
    sizes: Sequence[int]
    """Micro-batch sizes to try, in rows, in order of preference. A size for which the device has
    too little memory is skipped.
    """
    loss_chunk: int
    """Positions whose logits exist at once."""
    seconds: float
    """Seconds for which steps are run, or twice as many where no two steps in a row agree."""
    compiled: bool = False
    """The training uses the same compiled kernels as a compiled streamed step."""


@dataclass(frozen=True)
class ResidentFigures:
    """Figures of a training with all states on the device."""

    recompute: bool
    """Blocks were checkpointed."""
    micro_batch_size: int
    counted: Steady
    """Steps after those that warm up."""
    peak: int | None
    """Device bytes that were allocated at once, at most; None on the CPU."""

    @property
    def seconds(self) -> float:
        """Seconds of a step that counts, on average."""
        return self.counted.mean

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as a bench prints them."""
        return {
            "recompute": self.recompute,
            "micro_batch_size": self.micro_batch_size,
            **self.counted.to_dict(),
            "peak": self.peak,
        }


def resident_bytes(parameters: int, dtype: str) -> int:
    """Returns the bytes of all states on the device."""
    return STATE_COPIES * parameters * TORCH_DTYPES[dtype].itemsize


def train_resident(
    config: Any,
    model: ModelConfig,
    backend: Backend,
    batches: Sequence[MicroBatch],
    settings: ResidentSettings,
) -> ResidentFigures:
    """Runs steps over `batches` from random weights. Raises FitError when no size of a micro-batch
    fits.
    """
    for size in settings.sizes:
        _forget_what_was_before(backend)
        try:
            trained = _random_model(config, model, backend.device, settings.compiled)
            taken = _train(trained, backend, _split(batches, size), settings)
            peak = backend.memory()["peak"] if backend.device.type != "cpu" else None
            return ResidentFigures(settings.recompute, size, steady(taken), peak)
        except torch.OutOfMemoryError:
            pass  # a smaller size may fit
        finally:
            # The memory of this model must be free for the next one.
            trained = None
            _forget_what_was_before(backend)
    raise FitError(
        "Training with all states on the device runs out of its memory even with "
        f"{settings.sizes[-1]} rows at once."
    )


def _forget_what_was_before(backend: Backend) -> None:
    gc.collect()
    backend.reset_peak()


def _random_model(config: Any, model: ModelConfig, device: torch.device, compiled: bool) -> Any:
    """Builds a model of transformers with random weights on the device."""
    attention: str = "sdpa" if model.attention == "auto" else model.attention
    if compiled:
        set_up_compiler()
        attention = DOCUMENTS
    built = empty_model(copy.deepcopy(config), TORCH_DTYPES[model.dtype], attention)
    if compiled:
        for block in find_layers(built, built.config):
            block.compile()
    filled: dict[int, nn.Parameter] = {}
    for module in built.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            # Tied parameters are one object and must remain one.
            if id(parameter) not in filled:
                filled[id(parameter)] = _random_parameter(name, parameter, device)
            module._parameters[name] = filled[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return built.train()


def _random_parameter(name: str, like: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Returns a parameter of the same shape: random for matrices, 1 for norms, 0 for biases."""
    values = torch.zeros(like.shape, dtype=like.dtype, device=device)
    if like.dim() > 1:
        values.normal_(0.0, 0.02)
    elif name == "weight":
        values.fill_(1.0)
    return nn.Parameter(values)


def _split(batches: Sequence[MicroBatch], size: int) -> list[MicroBatch]:
    """Returns the same rows in micro-batches of at most `size` rows, as equal in size as
    possible.
    """
    parts: list[MicroBatch] = []
    for batch in batches:
        for start, stop in micro_batch_bounds(len(batch.input_ids), size):
            ids, labels = batch.input_ids[start:stop], batch.labels[start:stop]
            parts.append(MicroBatch(ids, labels, None, ids.size, int((labels >= 0).sum())))
    return parts


def _train(
    model: Any, backend: Backend, batches: Sequence[MicroBatch], settings: ResidentSettings
) -> list[float]:
    """Trains, and returns the seconds of each step: at least four."""
    if settings.recompute:
        # The new name appeared in transformers 5.2x; the old one disappears in 6.
        enable = getattr(model, "activation_checkpointing_enable", None)
        if enable is None:
            enable = model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01, fused=True)
    on_device = []
    for batch in batches:
        ids = torch.from_numpy(batch.input_ids).to(backend.device)
        labels = torch.from_numpy(batch.labels).to(backend.device)
        on_device.append((ids, labels))
    scale = 1.0 / sum(batch.loss_tokens for batch in batches)
    chunks = LossChunks(settings.loss_chunk, settings.compiled)
    backend.drain()
    taken: list[float] = []
    while (
        len(taken) < LEAST_STEPS
        or sum(taken) < settings.seconds
        or (sum(taken) < 2 * settings.seconds and not steady(taken).is_steady)
    ):
        began = time.perf_counter()
        for ids, labels in on_device:
            _accumulate(model, ids, labels, scale, chunks)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # The gradients stay allocated: all states are on the device.
        optimizer.zero_grad(set_to_none=False)
        backend.drain()  # measure the time of the device, not only of the launches
        taken.append(time.perf_counter() - began)
    return taken


def _accumulate(
    model: Any, ids: torch.Tensor, labels: torch.Tensor, scale: float, chunks: LossChunks
) -> None:
    """Adds the gradients of one micro-batch, `ids` and `labels` [rows, tokens].

    Its logits are never all in memory, as in the streamed step. The soft cap of the logits that a
    few model families have is left out, because it takes almost no time.
    """
    hidden = model.base_model(input_ids=ids, use_cache=False)[0]
    head = model.get_output_embeddings()
    states, targets = hidden.detach().flatten(0, 1), labels.flatten()
    gradient = torch.empty_like(states)
    loss_of = compiled_function(cross_entropy, "The loss") if chunks.compiled else cross_entropy
    for start in range(0, len(states), chunks.size):
        stop = start + chunks.size
        chunk = states[start:stop].requires_grad_()
        loss = loss_of(head(chunk), targets[start:stop]) * scale
        loss.backward()
        gradient[start:stop] = chunk.grad
    hidden.backward(gradient.view_as(hidden))
