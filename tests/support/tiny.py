"""Tiny random models of every family under test, and the plain torch training they are compared
with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.config.adapters import Adapters
from engine.config.optimizers import OptimizerSettings
from engine.config.regularization import NO_REGULARIZATION, Regularization
from engine.config.settings import ModelConfig
from engine.config.trained_parts import Parts
from engine.model.build.build import build_model
from engine.model.build.units import StreamedModel
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.collectives.process_groups import Collectives
from engine.runtime.device.backend import Backend
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.host.host_optimizer import HostOptimizer
from engine.runtime.host.host_states import HostStates
from engine.runtime.host.optimizers import host_optimizer
from engine.runtime.sampling.generate import Sampler
from engine.runtime.step.engine_settings import EngineSettings
from engine.runtime.step.streaming_engine import StreamingEngine

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "olmo2",
    "mixtral",
    "qwen3_moe",
)
"""Slow tests train all of these."""
MOST_USED = ("llama", "qwen2", "qwen3", "gemma3_text", "mistral", "phi3", "gpt2", "mixtral")
"""The families that people download most, of as many kinds: a plain run of the tests trains
these, in float32 and in bf16.
"""
VOCAB = 97


def tiny_config(family: str, **changes):
    """A configuration with three blocks of width 32."""
    values = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    if family == "gpt2":
        values = dict(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    if family in ("gemma2", "gemma3_text", "qwen3", "qwen3_moe"):
        values["head_dim"] = 8
    if family in ("gemma2", "gemma3_text"):
        values["sliding_window"] = 8
    if family == "mixtral":
        values.update(num_local_experts=4, num_experts_per_tok=2)
    if family == "qwen3_moe":
        values.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    return CONFIG_MAPPING[family](**(values | changes))


@dataclass
class Batch:
    """One micro-batch as the data side makes it."""

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray | None
    tokens: int
    loss_tokens: int
    places: np.ndarray | None = None
    lengths: np.ndarray | None = None
    weights: np.ndarray | None = None


def weighted_batches(count: int, rows: int = 2, length: int = 12, seed: int = 0) -> list[Batch]:
    """Returns `random_batches` whose labels have weights from 0.5 to 3."""
    batches = random_batches(count, rows, length, seed)
    generator = np.random.default_rng(1000 + seed)
    for batch in batches:
        drawn = generator.choice([0.5, 1.0, 1.7, 3.0], batch.labels.shape).astype(np.float32)
        batch.weights = np.where(batch.labels >= 0, drawn, np.float32(0))
    return batches


def random_batches(
    count: int,
    rows: int = 2,
    length: int = 12,
    seed: int = 0,
    masked: float = 0.3,
    vocabulary: int = VOCAB,
) -> list[Batch]:
    """Micro-batches of random tokens; labels are the next token, some of them without loss."""
    generator = np.random.default_rng(seed)
    batches = []
    for number in range(count):
        ids = generator.integers(3, vocabulary, (rows, length))
        labels = np.full((rows, length), -100)
        labels[:, :-1] = ids[:, 1:]
        labels[generator.random((rows, length)) < masked] = -100
        places = np.arange(number * rows, (number + 1) * rows)
        lengths = np.full(rows, length)
        count_of = int((labels >= 0).sum())
        batches.append(Batch(ids, labels, None, ids.size, count_of, places, lengths))
    return batches


def plain_model(config, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():  # norms at exactly one and biases at exactly zero would hide mistakes
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def plain_loss(model: torch.nn.Module, batches: list[Batch]) -> torch.Tensor:
    total = sum(b.loss_tokens for b in batches)
    loss = torch.zeros(())
    for batch in batches:
        positions = (
            {}
            if batch.position_ids is None
            else {"position_ids": torch.from_numpy(batch.position_ids)}
        )
        logits = model(
            input_ids=torch.from_numpy(batch.input_ids), use_cache=False, **positions
        ).logits.float()
        labels = torch.from_numpy(batch.labels).reshape(-1)
        loss = (
            loss
            + F.cross_entropy(logits.view(-1, logits.shape[-1]), labels, reduction="sum") / total
        )
    return loss


def weighted_loss(model: torch.nn.Module, batches: list[Batch]) -> torch.Tensor:
    """Returns the weighted mean of the cross-entropies of all labels."""
    total, loss = sum(float(batch.weights.sum()) for batch in batches), torch.zeros(())
    for batch in batches:
        logits = model(input_ids=torch.from_numpy(batch.input_ids), use_cache=False).logits
        flat = logits.float().view(-1, logits.shape[-1])
        labels = torch.from_numpy(batch.labels).reshape(-1)
        each = F.cross_entropy(flat, labels, reduction="none")
        loss = loss + (each * torch.from_numpy(batch.weights).reshape(-1)).sum() / total
    return loss


def pour(plain: torch.nn.Module, model: StreamedModel, states: HostStates) -> None:
    parameters = dict(plain.named_parameters())
    for unit in model.units:
        for spec in unit.layout.parameters:
            if not spec.adapter:
                states.parameters.write(unit.name, spec.name, parameters[spec.full_name])


@dataclass
class Streamed:
    """An engine over planes poured from a plain model."""

    model: StreamedModel
    host_states: HostStates
    engine: StreamingEngine
    backend: Backend
    optimizer: HostOptimizer

    @functools.cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.engine)

    def planes(self) -> list[torch.Tensor]:
        """Returns copies of all planes but the gradients, in the order of the units."""
        self.engine.drain()
        return [
            self.host_states.tensor(unit.name, plane).clone()
            for unit in self.model.units
            for plane in self.host_states.planes
            if plane != "grad" and self.host_states.tensor(unit.name, plane).numel()
        ]

    def kept_planes(self) -> list[torch.Tensor]:
        """Returns the bytes of the planes of weights and moments, wherever they are."""
        states = self.host_states
        return [
            torch.from_numpy(
                states.content(unit.name, plane, 0, states.nbytes(unit.name, plane))
            ).clone()
            for unit in self.model.units
            for plane in states.planes
            if plane != "grad"
        ]

    def planes_after(
        self, micro_batches: int, steps: int = 2, made: Callable[..., list[Batch]] = random_batches
    ) -> list[torch.Tensor]:
        """Trains steps that are submitted without draining between them, and closes. Returns
        `kept_planes`.
        """
        for step in range(1, steps + 1):
            self.engine.train_step(step, made(micro_batches, seed=step), 1e-2)
        self.engine.drain()
        planes = self.kept_planes()
        self.close()
        return planes

    def close(self) -> None:
        self.engine.drain()
        self.engine.close()
        self.optimizer.close()
        self.host_states.close()
        self.backend.close()


def streamed(
    plain: torch.nn.Module,
    choices: PlanChoices,
    *,
    backend: Backend | None = None,
    dtype: str = "float32",
    tokens: int = 24,
    eps: float = 1e-5,
    weight_decay: float = 0.1,
    loss_chunk: int = 7,
    max_grad_norm: float | None = 1.0,
    seed: int = 0,
    config=None,
    optimizer: str = "adamw",
    disk: Path | None = None,
    collectives: Collectives | None = None,
    parts: Parts | Adapters | None = None,
    regularization: Regularization = NO_REGULARIZATION,
) -> Streamed:
    """The same model, streamed. `config`: where the model was made from a part of it. `disk`: the
    folder of moments that are on the disk. `collectives`: what reaches the other ranks. `parts`:
    those that are trained, None for all. `regularization`: what changes the steps.
    """
    backend = backend or CpuBackend()
    model = build_model(config or plain.config, ModelConfig(source="tiny", dtype=dtype), parts)
    on_device = backend.device.type != "cpu"
    states = HostStates(
        model.layouts,
        dtype,
        backend.register if on_device else None,
        backend.unregister if on_device else None,
        threads=2,
        disk=disk,
    )
    states.allocate_weights()
    pour(plain, model, states)
    states.allocate_states(optimizer=optimizer, gradients=not choices.gradients.gradients_on_gpu)
    settings = OptimizerSettings(eps=eps, weight_decay=weight_decay, seed=seed)
    updater = host_optimizer(states, settings, threads=2)
    engine = StreamingEngine(
        model,
        states,
        backend,
        EngineSettings(
            choices, tokens, loss_chunk, max_grad_norm, seed, collectives, regularization
        ),
        updater,
    )
    return Streamed(model, states, engine, backend, updater)
