"""Values in nested arguments, and states of other shapes."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch

from engine.model.blocks.hidden_layout import HiddenLayout
from engine.model.blocks.pytree_paths import mapped, places_in, replaced, tensors_of, value_at

pytestmark = pytest.mark.computing


def test_values_have_places_and_copies_share_what_has_not_changed():
    keys = UserDict(full=(torch.ones(1), torch.ones(2)))
    nested = {"args": (3, [torch.zeros(1)]), "kwargs": {"keys": keys}}
    place = ("kwargs", "keys", "full", 1)
    assert place in [found for found, _ in places_in(nested)]
    assert value_at(nested, place).shape == (2,)
    new = replaced(nested, {place: 7, ("kwargs", "keys", "late"): 8, ("args", 0): 4})
    assert value_at(new, place) == 7 and new["kwargs"]["keys"]["late"] == 8
    assert new["args"] == (4, nested["args"][1]) and new["args"][1] is nested["args"][1]
    assert "late" not in keys and keys["full"][1].shape == (2,)
    doubled = mapped(nested, lambda tensor: tensor * 2)
    assert [int(tensor.sum()) for tensor in tensors_of(doubled)] == [0, 2, 4]


@pytest.mark.parametrize(
    "shape_of", [lambda b, t: (4, b, t, 8), lambda b, t: (b, t, 4, 8), lambda b, t: (b, 2, t)]
)
def test_a_state_of_any_shape_is_flat_and_back(shape_of):
    form = HiddenLayout.between(shape_of(1, 2), shape_of(3, 5), (3, 5))
    state = torch.randn(shape_of(3, 5))
    flat = form.flat(state)
    assert flat.shape == (3, 5, form.width)
    assert torch.equal(form.own(flat), state)
    # The states of a token lie together, as the head takes tokens in any order.
    other = torch.randn(shape_of(3, 5))
    other.select(form.rows, 1).select(form.tokens - (form.rows < form.tokens), 2).fill_(0)
    assert not form.flat(other)[1, 2].any()


@pytest.mark.parametrize(
    "one, other", [((2, 1, 8), (5, 3, 8)), ((34, 8), (38, 8)), ((1, 2), (3, 5, 1))]
)
def test_shapes_that_do_not_tell_have_no_form(one, other):
    """XLNet has tokens in front of the rows."""
    assert HiddenLayout.between(one, other, (3, 5)) is None
