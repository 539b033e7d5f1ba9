"""The trial of a block of each kind on two tokens, with weights that occupy no memory.

It finds what the block returns, what it passes on to later blocks, which of its parameters are
trained, and whether it can be streamed at all. Blocks run separately and run again in the backward
pass, so a block that keeps state is refused by name, and so is a model whose own code computes
something from the results of blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as torch_functional
from torch import nn
from torch.overrides import TorchFunctionMode

from engine.errors import ModelError
from engine.model.blocks.block_inputs import BlockArguments, tensors_in
from engine.model.blocks.cross_layer_inputs import (
    BEFORE,
    OUT,
    CrossLayerFlow,
    CrossLayerInput,
    Source,
    cross_layer_flow_of,
)
from engine.model.blocks.pytree_paths import (
    Place,
    is_container,
    mapped,
    places_in,
    tensors_of,
    value_at,
)
from engine.model.build.skeleton import Answer, graph_of, is_marked, parameters_reached
from engine.model.build.units import Unit


class HollowProducts(TorchFunctionMode):
    """A context in which linear layers are not computed.

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


class _Passed(torch.autograd.Function):
    """Marks in a graph that a value comes from a block."""

    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor) -> torch.Tensor:
        """Returns the value, of any shape."""
        return value.view_as(value)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> Any:
        raise NotImplementedError("nothing is trained while a model is tried")


def _passed(value: torch.Tensor) -> torch.Tensor:
    """Returns a value of a block, of any shape, as later code receives it."""
    if not value.is_floating_point():
        return value.clone()
    return _Passed.apply(value if value.requires_grad else value.detach().requires_grad_())


@dataclass(frozen=True)
class _Kind:
    """A kind of block that was run."""

    reached: dict[Place, set[str]]
    """Parameters from which each result of the block, by its place, is computed."""
    names: list[str]
    """Names of the block's parameters."""
    extras: tuple | None
    """Values that it returns in addition to its hidden state; None if it returns only that."""
    writes: bool
    """Whether it leaves values in its arguments."""
    unused: frozenset[Place]
    """Places of trained values that it is given, and from which it computes nothing."""


