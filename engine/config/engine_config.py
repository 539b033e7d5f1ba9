"""The settings of the streaming engine are a section of `TrainConfig` (engine/config/settings.py).

No torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from msgspec import Meta

from engine.config.limits import LARGEST
from engine.errors import ConfigError
from engine.text import GIB

AUTO: Final = "auto"
Auto = Literal["auto"]


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the streaming engine."""

    device: Literal["auto", "cuda", "cpu"] = AUTO
    """Blocks compute on this device; `auto` is the GPU when there is one."""

    gpus: Annotated[int | Auto, Meta(ge=1, le=LARGEST["gpus"])] = 1
    """This many GPUs of this machine compute each step together, each a share of its rows, which
    `train.batch_size` must be a multiple of. RAM holds weights and moments once for all of them.
    `auto` takes as many as make a step fastest. With another number, sums are added in another
    order.
    """

    across_nodes: Literal["auto", "replicate", "shard"] = AUTO
    """Each of several nodes has a copy of all weights and moments (`replicate`) or a shard of them
    (`shard`), see docs/gpus.md.
    """

    gpu_memory_gib: Annotated[float | None, Meta(gt=0, description="give null for no cap")] = None
    """The plan may use at most this much memory of each GPU; null is what is free."""

    slots: Annotated[int | Auto, Meta(ge=1)] = AUTO
    """Number of device buffers that hold one streamed block each; 2 let a prefetch run under the
    compute of the block before.
    """

    activation_checkpointing: Literal["auto", "full", "offload", "offload_pairs", "none"] = AUTO
    """Which activations of a block are recomputed in backward: all of them from the block's input,
    kept on the GPU (`full`) or in RAM (`offload`), or from the input of every second block, in RAM
    (`offload_pairs`); or none, since all are kept (`none`). `auto` keeps the activations of as many
    blocks as there is memory for, and the inputs of every second block alone where RAM is short.
    Results have the same bits.
    """

    blocks_kept_in_slots: Annotated[int | Auto, Meta(ge=0)] = AUTO
    """The device keeps this many blocks (the last ones) from forward to backward, so they are
    fetched once a step.
    """

    states: Literal["auto", "host"] = AUTO
    """Weights and moments live in RAM (`host`), or those of the first units live on the GPU from
    step to step, as far as it has room (`auto`). There they take no RAM and no transfers. With
    moments in fp32, results have the same bits.
    """

    rounds: Annotated[int | Auto, Meta(ge=1)] = AUTO
    """A step's micro-batches are spread over this many whole forward and backward passes: with few
    tokens at a time activations can be kept. `auto` takes what is fastest and sums gradients
    exactly.
    """

    gradients: Literal["auto", "host", "gpu"] = AUTO
    """A step's rounded gradients go to a plane in RAM (`host`), or wait on the GPU until the step's
    clip factor is known (`gpu`). There they take 2 bytes a parameter of GPU memory instead of RAM.
    Results have the same bits. `auto` leaves them there where RAM is short, and where that is as
    fast.
    """

    disk: str | None = None
    """AdamW's moments and block inputs (the hidden states that blocks read) that do not fit in RAM
    go to files in this folder, on a local disk, which every step reads and writes. null keeps all
    of them in memory. Only what does not fit goes there, which wears the drive: `check` says by how
    much. Results have the same bits.
    """

    kernels: Literal["auto", "compiled", "eager"] = AUTO
    """Kernels are compiled by torch (fused: faster, and half of the activations) or run one by one.
    `auto` compiles in bfloat16 on a GPU where Triton and a C compiler are there.
    """

    def within_cap(self, nbytes: int) -> int:
        """Limits `nbytes` bytes of GPU memory to the bytes that the plan may use."""
        if self.gpu_memory_gib is None:
            return nbytes
        return min(nbytes, round(self.gpu_memory_gib * GIB))

    def check(self) -> None:
        """Raises ConfigError for a folder without a name."""
        if self.disk is not None and not self.disk.strip():
            raise ConfigError("engine.disk", "the name is empty; give a folder, or null for none.")
