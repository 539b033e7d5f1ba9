"""One run of a block of each kind on two tokens, with weights that occupy no memory: what it
returns, and whether it can be streamed at all. A block that hands state to another block, or keeps
some, is refused by name.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from engine.errors import ModelError
from engine.model.skeleton import BlockArguments, parameters_reached, tensors_in
from engine.model.units import Unit


class HollowProducts(TorchFunctionMode):
    """Within, a linear layer is not computed: its weights are zeros here, and reading those of a
    large head or block takes seconds. Its result is zeros, as it would be, and its gradient would
    go to the same tensors.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return _Zeros.apply(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return input.new_zeros(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise NotImplementedError("nothing is trained while a model is tried")


class Trial:
    """Asked for every block of a capture pass, in order: what it returns beside its hidden state."""

    def __init__(self, module: nn.Module, blocks: list[Unit], dtype: torch.dtype):
        self._family, self._blocks, self._dtype = type(module).__name__, blocks, dtype
        self._extras: dict[int, tuple | None] = {}
        self._handed_on: list[torch.Tensor] = []
        self.untrained: dict[int, set[str]] = {}
        """For each kind of block, the parameters that its output does not depend on by gradient:
        plain training leaves them as they are, and so weight decay must, too.
        """

    def __call__(
        self, position: int, arguments: BlockArguments, hidden: torch.Tensor
    ) -> tuple | None:
        unit = self._blocks[position]
        for path, tensor in _tensors(arguments):
            if any(tensor is placeholder for placeholder in self._handed_on):
                raise ModelError(
                    f"{self._family} hands {unit.name} a further result of the block before it "
                    f"({path}); its gradient would be lost, so this model is refused."
                )
            if tensor.requires_grad:
                raise ModelError(
                    f"{self._family} gives {unit.name} a further input that is trained ({path}); "
                    "its gradient would be lost, so this model is refused."
                )
        if unit.kind not in self._extras:
            self._extras[unit.kind] = self._run(unit, arguments, hidden)
        return self._extras[unit.kind]

    def _run(self, unit: Unit, arguments: BlockArguments, hidden: torch.Tensor) -> tuple | None:
        block = copy.deepcopy(unit.block)
        block.__dict__.pop("forward", None)
        for name, parameter in list(block.named_parameters()):
            owner, _, attribute = name.rpartition(".")
            # calloc: pages that are only read are never backed by memory, and grouped matmuls
            # refuse stride-0 weights.
            hollow = torch.from_numpy(
                np.zeros(parameter.shape, np.uint16 if self._dtype.itemsize == 2 else np.float32)
            )
            block.get_submodule(owner)._parameters[attribute] = nn.Parameter(
                hollow.view(self._dtype)
            )
        containers, own = _contents(arguments), _own_state(block)
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            out = (
                block(*arguments.args, **{arguments.hidden_keyword: leaf}, **arguments.kwargs)
                if arguments.hidden_keyword
                else block(leaf, *arguments.args, **arguments.kwargs)
            )
        if _contents(arguments) != containers:
            raise ModelError(
                f"{self._family} passes state from block to block ({unit.name} changes its own "
                "arguments); its gradients would be wrong, so this model is refused."
            )
        changed = sorted(
            name for name, value in _own_state(block).items() if own.get(name) != value
        )
        if changed:
            raise ModelError(
                f"{self._family} keeps state in its blocks ({unit.name} changes its {changed[0]} "
                "as it runs); a recompute would change it twice, so this model is refused."
            )
        state = out[0] if isinstance(out, (tuple, list)) else out
        reached = parameters_reached(state)
        self.untrained[unit.kind] = {
            name
            for name, p in block.named_parameters()
            if id(p) not in reached and not _in_list(name)
        }
        frozen = [
            name
            for name, p in unit.block.named_parameters()
            if not p.requires_grad and name not in self.untrained[unit.kind]
        ]
        if frozen:
            raise ModelError(
                f"{self._family} keeps {frozen[0]} of its blocks from being trained, which is not "
                "streamed; choose another model."
            )
        if state is out:
            return None
        placeholders = tuple(
            None if extra is None else torch.empty(0, device="meta") for extra in out[1:]
        )
        self._handed_on += [p for p in placeholders if p is not None]
        return placeholders


def _in_list(name: str) -> bool:
    """A member of a list, such as one expert of many, is left out by some tokens and not by others."""
    return any(part.isdigit() for part in name.split("."))


def _tensors(arguments: BlockArguments) -> list[tuple[str, torch.Tensor]]:
    found = [
        (f"argument {k + 1}{path}", tensor)
        for k, value in enumerate(arguments.args)
        for path, tensor in tensors_in(value)
    ]
    return found + [
        (f"{name}{path}", tensor)
        for name, value in arguments.kwargs.items()
        for path, tensor in tensors_in(value)
    ]


def _contents(arguments: BlockArguments) -> list[tuple]:
    """Which tensors the arguments hold, and how often each was written to."""
    return [(path, id(tensor), tensor._version) for path, tensor in _tensors(arguments)]


def _own_state(block: nn.Module) -> dict[str, Any]:
    """A block's buffers and plain attributes."""
    state: dict[str, Any] = {}
    for prefix, module in block.named_modules():
        for name, value in plain_attributes(module):
            state[f"{prefix}.{name}".lstrip(".")] = value
        for name, buffer in module._buffers.items():
            state[f"{prefix}.{name}".lstrip(".")] = (
                None if buffer is None else (id(buffer), buffer._version)
            )
    return state


def plain_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """What a module's behaviour can depend on beside its tensors and its children: values that
    compare.
    """
    return [
        (name, _comparable(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in ("layer_idx", "training", "forward")
    ]


def _comparable(value: Any) -> Any:
    if isinstance(value, partial):
        return repr((value.func, value.args, value.keywords))
    if value is None or isinstance(value, (int, float, str, bool, torch.dtype, tuple, list, dict)):
        return repr(value)
    return id(value)
