"""Beside a slot, `ExactWeights` holds the weights that a bf16 model computes with in fp32, such as
the router of some mixtures of experts.

The host has every weight as two planes, whatever the device computes with. The slot receives
weight_high of all weights; weight_low follows for these few, and both are joined here.
"""

from __future__ import annotations

import torch

from engine.model.layout import ExactPart


class ExactWeights:
    """An `ExactWeights` has room for the fp32 weights of the unit that is in its slot."""

    def __init__(self, numel: int, device: torch.device):
        self.values = torch.zeros(numel, dtype=torch.float32, device=device)
        """The weights are float32 [numel]; the parameters of templates are views of them."""
        self.low = torch.zeros(numel, dtype=torch.int16, device=device)
        """The values of weight_low are copied into this int16 [numel]."""

    def fetch(self, part: ExactPart, high: torch.Tensor, low: torch.Tensor) -> None:
        """Takes the weights of `part` from `high`, a whole plane on the device, and `low`, a whole
        plane on the host, both [numel of the unit]. It does not wait for the copy.
        """
        here = self.low[part.place : part.place + part.numel]
        here.copy_(low[part.start : part.stop], non_blocking=True)
        self.join(part, high[part.start : part.stop], here)

    def join(self, part: ExactPart, high: torch.Tensor, low: torch.Tensor) -> None:
        """Sets the weights of `part` from the bf16 `high` and the int16 `low`, both [numel of the
        part] on the device.
        """
        # `data` has its own version counter, so autograd does not notice this write, as in a
        # prefetch. The sum is made in place, so that no memory is allocated beside the slots.
        bits = self.values.data[part.place : part.place + part.numel].view(torch.int32)
        bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(low)
