"""Training of the same shape as everyone does it where it fits: weights, gradients and moments all
on the device, plain transformers, torch's fused AdamW. What streaming is compared with, on the same
device and in the same run.
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
from engine.data.rows import MicroBatch, micro_batch_bounds
from engine.errors import FitError
from engine.model.build import find_layers
from engine.model.layout import DOCUMENTS
from engine.model.library import empty_model
from engine.model.units import TORCH_DTYPES
from engine.runtime.backend import Backend
from engine.runtime.compiled import compiled_function, set_up_compiler
from engine.runtime.loss import cross_entropy

STATE_COPIES = 4
"""Weight, gradient and two moments, all in the model's dtype."""


@dataclass(frozen=True)
class ResidentFigures:
    """Training with all states on the device. `recompute`: blocks are checkpointed."""

    recompute: bool
    micro_batch_size: int
    steps: int
    """Steps of the steady state."""
    seconds: float
    """Of a step, the mean over these."""
    peak: int
    """Most device bytes allocated at once."""


def resident_bytes(parameters: int, dtype: str) -> int:
    """Bytes of all states on the device."""
    return STATE_COPIES * parameters * TORCH_DTYPES[dtype].itemsize


def train_resident(
    config: Any,
    model: ModelConfig,
    backend: Backend,
    batches: Sequence[MicroBatch],
    recompute: bool,
    sizes: Sequence[int],
    loss_chunk: int,
    seconds: float,
    compiled: bool = False,
) -> ResidentFigures:
    """Steps over `batches` from random weights for about `seconds`, the first half of them to warm
    up. sizes: rows of a micro-batch to try, most wanted first; one that the device has no memory
    for is passed over. compiled: with the kernels that a compiled streamed step has. Raises
    FitError when none fits.
    """
    for size in sizes:
        trained = optimizer = None
        gc.collect()
        backend.reset_peak()
        try:
            trained = _random_model(config, model, backend.device, compiled)
            if recompute:
                # The new name came with transformers 5.2x, the old one goes with 6.
                enable = (
                    getattr(trained, "activation_checkpointing_enable", None)
                    or trained.gradient_checkpointing_enable
                )
                enable({"use_reentrant": False})
            optimizer = torch.optim.AdamW(
                trained.parameters(), lr=1e-6, weight_decay=0.01, fused=True
            )
            taken = _steps(
                trained, optimizer, backend, _split(batches, size), loss_chunk, seconds, compiled
            )
            steady = taken[len(taken) // 2 :]
            return ResidentFigures(
                recompute, size, len(steady), sum(steady) / len(steady), backend.memory()["peak"]
            )
        except torch.OutOfMemoryError:
            pass
        finally:
            trained = optimizer = None
            gc.collect()
            backend.reset_peak()
    raise FitError(
        f"Training with all states on the device runs out of its memory even with {sizes[-1]} rows "
        "at once."
    )


def _random_model(
    config: Any, model: ModelConfig, device: torch.device, compiled: bool
) -> nn.Module:
    attention = "sdpa" if model.attention == "auto" else model.attention
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
            if id(parameter) not in filled:
                values = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
                if parameter.dim() > 1:
                    values.normal_(0.0, 0.02)
                elif name == "weight":
                    values.fill_(1.0)
                filled[id(parameter)] = nn.Parameter(values)
            module._parameters[name] = filled[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return built.train()


def _split(batches: Sequence[MicroBatch], size: int) -> list[MicroBatch]:
    """The same rows in micro-batches of at most `size`, as equal as can be."""
    parts = []
    for batch in batches:
        for start, stop in micro_batch_bounds(len(batch.input_ids), size):
            ids, labels = batch.input_ids[start:stop], batch.labels[start:stop]
            parts.append(MicroBatch(ids, labels, None, ids.size, int((labels >= 0).sum())))
    return parts


def _steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backend: Backend,
    batches: Sequence[MicroBatch],
    loss_chunk: int,
    seconds: float,
    compiled: bool,
) -> list[float]:
    """Seconds of each step: at least four."""
    tokens = [
        (
            torch.from_numpy(b.input_ids).to(backend.device),
            torch.from_numpy(b.labels).to(backend.device),
        )
        for b in batches
    ]
    count = sum(b.loss_tokens for b in batches)
    backend.drain()
    taken: list[float] = []
    while len(taken) < 4 or sum(taken) < seconds:
        began = time.perf_counter()
        for ids, labels in tokens:
            _accumulate(model, ids, labels, 1.0 / count, loss_chunk, compiled)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        backend.drain()
        taken.append(time.perf_counter() - began)
    return taken


def _accumulate(
    model: nn.Module,
    ids: torch.Tensor,
    labels: torch.Tensor,
    scale: float,
    loss_chunk: int,
    compiled: bool,
) -> None:
    """Add the gradients of one micro-batch; its logits are never all in memory, as in the streamed
    step. A soft cap of the logits, which a few families have and which costs next to nothing, is
    left out.
    """
    hidden = model.base_model(input_ids=ids, use_cache=False)[0]
    head, states, targets = (
        model.get_output_embeddings(),
        hidden.detach().flatten(0, 1),
        labels.flatten(),
    )
    gradient = torch.empty_like(states)
    loss_of = compiled_function(cross_entropy) if compiled else cross_entropy
    for start in range(0, len(states), loss_chunk):
        piece = states[start : start + loss_chunk].requires_grad_()
        loss = loss_of(head(piece), targets[start : start + loss_chunk]) * scale
        loss.backward()
        gradient[start : start + loss_chunk] = piece.grad
    hidden.backward(gradient.view_as(hidden))
