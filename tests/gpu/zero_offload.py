"""DeepSpeed's ZeRO-3 with offload on the same work, one process a GPU:

    OMP_NUM_THREADS=16 torchrun --nproc-per-node 2 -m tests.gpu.zero_offload SHAPE --rows 96

SHAPE is a folder with a config.json. The program needs `deepspeed`, which is no dependency of this
project, and a C++ compiler, with which DeepSpeed builds its CPUAdam. `OMP_NUM_THREADS` is the
number of cores that each process gets, because torchrun would give each process one thread.

- Random weights in bf16 are trained on random tokens. Masters and moments are fp32 in pinned host
  memory, where CPUAdam updates them. Gradients are summed in bf16, as DeepSpeed does it if not told
  otherwise. Weights are in pinned host memory too, or on the GPUs with `--weights-stay`; each
  process has its partition of them.
- Every block is checkpointed, unless `--keep-activations` is given. Liger's kernels are used if
  they can be imported, and else the loss is computed in chunks by torch.
- Micro-batches are tried from the smallest up. A JSON line follows each of them at once, with the
  seconds of a step (the mean of the second half of the steps) and the tokens of all GPUs in a
  second. If a micro-batch does not fit, a line says so, and the program ends with exit code 1,
  because the other processes may wait for this one forever.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

CHUNK = 2048
"""Torch computes the logits of this many positions at once."""
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""It takes a head's weight [vocabulary, width], hidden states [n, width] and target tokens [n], and
returns the mean cross-entropy."""


# ---------------------------------------------------------------- the loss


class ChunkedLoss(torch.autograd.Function):
    """The mean cross-entropy, of which the logits of CHUNK positions exist at once. Gradients are
    computed with it, as Liger does.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # DeepSpeed takes the weight away after the forward, so autograd must not see it here.
        head = weight.detach().requires_grad_()
        head.grad, gradient = torch.zeros_like(head), torch.empty_like(hidden)
        for start in range(0, len(hidden), CHUNK):
            piece = hidden[start : start + CHUNK].detach().requires_grad_()
            with torch.enable_grad():
                logits = F.linear(piece, head).float()
                wrong = F.cross_entropy(logits, targets[start : start + CHUNK], reduction="sum")
                loss = wrong / len(hidden)
            loss.backward()
            gradient[start : start + CHUNK] = piece.grad
            total += loss.detach()
        ctx.save_for_backward(head.grad, gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (scale,) = gradients
        of_weight, of_hidden = ctx.saved_tensors
        return of_weight * scale, of_hidden * scale, None


def torch_loss(weight: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of `hidden` [n, width] with a head `weight` [vocabulary,
    width].
    """
    loss: torch.Tensor = ChunkedLoss.apply(weight, hidden, targets)
    return loss


class HeadWithLoss(nn.Module):
    """A head that returns the loss. DeepSpeed gathers the weights of a module around its own
    forward and backward, so the loss must be computed in the module that has the weight.
    """

    def __init__(self, head: nn.Module, loss: Loss):
        super().__init__()
        self.weight = head.weight
        self._loss = loss

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._loss(self.weight, hidden, targets)


class ModelWithLoss(nn.Module):
    """A causal model of transformers, from tokens to their mean loss."""

    def __init__(self, model: Any, loss: Loss):
        super().__init__()
        self.body = model.base_model
        self.head = HeadWithLoss(model.get_output_embeddings(), loss)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the loss of `ids` int64 [rows, tokens + 1]."""
        hidden = self.body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        return self.head(hidden.flatten(0, 1), ids[:, 1:].flatten())


# ---------------------------------------------------------------- the training


@dataclass(frozen=True)
class Asked:
    """The command line asks for this."""

    shape: str
    rows: int
    length: int
    """A row has this many tokens that carry loss, and one more."""
    steps: int
    weights_stay: bool
    """Weights are not offloaded."""
    keep_activations: bool
    """No block is checkpointed."""
    liger: bool
    """Liger's kernels are used if they can be imported."""


def deepspeed_settings(asked: Asked) -> dict[str, Any]:
    """Returns the configuration of DeepSpeed. Sizes are in parameters."""
    host = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500_000_000,
        # Two blocks of a model of 3 billion parameters are fetched ahead.
        "stage3_prefetch_bucket_size": 200_000_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        # Norms and biases stay on the GPUs.
        "stage3_param_persistence_threshold": 100_000,
        "offload_optimizer": host,
    }
    if not asked.weights_stay:
        zero["offload_param"] = host
    return {
        # The engine is told where a step ends, so that it serves micro-batches of any size.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "steps_per_print": 1_000_000,
    }


@dataclass(frozen=True)
class Figures:
    """What one size of micro-batches gave; it becomes a JSON line."""

    micro_batch: int
    rows_a_gpu: int
    length: int
    ranks: int
    seconds_a_step: float
    """The mean of the second half of the steps."""
    tokens_a_second: float
    """Of all ranks together."""
    seconds: list[float]
    """Every step, those that warm up too."""
    losses: list[float]
    """The mean loss of this rank's rows in each step."""
    skipped_steps: int
    """DeepSpeed applies no step with gradients that are not finite. Times hold if this is 0."""
    peak_gib: float
    """At most this much memory of this rank's GPU was allocated at once."""
    kernels: str
    weights: str
    checkpointed: bool
    threads: int
    """CPUAdam of a rank has this many threads."""
    device: str
    deepspeed: str


