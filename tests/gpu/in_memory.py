"""A Qwen2 model is trained here with all states on the device, by the engine's own optimizers.

- Weights are in the engine's planes: `weight_high`, with which the device computes, and
  `weight_low`. Moments are in fp32, in bf16 or in 8 bits, where
  `engine.planning.layout.optimizer_states` puts them.
- Gradients are those of one micro-batch, as the engine has them: of blocks in bf16, of embedding
  and head summed in fp32, and all rounded to bf16 before the update. Norms are of the accumulators.
- `engine.runtime.optimizer.device_adamw` and `engine.runtime.optimizer.device_moments` update the
  states, and `engine.runtime.step.cross_entropy` computes the loss in chunks.
- Blocks are written anew, since query, key and value are neighbors in their plane, as are gate
  and up: each group is one matrix product. All blocks share one compiled graph.
- On a GPU, forward, backward and clip factor are one CUDA graph. The update is launched after it,
  because its random bits depend on the step. The host runs ahead, so that this costs no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from engine.config.optimizers import ADAMW, MOMENTS, Optimizer, OptimizerSettings
from engine.config.settings import ModelConfig, OptimConfig
from engine.model.build.build import build_model
from engine.model.build.units import TORCH_DTYPES
from engine.planning.layout.layout import WEIGHT_PLANES, UnitLayout
from engine.planning.schedule.buffers import EMBED, HEAD
from engine.runtime.device.compiled import CompiledFunction, functions_try_again, set_up_compiler
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.host_states import HostStates
from engine.runtime.optimizer.device_adamw import StepFactors, clip_of, update
from engine.runtime.optimizer.device_moments import (
    RoundedPlanes,
    RoundedStep,
    moment_tables,
    update_rounded,
)
from engine.runtime.step.cross_entropy import (
    LossChunks,
    LossTargets,
    TailGradients,
    chunked_loss,
    loss_without_gradients,
)
from engine.training.loop.lr_schedule import learning_rate
from engine.training.weights.weights import initialize

JOINED = (
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ("self_attn.o_proj.weight",),
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    ("mlp.down_proj.weight",),
    ("input_layernorm.weight",),
    ("post_attention_layernorm.weight",),
)
"""The parameters of a block, in the order in which a block takes them. Those of a group are one
matrix or vector.
"""


@dataclass(frozen=True)
class TrainingSettings:
    """How the model is computed."""

    rows: int
    length: int
    """A row has this many tokens that carry loss, and one more."""
    dtype: str = "bfloat16"
    loss_chunk: int = 4096
    compiled: bool = False
    graph: bool = False
    """Forward and backward are captured in a CUDA graph."""
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Moments:
    """How the moments of a training are kept."""

    optimizer: Optimizer
    exact_embed: bool = True
    """With 8 bits, those of the embedding are in bf16 as in the engine, and else in 8 bits too."""

    def layout(self, layout: UnitLayout) -> UnitLayout:
        """Returns the layout by which a unit's moments are placed."""
        if layout.unit == EMBED and not self.exact_embed:
            return replace(layout, unit="an embedding like other units")
        return layout


# ---------------------------------------------------------------- the model


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the norm of `hidden` [..., width], as transformers computes it."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(hidden.dtype)


