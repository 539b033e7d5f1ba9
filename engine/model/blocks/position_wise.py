"""A trial finds which modules of a block compute each token by itself.

The small model of a family, with random weights (`engine.model.build.packing_trial`), runs once.
Each module of its blocks that has one input [rows, tokens, ...] and one such output runs again: on
all tokens, and on some of them at a time. Where output, gradient of the input and summed gradients
of the parameters are equal within rounding, the module computes each token by itself. The same
module of the real model is known by its name in the block and by the classes of all that is in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from engine.model.lora.lora_layer import Factor, class_without_adapter

TOLERANCE = 1e-4
"""Fraction of their norm by which rounding makes results differ, at most."""
_CUTS = (7, 8)
"""Tokens at which the trial is cut: one sequence chunk has a single token."""
_RANDOM = re.compile("drop|jitter")
"""Parts of the names of attributes that hold how much a module leaves to chance."""

PositionWise = tuple[str, str]
"""The name of a module in its block, and the classes in it."""


def position_wise(
    blocks: Iterable[nn.Module], run: Callable[[], Any], shape: tuple[int, int]
) -> frozenset[PositionWise]:
    """Returns the modules of `blocks` that compute each token by itself. `run` runs their model on
    rows and tokens of this `shape`.
    """
    calls: dict[nn.Module, list[torch.Tensor | None]] = {}
    modules = [(name, part) for block in blocks for name, part in block.named_modules() if name]
    hooks = [
        part.register_forward_hook(
            lambda part, args, kwargs, out: calls.setdefault(part, []).append(
                _only_input(args, kwargs, out, shape)
            ),
            with_kwargs=True,
        )
        for _, part in modules
    ]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[PositionWise, bool] = {}
    for name, part in modules:
        key = name, class_tree(part)
        given = calls.get(part, [])
        # Every block that has such a module must agree.
        found[key] = (
            found.get(key, True)
            and bool(given)
            and all(each is not None and _is_position_wise(part, each) for each in given)
        )
    return frozenset(key for key, is_so in found.items() if is_so)


def _only_input(
    args: tuple, kwargs: dict[str, Any], out: Any, shape: tuple[int, int]
) -> torch.Tensor | None:
    """Returns the only input [rows, tokens, ...] of a call that returned one tensor of that form;
    None for other calls.
    """
    if len(args) != 1 or kwargs:
        return None
    for each in (args[0], out):
        if not isinstance(each, torch.Tensor) or not each.is_floating_point():
            return None
        if each.dim() < 3 or tuple(each.shape[:2]) != shape:
            return None
    return args[0].detach()


def _is_position_wise(part: nn.Module, given: torch.Tensor) -> bool:
    """Returns whether a module gives the same results on some tokens of `given` at a time, which is
    [rows, tokens, ...], as on all of them.
    """
    parameters = [each for each in part.parameters() if each.requires_grad]
    generator = torch.Generator().manual_seed(5)
    try:
        with torch.no_grad():
            shape = part(given).shape
        gradient = torch.randn(shape, generator=generator)
        whole = _results(part, parameters, given, gradient)
        cuts = zip(_cut(given), _cut(gradient), strict=True)
        of_chunks = [_results(part, parameters, *cut) for cut in cuts]
    except Exception:  # noqa: BLE001  a family's code may raise anything
        return False
    of_results = list(zip(*of_chunks, strict=True))
    joined = [torch.cat(each, 1) for each in of_results[:2]]
    joined += [torch.stack(each).sum(0) for each in of_results[2:]]
    return all(map(_are_equal, whole, joined))


def _cut(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns `tensor`, [rows, tokens, ...], in sequence chunks along its rows."""
    return [cut.contiguous() for cut in tensor.tensor_split(_CUTS, 1)]


def _results(
    part: nn.Module,
    parameters: list[nn.Parameter],
    given: torch.Tensor,
    gradient: torch.Tensor,
) -> list[torch.Tensor]:
    """Returns the output of a module for an input `given` [rows, tokens, ...], and the gradients of
    the input and of the parameters. `gradient` is that of the output.
    """
    leaf = given.detach().requires_grad_()
    with torch.enable_grad():
        out = part(leaf)
        inputs = [leaf, *parameters]
        found = torch.autograd.grad(out, inputs, gradient, allow_unused=True)
    results = [out.detach()]
    for each, gradient_of in zip(inputs, found, strict=True):
        results.append(torch.zeros_like(each) if gradient_of is None else gradient_of)
    return results


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two results, of the same shape, differ by no more than rounding."""
    return bool((one - other).norm() <= TOLERANCE * one.norm())


def class_tree(part: nn.Module) -> str:
    """Returns the classes of a module and of all in it, by their names. Adapters do not count, nor
    how many modules are in a list.
    """
    inside = [
        (name, class_tree(each))
        for name, each in part.named_children()
        if not isinstance(each, Factor)
    ]
    if isinstance(part, nn.ModuleList):
        inside = sorted({("", tree) for _, tree in inside})
    names = ", ".join(f"{name}: {tree}" for name, tree in inside)
    return f"{class_without_adapter(part).__name__}({names})"


def tiled_parts(block: nn.Module, known: Collection[PositionWise]) -> list[str]:
    """Returns the names of the modules of `block` that run in sequence chunks: the largest ones
    that are among the `known` and for which autograd keeps more than their input.
    """
    found: list[str] = []

    def search(part: nn.Module, name: str) -> None:
        if name and (name, class_tree(part)) in known:
            if _keeps_more_than_input(part) and not _is_random(part):
                found.append(name)
            return
        for child, each in part.named_children():
            search(each, f"{name}.{child}" if name else child)

    search(block, "")
    return found


def _keeps_more_than_input(part: nn.Module) -> bool:
    """Returns whether a module is more than one matrix product or one elementwise function."""
    own = list(part.parameters(recurse=False))
    if any(each.dim() > 1 for each in own):
        return False
    return bool(own) or any(True for _ in part.children()) or "norm" in type(part).__name__.lower()


def _is_random(part: nn.Module) -> bool:
    """Returns whether a module draws random numbers in training, which a second run would draw
    anew.
    """
    for each in part.modules():
        if isinstance(each, nn.Dropout) and each.p > 0:
            return True
        if any(
            _RANDOM.search(name) and isinstance(value, float) and value > 0
            for name, value in vars(each).items()
        ):
            return True
    return False