class ZeroTraining:
    """A `ZeroTraining` trains one model with micro-batches of any size."""

    def __init__(self, asked: Asked, device: torch.device):
        self.asked = asked
        self.device = device
        config = AutoConfig.from_pretrained(asked.shape)
        torch.manual_seed(0)
        # DeepSpeed cuts the model into partitions; until then, it is on the device.
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.train()
        if not asked.keep_activations:
            # DeepSpeed's hooks work with the reentrant kind of checkpoints.
            model.gradient_checkpointing_enable({"use_reentrant": True})
        self.kernels, loss = "torch", torch_loss
        if asked.liger:
            self.kernels, loss = with_liger(model)
        module = ModelWithLoss(model, loss)
        del model
        self._engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=list(module.parameters()),
            config=deepspeed_settings(asked),
        )
        get_accelerator().empty_cache()
        self.rank: int = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(self.rank)
        size = (asked.rows, asked.length + 1)
        self._ids = torch.randint(config.vocab_size, size, generator=generator).to(device)

    def step(self, size: int) -> float:
        """Applies a step of all rows in micro-batches of `size`, and returns their mean loss."""
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        parts = self._ids.split(size)
        for number, ids in enumerate(parts, 1):
            self._engine.set_gradient_accumulation_boundary(number == len(parts))
            loss = self._engine(ids) * (len(ids) / len(self._ids))
            self._engine.backward(loss, scale_wrt_gas=False)
            self._engine.step()
            total += loss.detach()
        return float(total)

    def measure(self, size: int) -> Figures:
        """Returns the figures of micro-batches of `size`."""
        accelerator, seconds, losses = get_accelerator(), [], []
        accelerator.reset_peak_memory_stats()
        accelerator.synchronize()
        for _ in range(self.asked.steps):
            began = time.perf_counter()
            losses.append(self.step(size))
            accelerator.synchronize()
            seconds.append(time.perf_counter() - began)
        later = seconds[len(seconds) // 2 :]
        mean, ranks = sum(later) / len(later), torch.distributed.get_world_size()
        return Figures(
            micro_batch=size,
            rows_a_gpu=self.asked.rows,
            length=self.asked.length,
            ranks=ranks,
            seconds_a_step=round(mean, 4),
            tokens_a_second=round(ranks * self.asked.rows * self.asked.length / mean, 1),
            seconds=[round(each, 4) for each in seconds],
            losses=[round(each, 4) for each in losses],
            skipped_steps=self._engine.skipped_steps,
            peak_gib=round(accelerator.max_memory_allocated() / 2**30, 2),
            kernels=self.kernels,
            weights="on the GPUs" if self.asked.weights_stay else "in host memory",
            checkpointed=not self.asked.keep_activations,
            threads=torch.get_num_threads(),
            device=device_name(self.device),
            deepspeed=deepspeed.__version__,
        )


def device_name(device: torch.device) -> str:
    """Returns what the device is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def with_liger(model: Any) -> tuple[str, Loss]:
    """Puts Liger's kernels into the model. Returns which kernels it has now, and their loss."""
    try:
        from liger_kernel.transformers import (
            LigerFusedLinearCrossEntropyLoss,
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        return f"torch, since Liger is not there: {error}", torch_loss
    # Liger's own forward would read the head's weight where DeepSpeed has not gathered it.
    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
    # The method alone, so that DeepSpeed does not see a module without weights.
    return "liger", LigerFusedLinearCrossEntropyLoss().forward


# ---------------------------------------------------------------- the command line


def asked_for() -> tuple[Asked, list[int]]:
    """Returns what the command line asks for, and the sizes of micro-batches from the smallest
    up.
    """
    parser = argparse.ArgumentParser(prog="tests.gpu.zero_offload")
    parser.add_argument("shape", help="a folder with a config.json")
    parser.add_argument("--rows", type=int, default=96, help="rows of a step on each GPU")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--sizes", type=int, nargs="+", help="rows of a micro-batch, to be tried")
    parser.add_argument("--steps", type=int, default=6, help="steps for each size")
    parser.add_argument("--weights-stay", action="store_true", help="on the GPUs, in partitions")
    parser.add_argument("--keep-activations", action="store_true", help="checkpoint no block")
    parser.add_argument("--without-liger", action="store_true")
    found = parser.parse_args()
    sizes = sorted(found.sizes or [found.rows // 2, found.rows])
    if sizes[0] < 1 or sizes[-1] > found.rows:
        parser.error(f"--sizes: give micro-batches of 1 to {found.rows} rows")
    # Where torchrun finds no number of threads, it sets one thread.
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        parser.error("give CPUAdam its cores: set OMP_NUM_THREADS to the cores of one process")
    asked = Asked(
        found.shape,
        found.rows,
        found.length,
        found.steps,
        found.weights_stay,
        found.keep_activations,
        not found.without_liger,
    )
    return asked, sizes


def main() -> None:
    """Prints a JSON line for each size of micro-batches."""
    asked, sizes = asked_for()
    accelerator = get_accelerator()
    local = int(os.environ["LOCAL_RANK"])
    accelerator.set_device(local)
    deepspeed.init_distributed()
    began = time.perf_counter()
    training = ZeroTraining(asked, torch.device(accelerator.device_name(local)))
    if not training.rank:
        print(json.dumps({"ready_after_seconds": time.perf_counter() - began}), flush=True)
    for size in sizes:
        try:
            figures = training.measure(size)
        except torch.OutOfMemoryError as error:
            problem = {"micro_batch": size, "problem": str(error), "rank": training.rank}
            print(json.dumps(problem), flush=True)
            # The others wait for this process, and an orderly end would wait for them.
            os._exit(1)
        if not training.rank:
            print(json.dumps(asdict(figures)), flush=True)
        # A process that fails at the next size ends all: the line must be out by then.
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
