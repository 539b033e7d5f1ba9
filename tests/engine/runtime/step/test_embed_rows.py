"""The gradient of some rows of an embedding table has the bits of the whole gradient there."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import embedding

from engine.errors import ModelError
from engine.runtime.step.embedding_grad import Lookup, LookupWatch

pytestmark = pytest.mark.computing

ROWS, WIDTH = 11, 6


def table(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_rows_have_the_gradient_of_the_whole_table(dtype, padding):
    weight = table(dtype)
    ids = torch.randint(0, ROWS, (3, 40))  # most rows are looked up several times
    given = torch.randn(3, 40, WIDTH).to(dtype)
    embedding(ids, weight, padding).backward(given)
    with LookupWatch(weight) as watch:
        embedding(ids, weight, padding).backward(given)
    lookup, vectors = watch.only()
    assert vectors.grad.equal(given)
    parts = [lookup.rows_gradient(vectors.grad, at, min(4, ROWS - at)) for at in range(0, ROWS, 4)]
    assert torch.cat(parts).equal(weight.grad)
    if padding is not None:
        assert not weight.grad[padding].any()


def test_a_row_that_nobody_looked_up_has_none():
    found = Lookup(torch.tensor([[2, 2, 5]]), -1).rows_gradient(torch.ones(1, 3, WIDTH), 0, 4)
    assert found.sum(1).tolist() == [0.0, 0.0, 2.0 * WIDTH, 0.0]


@pytest.mark.parametrize("times", [0, 2])
def test_a_table_that_is_not_looked_up_once_is_refused(times):
    weight = table(torch.float32)
    with LookupWatch(weight) as watch:
        for _ in range(times):
            embedding(torch.tensor([1]), weight)
        embedding(torch.tensor([1]), weight, max_norm=9.0)  # is left as it is
    with pytest.raises(ModelError, match=f"looks its tokens up {times} times"):
        watch.only()
