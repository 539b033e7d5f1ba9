"""A linear layer and its adapter are one operation of torch, forward and backward.

Written as separate operations, the result of the layer is copied or read and written once more for
the product with `B`, and the gradient of the input once more for that with `A`. Here the small
product comes first, and the large one adds to it as it is computed: matrix products of BLAS can
add their result to what is there (beta = 1). Compilers of torch leave such an operation as it is.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("ramstream::adapted_linear", mutates_args=())
def adapted_linear(  # torch reads the schema of an operation from them
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `x weight^T + bias + scaling * (x first^T) second^T` [n, out], and `x first^T` [n,
    rank], for an input `x` [n, in], `weight` [out, in], `bias` [out], and the factors `first`
    [rank, in] and `second` [out, rank], all of one dtype.
    """
    low = x @ first.t()
    if bias is None:
        found = _scaled(low, second.t(), scaling)
    else:
        found = torch.addmm(bias, low, second.t(), alpha=scaling)
    return found.addmm_(x, weight.t()), low


def _scaled(one: torch.Tensor, other: torch.Tensor, scaling: float) -> torch.Tensor:
    """Returns `scaling * one other`, of matrices [n, k] and [k, m], rounded once."""
    ignored = one.new_empty(other.shape[1])
    return torch.addmm(ignored, one, other, beta=0, alpha=scaling)


@adapted_linear.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,  # noqa: ARG001  as in the operation
    first: torch.Tensor,
    second: torch.Tensor,  # noqa: ARG001
    scaling: float,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(first))


@torch.library.custom_op("ramstream::adapted_linear_backward", mutates_args=())
def _backward_of(
    gradient: torch.Tensor,
    saved: list[torch.Tensor],
    scaling: float,
    for_input: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of `x` [n, in], `first` [rank, in] and `second` [out, rank] for that of
    the result, `gradient` [n, out]. That of `x` is empty unless it is wanted. saved: `x`, `weight`,
    `first`, `second` and `x first^T`.
    """
    x, weight, first, second, low = saved
    of_low = _scaled(gradient, second, scaling)
    of_first = of_low.t() @ x
    of_second = _scaled(gradient.t(), low, scaling)
    if not for_input:
        return x.new_empty(0), of_first, of_second
    return (of_low @ first).addmm_(gradient, weight), of_first, of_second


@_backward_of.register_fake
def _(
    gradient: torch.Tensor,  # noqa: ARG001  as in the operation
    saved: list[torch.Tensor],
    scaling: float,  # noqa: ARG001
    for_input: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, _, first, second, _ = saved
    of_input = x.new_empty(x.shape if for_input else 0)
    return of_input, torch.empty_like(first), torch.empty_like(second)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, _, first, second, ctx.scaling = inputs
    ctx.save_for_backward(x, weight, first, second, output[1])


def _backward(ctx, gradient, _):  # type: ignore[no-untyped-def]
    """The weight and its bias are frozen, and have no gradient."""
    for_input = ctx.needs_input_grad[0]
    saved = list(ctx.saved_tensors)
    of_input, of_first, of_second = _backward_of(
        gradient.contiguous(), saved, ctx.scaling, for_input
    )
    return of_input if for_input else None, None, None, of_first, of_second, None


adapted_linear.register_autograd(_backward, setup_context=_keep)
