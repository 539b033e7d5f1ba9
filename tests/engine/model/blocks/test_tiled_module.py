"""A module in sequence chunks computes what it computes on whole rows, and keeps only its input."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from engine.model.blocks.live_bytes import LiveBytes
from engine.model.blocks.tiled_module import tile_sequence

pytestmark = pytest.mark.computing

WIDTH, WIDER, TOKENS = 24, 40, 50


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDER, bias=False)
        self.up = nn.Linear(WIDTH, WIDER)
        self.down = nn.Linear(WIDER, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(WIDER))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x) * self.scale)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def made(dtype: torch.dtype = torch.float32) -> Block:
    torch.manual_seed(3)
    return Block().to(dtype)


def tiled_block(block: Block, tile_tokens: int) -> Block:
    tiled = copy.deepcopy(block)
    tile_sequence(tiled, ["norm", "mlp"], tile_tokens)
    return tiled


def results(block: Block, given: torch.Tensor) -> list[torch.Tensor]:
    """The output, the gradient of the input, and those of the parameters that have one."""
    leaf = given.clone().requires_grad_()
    out = block(leaf)
    torch.manual_seed(5)
    inputs = [leaf, *block.parameters()]
    gradients = torch.autograd.grad(out, inputs, torch.randn_like(out), allow_unused=True)
    return [out.detach(), *(each for each in gradients if each is not None)]


def rows(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(count, TOKENS, WIDTH, dtype=dtype)


@pytest.mark.parametrize("tile_tokens", [1, 7, 25, 49])
@pytest.mark.parametrize("count", [1, 3])
def test_float32_is_equal_within_rounding(count, tile_tokens):
    block, given = made(), rows(count)
    whole, tiled = results(block, given), results(tiled_block(block, tile_tokens), given)
    assert len(whole) == len(tiled) == 8
    for one, other in zip(whole, tiled):
        assert (one - other).norm() < 1e-6 * one.norm()


def test_bf16_is_no_further_from_float32_than_whole_rows():
    """Sums over sequence chunks that were themselves in bf16 would be further away."""
    block = made(torch.bfloat16)
    truth, given = copy.deepcopy(block).float(), rows(2, torch.bfloat16)
    exact = results(truth, given.float())
    whole, tiled = results(block, given), results(tiled_block(block, 2), given)
    far = [
        sum(float((one.float() - right).norm() / right.norm()) for right, one in zip(exact, ours))
        for ours in (whole, tiled)
    ]
    assert far[1] <= 1.1 * far[0]


def test_short_rows_run_as_a_whole_with_the_same_bits():
    block, given = made(), rows(2)
    whole, tiled = results(block, given), results(tiled_block(block, 2 * TOKENS), given)
    assert all(map(torch.equal, whole, tiled))


def test_frozen_parameters_and_an_input_without_a_gradient():
    block = made()
    block.mlp.up.requires_grad_(False)
    tiled = tiled_block(block, 9)
    given = rows(1)
    for each in (block, tiled):
        each(given).sum().backward()
    assert tiled.mlp.up.weight.grad is None
    assert tiled.mlp.gate.weight.grad.allclose(block.mlp.gate.weight.grad, atol=1e-5)


def test_backward_has_the_buffers_of_its_forward():
    """Blocks of one kind share a module, whose buffers are those of the block that runs."""
    block, given = made(), rows(1)
    block.mlp.scale = torch.full((WIDER,), 2.0)
    right = results(block, given)
    tiled = tiled_block(block, 9)
    leaf = given.clone().requires_grad_()
    out = tiled(leaf)
    tiled.mlp._buffers["scale"] = torch.full((WIDER,), 5.0)
    torch.manual_seed(5)
    (found,) = torch.autograd.grad(out, [leaf], torch.randn_like(out))
    assert (found - right[1]).norm() < 1e-6 * found.norm()


@pytest.mark.parametrize("tile_tokens", [5, 10])
def test_only_inputs_are_kept_and_a_chunk_at_a_time_is_computed(tile_tokens):
    block, given, live = tiled_block(made(), tile_tokens), rows(1).requires_grad_(), LiveBytes()
    of_row, of_chunk = 4 * WIDTH * TOKENS, 4 * WIDER * tile_tokens
    with live:
        out = block(given)
        assert live.now == 2 * of_row  # the norm's output, which the rest keeps, and the result
        torch.autograd.grad(out, [given], torch.ones_like(out))
    sums = 2 * sum(4 * each.numel() for each in block.parameters())
    # Beside them: the result, gradients above and below the rest, and the sequence chunk's tensors.
    assert live.inside < 6 * of_row + 12 * of_chunk + sums
    whole, before = LiveBytes(), made()
    with whole:
        torch.autograd.grad(before(given).sum(), [given])
    assert whole.outside > live.inside
