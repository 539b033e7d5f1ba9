"""A block of each kind is tried on two tokens, with weights that occupy no memory.

The trial shows what the block returns, which of its parameters are trained, and whether it can be
streamed at all. Blocks run separately and run again in the backward pass, so a block that passes
state to another block or keeps state is refused by name.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as torch_functional
from torch import nn
from torch.overrides import TorchFunctionMode

from engine.errors import ModelError
from engine.model.skeleton import BlockArguments, parameters_reached, tensors_in
from engine.model.units import Unit


class HollowProducts(TorchFunctionMode):
    """While it is active, linear layers are not computed.

    Their weights are zeros in a trial, and reading those of a large head or block takes seconds.
    The result is zeros, as it would be anyway, and its gradient reaches the same tensors.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch_functional.linear:
            return _Zeros.apply(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(
        _ctx: Any, input: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns zeros [..., features out] for an input [..., features in]."""
        return input.new_zeros(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> Any:
        raise NotImplementedError("nothing is trained while a model is tried")


class Trial:
    """A capture pass calls its trial for every block, in order.

    The answer is what the block returns in addition to its hidden state. The trial runs one block
    of each kind to find this out. Raises ModelError for a model that cannot be streamed.
    """

    def __init__(self, module: nn.Module, blocks: list[Unit]):
        self._family = type(module).__name__
        self._blocks = blocks
        self._extras: dict[int, tuple | None] = {}
        self._handed_on: list[torch.Tensor] = []
        self.untrained: dict[int, set[str]] = {}
        """For each kind of block, these parameters get no gradient from the output. Plain training
        leaves them unchanged, so weight decay must do so, too.
        """
        self.unrun: dict[int, set[str]] = {}
        """In each kind of block, these modules were not run (the block may read their weights), or
        returned something else than a tensor.
        """

    def __call__(
        self, position: int, arguments: BlockArguments, hidden: torch.Tensor
    ) -> tuple | None:
        """Returns placeholders for what the block at `position` returns in addition to its hidden
        state.

        `hidden` is the block's input [batch, tokens, width].
        """
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
        """Runs a copy of the block and checks its effects. Returns placeholders for what it returns
        in addition to its hidden state, or None if it returns only that.
        """
        block = self._hollow_copy(unit)
        contents = _contents(arguments)
        own_state = _own_state(block)
        with torch.enable_grad(), _RunsNoted(block) as noted:
            leaf = hidden.detach().requires_grad_()
            out = arguments.call_for_all(block, leaf)
        self.unrun[unit.kind] = noted.unrun
        self._refuse_state(unit, _contents(arguments) != contents, own_state, _own_state(block))
        state = out[0] if isinstance(out, (tuple, list)) else out
        self._note_untrained(unit, block, state)
        if state is out:
            return None
        placeholders: list[torch.Tensor | None] = []
        for extra in out[1:]:
            placeholder = None
            if extra is not None:
                placeholder = torch.empty(0, device="meta")
                self._handed_on.append(placeholder)
            placeholders.append(placeholder)
        return tuple(placeholders)

    def _hollow_copy(self, unit: Unit) -> nn.Module:
        """Returns a copy of the block whose weights are zeros that occupy no memory."""
        template: Any = unit.block
        block = copy.deepcopy(template)
        block.__dict__.pop("forward", None)  # drops the recorder
        for name, parameter in list(block.named_parameters()):
            owner, _, attribute = name.rpartition(".")
            # NumPy allocates zeros with calloc: pages that are only read are never backed by
            # memory. Expanding a single zero would take no memory either, but grouped matmuls
            # refuse stride-0 weights.
            item = np.uint16 if parameter.dtype.itemsize == 2 else np.float32
            zeros = torch.from_numpy(np.zeros(parameter.shape, item)).view(parameter.dtype)
            block.get_submodule(owner)._parameters[attribute] = nn.Parameter(zeros)
        return block

    def _refuse_state(
        self, unit: Unit, changed_arguments: bool, before: dict[str, Any], after: dict[str, Any]
    ) -> None:
        """Raises ModelError for a block that passes state on or keeps it."""
        if changed_arguments:
            raise ModelError(
                f"{self._family} passes state from block to block ({unit.name} changes its own "
                "arguments); its gradients would be wrong, so this model is refused."
            )
        changed = sorted(name for name, value in after.items() if before.get(name) != value)
        if changed:
            raise ModelError(
                f"{self._family} keeps state in its blocks ({unit.name} changes its {changed[0]} "
                "as it runs); a recompute would change it twice, so this model is refused."
            )

    def _note_untrained(self, unit: Unit, block: nn.Module, state: torch.Tensor) -> None:
        """Records the parameters without a gradient. Raises ModelError if the family itself
        excludes other parameters from training.
        """
        reached = parameters_reached(state)
        untrained = {
            name
            for name, parameter in block.named_parameters()
            if id(parameter) not in reached and not _in_list(name)
        }
        self.untrained[unit.kind] = untrained
        template: Any = unit.block
        frozen = [
            name
            for name, parameter in template.named_parameters()
            if not parameter.requires_grad and name not in untrained
        ]
        if frozen:
            raise ModelError(
                f"{self._family} keeps {frozen[0]} of its blocks from being trained, which is not "
                "streamed; choose another model."
            )


class _RunsNoted:
    """While it is active, a `_RunsNoted` notes which modules of `block` return a tensor."""

    def __init__(self, block: nn.Module):
        self._hooks: list[Any] = []
        self._modules = dict(block.named_modules())
        self.unrun = {name for name in self._modules if not _in_list(name)}
        """These were not run yet."""

    def __enter__(self) -> _RunsNoted:
        for name, module in self._modules.items():

            def note(*given: Any, name: str = name) -> None:
                if isinstance(given[-1], torch.Tensor):
                    self.unrun.discard(name)

            self._hooks.append(module.register_forward_hook(note))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _in_list(name: str) -> bool:
    """Returns whether a parameter is in a list, as the parameters of a single expert are: some
    tokens use them and others do not.
    """
    return any(part.isdigit() for part in name.split("."))


def _tensors(arguments: BlockArguments) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors in a block's arguments, each with the name that a message gives it."""
    found: list[tuple[str, torch.Tensor]] = []
    for number, value in enumerate(arguments.args, 1):
        found += tensors_in(value, f"argument {number}")
    for name, value in arguments.kwargs.items():
        found += tensors_in(value, name)
    return found


def _contents(arguments: BlockArguments) -> list[tuple]:
    """Returns which tensors are in the arguments, and how often each was written to."""
    return [(path, id(tensor), tensor._version) for path, tensor in _tensors(arguments)]


def _own_state(block: nn.Module) -> dict[str, Any]:
    """Returns a block's plain attributes, and its buffers with the number of writes to each."""
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
    """Returns the attributes that can affect a module's behaviour, without tensors and child
    modules.

    The values compare equal if the behaviour is the same.
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
