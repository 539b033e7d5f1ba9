"""The result of the planner. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.planning.fit.memory_items import Item
from engine.planning.schedule.choices import PlanChoices


@dataclass(frozen=True)
class Chosen:
    """The result of `choose`: the plan's choices, the two sizes that go with them, and the memory
    that they take.
    """

    choices: PlanChoices
    micro_batch_size: int
    loss_chunk: int
    gpu_items: tuple[Item, ...]
    """The items of device memory, those of one rank. On the CPU they are the same buffers, in
    RAM.
    """
    offloaded_input_bytes: int
    """Bytes of block inputs that all ranks together keep in RAM."""

    @property
    def rounding(self) -> dict[str, Any]:
        """Choices that affect how results are rounded. A resumed run passes them to `choose`
        again.
        """
        return {
            "micro_batch_size": self.micro_batch_size,
            "loss_chunk": self.loss_chunk,
            "main_grad": self.choices.gradients.main_grad.value,
            "rounds": self.choices.batching.rounds,
            "ranks": self.choices.sharding.ranks,
            "replicas": self.choices.sharding.replicas,
            "nodes_per_replica": self.choices.sharding.nodes_per_replica,
            "compiled": self.choices.kernels.compiled,
            "tile_tokens": self.choices.kernels.tile_tokens,
        }

    def pad_up_to(self, max_seq_len: int) -> int:
        """Returns the length that rows may be padded to, since a block is compiled for few lengths;
        0 where it is not compiled.
        """
        return max_seq_len if self.choices.kernels.compiles_blocks else 0

    @property
    def gpu_bytes(self) -> int:
        return sum(item.bytes for item in self.gpu_items)