class Trial:
    """A capture pass calls its trial for every block, in order, and continues with its answer.

    The trial runs one block of each kind to find what the block returns. Raises ModelError for a
    model that cannot be streamed.
    """

    def __init__(self, module: nn.Module, blocks: list[Unit]):
        self._family = type(module).__name__
        self._blocks = blocks
        self._kinds: dict[int, _Kind] = {}
        self._cross_layer: dict[int, tuple[Any, Source]] = {}
        """Cross-layer values so far, by their ids."""
        self._cross_layer_inputs: dict[int, list[CrossLayerInput]] = {}
        self.trained: list[torch.Tensor] = []
        """Inputs of blocks, of any shapes, that are computed before all blocks and are trained."""
        self.state_bytes = 1
        """Bytes of an element of a block's hidden state."""
        self.unrun: dict[int, set[str]] = {}
        """Modules, by kind of block, that were not run (the block may read their weights), or
        returned something else than a tensor.
        """

    def __call__(self, position: int, arguments: BlockArguments, hidden: torch.Tensor) -> Answer:
        """Returns what the block at `position` passes on. `hidden` is its input, in the family's
        shape.
        """
        unit = self._blocks[position]
        self._note_cross_layer_inputs(position, arguments)
        kind = self._kinds.get(unit.kind)
        if kind is None or kind.writes:
            kind = self._run(position, arguments, hidden)
        cross_layer_inputs = self._cross_layer_inputs.get(position, [])
        self._cross_layer_inputs[position] = [
            take for take in cross_layer_inputs if take.place not in kind.unused
        ]
        extras = None
        if kind.extras is not None:
            extras = mapped(kind.extras, _passed)
            for number, extra in enumerate(extras, 1):
                if tensors_of(extra):
                    self._cross_layer[id(extra)] = (extra, Source(position, (OUT, number)))
        return Answer(_passed(hidden), extras)

    # ------------------------------------------------------------------ what a block is given

    def _note_cross_layer_inputs(self, position: int, arguments: BlockArguments) -> None:
        """Notes which arguments of a block come from other blocks or are trained."""
        cross_layer_inputs: list[CrossLayerInput] = []
        known: set[int] = set()

        def find(value: Any, place: Place) -> None:
            if id(value) in self._cross_layer:
                cross_layer_inputs.append(CrossLayerInput(place, self._cross_layer[id(value)][1]))
                known.update(map(id, tensors_of(value)))
            elif isinstance(value, torch.Tensor) and value.requires_grad:
                if is_marked(value, _Passed):
                    raise self._lost(position, "computes", place, "from the results of blocks")
                cross_layer_inputs.append(
                    CrossLayerInput(place, Source(BEFORE, (position, *place)))
                )
                known.add(id(value))
                self.trained.append(value)
            elif is_container(value):
                items = value.items() if hasattr(value, "items") else enumerate(value)
                for key, inner in list(items):
                    find(inner, (*place, key))

        find(arguments.nested, ())
        for path, tensor in _tensors(arguments):
            if tensor.requires_grad and id(tensor) not in known:
                raise self._lost(position, "gives", (path,), "which is trained")
        if cross_layer_inputs:
            self._cross_layer_inputs[position] = cross_layer_inputs

    def _lost(self, position: int, verb: str, place: Place, how: str) -> ModelError:
        name = place[1] if place[0] == "kwargs" else _argument(place)
        return ModelError(
            f"{self._family} {verb} an input of {self._blocks[position].name} {how} ({name}); its "
            "gradient would be lost, so this model is refused."
        )

    def cross_layer_flow(self) -> CrossLayerFlow:
        """Returns what blocks take and give, once all of them have been tried. Raises ModelError
        for a block that leaves state in its arguments that no block takes.
        """
        found = cross_layer_flow_of(self._cross_layer_inputs, len(self._blocks))
        for _, source in self._cross_layer.values():
            if (
                source.place[0] != OUT
                and source.place not in found.blocks[source.block].cross_layer_outputs
            ):
                raise self._passes_state(self._blocks[source.block])
        return found

    def untrained(self, cross_layer_flow: CrossLayerFlow) -> dict[int, set[str]]:
        """Returns the parameters that get no gradient, for each kind of block. Plain training
        leaves them unchanged, so weight decay must do so, too. Raises ModelError if the family
        itself excludes other parameters from training.
        """
        found: dict[int, set[str]] = {}
        for unit, block in zip(self._blocks, cross_layer_flow.blocks, strict=True):
            kind = self._kinds[unit.kind]
            reached = set[str]().union(
                *(
                    names
                    for place, names in kind.reached.items()
                    if place in ((), *block.cross_layer_outputs)
                )
            )
            missing = {name for name in kind.names if name not in reached and not _in_list(name)}
            found[unit.kind] = found.get(unit.kind, missing) & missing
        for unit in self._blocks:
            self._refuse_frozen(unit, found[unit.kind])
        return found

    def placeholders(self) -> list[tuple | None]:
        """Returns for each block what recorders return in addition to its hidden state."""
        nothing = partial(torch.empty_like, device="meta")
        return [mapped(self._kinds[unit.kind].extras, nothing) for unit in self._blocks]

    def refuse_computed(
        self, arguments: Sequence[BlockArguments], cross_layer_flow: CrossLayerFlow
    ) -> None:
        """Raises ModelError where an argument of a block was computed from placeholders: then the
        model's code changes what one block passes to another.
        """
        for position, given in enumerate(arguments):
            taken = {take.place for take in cross_layer_flow.blocks[position].cross_layer_inputs}
            for place, value in places_in(given.nested):
                inside = any(place[: len(each)] == each for each in taken)
                if isinstance(value, torch.Tensor) and value.is_meta and not inside:
                    raise self._lost(position, "computes", place, "from the results of blocks")

    # ------------------------------------------------------------------ running a block

    def _run(self, position: int, arguments: BlockArguments, hidden: torch.Tensor) -> _Kind:
        """Runs a copy of the block and checks its effects. Returns what it returns."""
        unit = self._blocks[position]
        block = self._hollow_copy(unit)
        before = {place: id(value) for place, value in places_in(arguments.nested)}
        contents, own_state = _contents(arguments), _own_state(block)
        with torch.enable_grad(), _RunsNoted(block) as noted:
            leaf = hidden.detach().requires_grad_()
            out = arguments.call_for_all(block, leaf)
        self.unrun.setdefault(unit.kind, noted.unrun)
        written = _written(before, arguments)
        self._refuse_state(
            unit,
            _contents(arguments, without=written) != contents,
            own_state,
            _own_state(block),
        )
        names = {id(parameter): name for name, parameter in block.named_parameters()}
        several = isinstance(out, (tuple, list))
        results: dict[Place, Any] = {(): out[0] if several else out}
        self.state_bytes = max(
            self.state_bytes, *(each.itemsize for each in tensors_of(results[()]))
        )
        if several:
            results |= {(OUT, number): extra for number, extra in enumerate(out[1:], 1)}
        results |= written
        self._hand_on(position, arguments, written)
        kind = _Kind(
            {place: _reached(value, names) for place, value in results.items()},
            list(names.values()),
            mapped(tuple(out[1:]), _zeros) if several else None,
            bool(written),
            self._unused(position, arguments, results),
        )
        self._kinds.setdefault(unit.kind, kind)
        return kind

    def _unused(
        self, position: int, arguments: BlockArguments, results: dict[Place, Any]
    ) -> frozenset[Place]:
        """Returns the places of values from before all blocks that no result is computed from."""
        reached = {
            node
            for result in results.values()
            for tensor in tensors_of(result)
            for node in graph_of(tensor)
        }
        return frozenset(
            take.place
            for take in self._cross_layer_inputs.get(position, [])
            if take.source.block == BEFORE
            and value_at(arguments.nested, take.place).grad_fn not in reached
        )

    def _hand_on(self, position: int, arguments: BlockArguments, written: dict[Place, Any]) -> None:
        """Marks the values that a block has left in its arguments, at their places."""
        for place, value in written.items():
            marked = mapped(value, _passed)
            value_at(arguments.nested, place[:-1])[place[-1]] = marked
            self._cross_layer[id(marked)] = (marked, Source(position, place))

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
        """Raises ModelError for a block that changes its arguments or keeps state."""
        if changed_arguments:
            raise self._passes_state(unit)
        changed = sorted(name for name, value in after.items() if before.get(name) != value)
        if changed:
            raise ModelError(
                f"{self._family} keeps state in its blocks ({unit.name} changes its {changed[0]} "
                "as it runs); a recompute would change it twice, so this model is refused."
            )

    def _passes_state(self, unit: Unit) -> ModelError:
        return ModelError(
            f"{self._family} passes state from block to block ({unit.name} changes its own "
            "arguments); its gradients would be wrong, so this model is refused."
        )

    def _refuse_frozen(self, unit: Unit, untrained: set[str]) -> None:
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


