"""What may run in sequence chunks is found by a trial."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.config.settings import ModelConfig
from engine.model.blocks.position_wise import class_tree, position_wise, tiled_parts
from engine.model.build.build import build_model
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.computing

WIDTH = 6


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + torch.arange(x.shape[1])[:, None]


class Scaled(torch.autograd.Function):
    """Returns its input. The gradient of the scale is the largest one of a token, not the sum."""

    @staticmethod
    def forward(ctx, x, scale):
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.amax((0, 1))


class Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, self.scale)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixer = Convolution()
        self.places = Positions()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))
        self.noisy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))
        self.unrun = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.norm(x))
        return self.noisy(self.mlp(self.linear(self.places(x))))


def found_in(layer: Layer) -> frozenset:
    given = torch.randn(2, 23, WIDTH, generator=torch.Generator().manual_seed(1))
    return position_wise([layer], lambda: layer(given), (2, 23))


def test_a_trial_finds_the_modules_that_compute_each_token_by_itself():
    torch.manual_seed(0)
    layer = Layer().eval()
    names = {name for name, _ in found_in(layer)}
    assert {"norm", "linear", "mlp", "noisy", "mlp.1"} <= names
    assert names.isdisjoint({"mixer", "mixer.inner", "places", "unrun"})


def test_gradients_of_parameters_must_add_up_over_chunks():
    layer = nn.Sequential(Largest(), nn.LayerNorm(WIDTH))
    given = torch.randn(2, 23, WIDTH, generator=torch.Generator().manual_seed(1))
    found = position_wise([layer], lambda: layer(given), (2, 23))
    assert {name for name, _ in found} == {"1"}


def test_the_largest_ones_that_keep_more_than_their_input_are_tiled():
    torch.manual_seed(0)
    layer = Layer().eval()
    known = found_in(layer)
    assert tiled_parts(layer, known) == ["norm", "mlp", "noisy"]
    layer.noisy[1].p = 0.1  # a second run would draw other numbers in training
    assert tiled_parts(layer, known) == ["norm", "mlp"]
    layer.mlp[1] = nn.ReLU()  # it was not tried
    assert class_tree(layer.mlp) == "Sequential(0: Linear(), 1: ReLU(), 2: Linear())"
    assert tiled_parts(layer, known) == ["norm"]


@pytest.mark.slow("it builds three models")
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen2", ["input_layernorm", "mlp", "post_attention_layernorm"]),
        ("mixtral", ["input_layernorm", "mlp", "post_attention_layernorm"]),
        ("gpt2", ["ln_1", "ln_2", "mlp"]),
    ],
)
def test_parts_of_families(family, names):
    model = build_model(tiny_config(family), ModelConfig(source="tiny", dtype="float32"))
    for unit in model.blocks:
        assert sorted(model.tiled_parts(unit)) == names


def test_nothing_is_tiled_where_dropout_would_draw_anew_or_routers_have_a_loss():
    dropped = tiny_config("gpt2", resid_pdrop=0.1)
    model = build_model(dropped, ModelConfig(source="tiny", dtype="float32"))
    assert model.tiled_parts(model.blocks[0]) == ["ln_1", "ln_2"]
    balanced = tiny_config("mixtral", output_router_logits=True)
    model = build_model(balanced, ModelConfig(source="tiny", dtype="float32"))
    assert model.tiled_parts(model.blocks[0]) == []
