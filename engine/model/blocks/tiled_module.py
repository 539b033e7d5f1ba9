"""A module that computes each token by itself runs in sequence chunks: for some tokens of a row at
a time.

Autograd keeps the module's input alone. In backward, each sequence chunk is computed again, with
gradients. The gradients of its parameters are added up over sequence chunks in fp32, and rounded
once.

What such a module holds inside is several times as wide as its input, and would grow with the row.
In chunks it grows with the chunk alone, for one more forward of the module in backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

_here = threading.local()


def is_tiling() -> bool:
    """Returns whether this thread is running a module in sequence chunks."""
    return getattr(_here, "depth", 0) > 0


class _Running:
    """A context in which the thread is running a module in sequence chunks."""

    def __enter__(self) -> None:
        _here.depth = getattr(_here, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _here.depth -= 1


class _How(NamedTuple):
    """Runs the module `part`, with its own code `run`, on `chunk_tokens` tokens of each row at a
    time.
    """

    part: nn.Module
    run: Callable[[torch.Tensor], torch.Tensor]
    chunk_tokens: int


class _Tiled(torch.autograd.Function):
    """Runs a module in sequence chunks."""

    @staticmethod
    def forward(
        ctx: Any, how: _How, given: torch.Tensor, *parameters: nn.Parameter
    ) -> torch.Tensor:
        """Returns [rows, tokens, ...] for an input `given` [rows, tokens, ...]. parameters: those
        of the module that are trained, of any shapes.
        """
        ctx.how, ctx.parameters, run = how, parameters, how.run
        ctx.bound = [
            (each, dict(each._buffers), getattr(each, "layer_idx", None))
            for each in how.part.modules()
        ]
        ctx.save_for_backward(given)
        with _Running():
            out: torch.Tensor | None = None
            for inside in _sequence_chunks(given, how.chunk_tokens):
                part = run(given[:, inside].contiguous())
                if out is None:
                    out = part.new_empty(*given.shape[:2], *part.shape[2:])
                out[:, inside] = part
                del part
        assert out is not None  # a row has a token
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Returns the gradients of the input and of the parameters. `gradient` [rows, tokens, ...]
        is that of the output.
        """
        (given,) = ctx.saved_tensors
        parameters = ctx.parameters
        of_given = torch.empty_like(given) if ctx.needs_input_grad[1] else None
        # Blocks of one kind share a module. Another one may have run in it since.
        for part, buffers, index in ctx.bound:
            part._buffers.update(buffers)
            if index is not None:
                part.layer_idx = index
        parameter_gradients: list[torch.Tensor | None] = [None] * len(parameters)
        with _Running():
            for inside in _sequence_chunks(given, ctx.how.chunk_tokens):
                leaf = given[:, inside].detach().contiguous()
                leaf.requires_grad_(of_given is not None)
                inputs = [leaf, *parameters] if of_given is not None else list(parameters)
                with torch.enable_grad():
                    out = ctx.how.run(leaf)
                above = gradient[:, inside].contiguous()
                found = torch.autograd.grad(out, inputs, above, allow_unused=True)
                del out
                if of_given is not None:
                    of_given[:, inside] = 0.0 if found[0] is None else found[0]
                for place, each in enumerate(found[len(found) - len(parameters) :]):
                    _add(parameter_gradients, place, each)
                del found
            # Of each parameter, only one of the two is there beside the parameter_gradients of the
            # others.
            for place, parameter in enumerate(parameters):
                total = parameter_gradients[place]
                if total is not None:
                    parameter_gradients[place] = total.to(parameter.dtype)
        return None, of_given, *parameter_gradients


def _add(
    parameter_gradients: list[torch.Tensor | None], place: int, gradient: torch.Tensor | None
) -> None:
    """Adds the gradient of a sequence chunk to the fp32 sum at `place`, both in the shape of a
    parameter.
    """
    total = parameter_gradients[place]
    if gradient is None:
        return
    if total is None:
        parameter_gradients[place] = gradient.to(torch.float32, copy=True)
    else:
        total.add_(gradient)


def _sequence_chunks(given: torch.Tensor, chunk_tokens: int) -> Iterable[slice]:
    """Yields the places of the sequence chunks along the rows of `given`, [rows, tokens, ...]."""
    for start in range(0, given.shape[1], chunk_tokens):
        yield slice(start, min(start + chunk_tokens, given.shape[1]))


def tile_sequence(block: nn.Module, names: Iterable[str], tile_tokens: int) -> None:
    """Makes the modules of `block` with these names run in sequence chunks of `tile_tokens` tokens,
    those of all rows together. Rows of no more tokens run as a whole.
    """
    for name in names:
        part = block.get_submodule(name)
        setattr(part, "forward", partial(_forward, part, part.forward, tile_tokens))  # noqa: B010


def _forward(
    part: nn.Module, run: Callable[..., Any], tile_tokens: int, *args: Any, **kwargs: Any
) -> Any:
    """Runs a module whose own code is `run`, in sequence chunks if it has one input [rows, tokens,
    ...].
    """
    given = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(given, torch.Tensor) or given.dim() < 3:
        return run(*args, **kwargs)
    chunk_tokens = max(1, tile_tokens // given.shape[0])
    if given.shape[1] <= chunk_tokens:
        return run(given)
    trained = [parameter for parameter in part.parameters() if parameter.requires_grad]
    return _Tiled.apply(_How(part, run, chunk_tokens), given, *trained)