def _reached(value: Any, names: dict[int, str]) -> set[str]:
    """Returns the names of the parameters from which a value was computed."""
    ids = set[int]().union(*(parameters_reached(each) for each in tensors_of(value)))
    return {names[each] for each in ids if each in names}


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Returns zeros of the shape of `tensor`, without its graph."""
    return torch.zeros_like(tensor.detach())


def _written(before: dict[Place, int], arguments: BlockArguments) -> dict[Place, Any]:
    """Returns what a block has put into containers among its arguments, by place. `before` has the
    ids of all values before it ran.
    """
    written: dict[Place, Any] = {}
    for place, value in places_in(arguments.nested):
        is_inside = any(place[: len(enclosing)] == enclosing for enclosing in written)
        if not is_inside and before.get(place) != id(value) and tensors_of(value):
            written[place] = value
    return written


class _RunsNoted:
    """A context that notes which modules of `block` return a tensor."""

    def __init__(self, block: nn.Module):
        self._hooks: list[Any] = []
        self._modules = dict(block.named_modules())
        self.unrun = {name for name in self._modules if not _in_list(name)}
        """Modules that were not run yet."""

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


def _argument(place: Place) -> str:
    """Returns the name that a message gives to the argument at a place."""
    return f"argument {place[1] + 1}" if place[0] == "args" else str(place[0])


def _contents(arguments: BlockArguments, without: Iterable[Place] = ()) -> list[tuple]:
    """Returns which tensors are in the arguments, and how often each was written to; `without`
    those at some places.
    """
    left_out = {id(each) for at in without for each in tensors_of(value_at(arguments.nested, at))}
    return [
        (path, id(tensor), tensor._version)
        for path, tensor in _tensors(arguments)
        if id(tensor) not in left_out
    ]


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
    """Returns the attributes that can affect a module's behavior, without tensors and child
    modules.

    The values compare equal if the behavior is the same.
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