def rotary(config: Any, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosine and sine of each position and feature of a head, [tokens, features]."""
    width = config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / config.rope_parameters["rope_theta"] ** exponents
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], 1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


Block = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]], torch.Tensor]


def block_of(config: Any) -> Block:
    """Returns the function that runs a block on `hidden` [rows, tokens, width], with the cosine and
    sine of `rotary` and the groups of JOINED as weights.
    """
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    features, eps = config.hidden_size // heads, config.rms_norm_eps

    def block(
        hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, weights: list[torch.Tensor]
    ) -> torch.Tensor:
        qkv, qkv_bias, out, gate_up, down, norm_before, norm_between = weights
        rows, tokens, width = hidden.shape
        entering = rms_norm(hidden, norm_before, eps)
        each = F.linear(entering, qkv, qkv_bias).view(rows, tokens, -1, features)
        turning, value = each.transpose(1, 2).split([heads + keys, keys], 1)
        left, right = turning.chunk(2, -1)
        turned = turning * cosine + torch.cat([-right, left], -1) * sine
        query, key = turned.split([heads, keys], 1)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + F.linear(found.transpose(1, 2).reshape(rows, tokens, width), out)
        entering = rms_norm(hidden, norm_between, eps)
        gate, up = F.linear(entering, gate_up).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, down)

    return block


@dataclass(frozen=True)
class Tail:
    """The final norm and the tied head."""

    norm: torch.Tensor
    embedding: torch.Tensor
    eps: float

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits [n, vocabulary] of `hidden` [n, width]."""
        return F.linear(rms_norm(hidden, self.norm, self.eps), self.embedding)


def joined(layout: UnitLayout, plane: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """Returns parameters that follow each other in a plane [numel] as one, sharing memory."""
    places = {spec.name: (offset, spec) for spec, offset in zip(layout.parameters, layout.offsets)}
    start, first = places[names[0]]
    stop, rows = start, 0
    for name in names:
        offset, spec = places[name]
        if offset != stop:
            raise ValueError(f"{layout.unit}: {name} does not follow the one before it")
        stop, rows = offset + spec.numel, rows + spec.shape[0]
    return plane[start:stop].view(rows, *first.shape[1:])


# ---------------------------------------------------------------- the states


class UnitStates:
    """A `UnitStates` has the planes of a unit on the device."""

    def __init__(self, layout: UnitLayout, states: HostStates, device: torch.device):
        self.layout = layout
        self._states = states
        names = [name for name in states.planes if name in WEIGHT_PLANES]
        self.weights = {name: self._initial(name).to(device) for name in names}
        # To the host's memory, `to` returns the same tensor.
        self.weights = {name: plane.clone() for name, plane in self.weights.items()}
        self.grad = torch.zeros_like(self.weights["weight_high"])
        self.moments: dict[str, torch.Tensor] = {}
        self._kind = Moments(ADAMW)

    def _initial(self, plane: str) -> torch.Tensor:
        return self._states.tensor(self.layout.unit, plane)

    def begin(self, kind: Moments) -> None:
        """Takes the initial weights, and moments of zeros."""
        for name, plane in self.weights.items():
            plane.copy_(self._initial(name))
        self._kind = kind
        sizes = kind.layout(self.layout).plane_bytes(self._states.dtype, kind.optimizer)
        device = self.grad.device
        for name in MOMENTS:
            self.moments[name] = torch.zeros(sizes[name], dtype=torch.uint8, device=device)
            if kind.optimizer == ADAMW:
                # No view of bytes: torch does not compile changes of views of another dtype.
                numel = self.layout.numel
                self.moments[name] = torch.zeros(numel, dtype=torch.float32, device=device)

    def update(
        self, factors: StepFactors, tables: list[torch.Tensor], key: int, compiled: bool
    ) -> None:
        """Applies a step, as the engine's op does for the whole unit."""
        decayed = self.layout.decay_numel
        if self._kind.optimizer == ADAMW:
            update(self.weights | self.moments, self.grad, factors, decayed, compiled)
            return
        ranges = self._kind.layout(self.layout).state_ranges(self._kind.optimizer)["exp_avg"]
        weights = [self.weights[name] for name in WEIGHT_PLANES if name in self.weights]
        moments = [self.moments[name] for name in MOMENTS]
        piece = RoundedPlanes(ranges, 0, self.grad, weights, moments)
        update_rounded(piece, RoundedStep(factors, tables, key), decayed, compiled)

    def masters(self) -> torch.Tensor:
        """Returns the fp32 weights, [numel]."""
        high = self.weights["weight_high"]
        if "weight_low" not in self.weights:
            return high.clone()
        bits = high.view(torch.int16).to(torch.int32) << 16
        return (bits + self.weights["weight_low"].to(torch.int32)).view(torch.float32)


class InMemoryTraining:
    """An `InMemoryTraining` trains the shape `config` (of transformers, Qwen2, tied) on `device`,
    any number of times from the same random weights, which are drawn on the host. Kernels and the
    CUDA graph are made once.
    """

    def __init__(self, config: Any, settings: TrainingSettings, device: torch.device):
        self.settings = settings
        self.device = device
        model = build_model(
            config, ModelConfig(source="random", init="random", dtype=settings.dtype)
        )
        if not model.tied:
            raise ValueError("only a model with a tied head can be trained here")
        self._states = HostStates(model.layouts, settings.dtype)
        self._states.allocate_weights()
        initialize(model, self._states, 0, torch.device("cpu"))
        self.config = model.config
        self.states = {
            layout.unit: UnitStates(layout, self._states, device) for layout in model.layouts
        }
        self._bind([unit.name for unit in model.blocks])
        self._block: Block = block_of(model.config)
        if settings.compiled:
            set_up_compiler()
            self._block = CompiledFunction(self._block, "A block", dynamic=False)
        dtype = TORCH_DTYPES[settings.dtype]
        cosine, sine = rotary(model.config, settings.length, dtype)
        self._positions = cosine.to(device), sine.to(device)
        self.ids = torch.zeros(settings.rows, settings.length + 1, dtype=torch.int64, device=device)
        """The rows of a step, int64 [rows, tokens + 1]."""
        self._targets = torch.arange(settings.rows * settings.length, device=device)
        self.norms = torch.zeros(len(self.states) + 1, dtype=torch.float64, device=device)
        """Squared norms of the units' gradients, then the loss, float64 [units + 1]."""
        self.clip = torch.ones(2, dtype=torch.float32, device=device)
        self._tables = moment_tables(device)
        self._scalars = torch.zeros(8, dtype=torch.float32, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._prepared = False

    def _bind(self, blocks: list[str]) -> None:
        """Makes the leaves of autograd, which share the memory of weights, and where their
        gradients go.
        """
        self._leaves: list[list[torch.Tensor]] = []
        self._gradients: list[torch.Tensor] = []
        for name in blocks:
            states = self.states[name]
            high, layout = states.weights["weight_high"], states.layout
            views = [joined(layout, high, names) for names in JOINED]
            self._leaves.append([view.detach().requires_grad_() for view in views])
            self._gradients += [joined(layout, states.grad, names) for names in JOINED]
        embed_and_head, self._sums = [], []
        for unit in (HEAD, EMBED):
            states = self.states[unit]
            (spec,) = states.layout.parameters
            high = joined(states.layout, states.weights["weight_high"], [spec.name])
            embed_and_head.append(high.detach().requires_grad_())
            self._sums.append(torch.zeros(states.layout.numel, device=self.device))
        self._tail = Tail(embed_and_head[0], embed_and_head[1], self.config.rms_norm_eps)

    # ------------------------------------------------------------ a run

    def begin(self, kind: Moments, optim: OptimConfig, steps: int, seed: int) -> None:
        """Begins a run of `steps` steps from the initial weights. `seed` is that of the random bits
        by which moments in bf16 are rounded.
        """
        for states in self.states.values():
            states.begin(kind)
        decay = optim.weight_decay
        adamw = HostAdamW(
            self._states, OptimizerSettings(optim.beta1, optim.beta2, optim.eps, decay, seed)
        )
        adamw.close()  # it only says the factors and keys of steps
        rates = [learning_rate(optim, step, steps) for step in range(1, steps + 1)]
        rows = [adamw.scalars(step, rate) for step, rate in enumerate(rates, 1)]
        self._factors = torch.stack([torch.from_numpy(row) for row in rows]).to(self.device)
        self._key = adamw.key

    @property
    def moment_bytes(self) -> int:
        """Both moments of all units take this many bytes."""
        moments = [plane for states in self.states.values() for plane in states.moments.values()]
        return sum(plane.nbytes for plane in moments)

    def step(self, number: int, ids: torch.Tensor) -> None:
        """Applies step `number` (from 1) of the run, with the rows `ids` [rows, tokens + 1]. It
        does not wait for the device.
        """
        self.gradients(ids)
        self.apply(number)

    def gradients(self, ids: torch.Tensor) -> None:
        """Computes loss, gradients and clip factor of the rows `ids` [rows, tokens + 1]."""
        self.ids.copy_(ids)
        if not self._prepared:
            self._prepare()
        if self._graph is None:
            self.forward_backward()
        else:
            self._graph.replay()

    def apply(self, number: int) -> None:
        """Updates all states with the gradients."""
        self._scalars.copy_(self._factors[number - 1])
        factors = StepFactors(self.clip, self._scalars)
        for unit, states in self.states.items():
            states.update(factors, self._tables, self._key(unit, number), self.settings.compiled)

    def _prepare(self) -> None:
        """Compiles the block, and captures the graph. What fails is told, and done without."""
        self._prepared = True
        if isinstance(self._block, CompiledFunction):
            try:
                self.forward_backward()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # the compiler raises many kinds
                self._block.abort(error)
                print(f"the block is not compiled: {self._block.problem}", flush=True)
        if not self.settings.graph:
            return
        try:
            self._graph = self._captured()
        except Exception as error:  # a run without the graph is as good
            torch.cuda.set_stream(torch.cuda.default_stream())
            torch.cuda.synchronize()
            # What did not run while it was captured may still be good.
            functions_try_again()
            if isinstance(self._block, CompiledFunction):
                self._block.try_again()
            print(f"no CUDA graph: {type(error).__name__}: {error}", flush=True)

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        """Returns forward and backward as a graph, if it finds what they found."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                self.forward_backward()
        torch.cuda.current_stream().wait_stream(aside)
        expected = self.norms.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward_backward()
        self.norms.zero_()
        graph.replay()
        # Some of the backward's sums have no fixed order.
        if not torch.allclose(self.norms, expected, rtol=1e-2):
            print(f"no CUDA graph: it found {self.norms}, not {expected}", flush=True)
            return None
        return graph

    # ------------------------------------------------------------ forward and backward

    def forward_backward(self) -> None:
        """Computes loss, gradients, norms and clip factor of the rows in `ids`."""
        inputs, labels = self.ids[:, :-1], self.ids[:, 1:].reshape(-1)
        first = F.embedding(inputs, self._tail.embedding.detach()).requires_grad_()
        hidden = self._through_blocks(first)
        for total in self._sums:
            total.zero_()

        def accumulate(gradients: tuple[torch.Tensor | None, ...]) -> None:
            for total, gradient in zip(self._sums, gradients):
                assert gradient is not None  # the tail uses both
                total[: gradient.numel()].view(gradient.shape).add_(gradient)

        loss, gradient = chunked_loss(
            self._tail,  # type: ignore[arg-type]
            hidden,
            LossTargets(self._targets, labels, 1.0 / len(labels)),
            LossChunks(self.settings.loss_chunk, self.settings.compiled),
            TailGradients([self._tail.norm, self._tail.embedding], accumulate),
        )
        leaves = [leaf for weights in self._leaves for leaf in weights]
        entering, *gradients = torch.autograd.grad(hidden, [first, *leaves], gradient)
        with torch.no_grad():
            torch._foreach_copy_(self._gradients, gradients)
            shape = self._tail.embedding.shape
            total = self._sums[1][: shape.numel()].view(shape)
            total.index_add_(0, inputs.reshape(-1), entering.reshape(-1, shape[1]).float())
            self._clip(loss)

    def _clip(self, loss: torch.Tensor) -> None:
        """Rounds the accumulators, and computes norms and clip factor."""
        summed = dict(zip((HEAD, EMBED), self._sums))
        for position, (unit, states) in enumerate(self.states.items()):
            gradient = summed.get(unit, states.grad)
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            self.norms[position].copy_(norm.square())
            if unit in summed:
                states.grad.copy_(gradient)
        self.norms[-1].copy_(loss)
        self.clip.copy_(clip_of(self.norms, self.settings.max_grad_norm, self.clip))

    def _through_blocks(self, hidden: torch.Tensor) -> torch.Tensor:
        for weights in self._leaves:
            hidden = self._block(hidden, *self._positions, weights)
        return hidden

    def evaluate(self, rows: torch.Tensor) -> float:
        """Returns the mean loss of `rows` [a multiple of the rows of a step, tokens + 1]."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for start in range(0, len(rows), self.settings.rows):
            ids = rows[start : start + self.settings.rows].to(self.device, torch.int64)
            embedding = self._tail.embedding.detach()
            # With gradients, as in training, so that no other graph is compiled.
            hidden = self._through_blocks(F.embedding(ids[:, :-1], embedding).requires_grad_())
            loss, _ = loss_without_gradients(
                self._tail,  # type: ignore[arg-type]
                hidden.detach(),
                LossTargets(self._targets, ids[:, 1:].reshape(-1), 1.0),
                LossChunks(self.settings.loss_chunk, self.settings.compiled),
            )
            total += loss
        return float(total) / (rows.shape[0] * (rows.shape[1] - 1))

    def close(self) -> None:
        """Frees the host's memory."""
        self._states.close()
