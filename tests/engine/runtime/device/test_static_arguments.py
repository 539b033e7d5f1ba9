"""Arguments that stay where they are: what fits is copied, what does not is told."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model.blocks.block_inputs import BlockArguments
from engine.model.build.attention_documents import Documents, Pattern
from engine.runtime.device.graph_inputs import FixedDocuments, Sizes, StaticArguments, sizes_of

KIND = object()
SIZES = Sizes(16, 8)


def documents(*rows):
    return Documents(tuple(map(tuple, rows)), torch.from_numpy)


def arguments(seed, pattern=None, tokens=6, kind=KIND):
    """The arguments of two blocks, which share their tensors and the pattern."""
    generator = torch.Generator().manual_seed(seed)
    tables = tuple(torch.randn(1, tokens, 4, generator=generator) for _ in range(2))
    named = dict(attention_mask=pattern, position_embeddings=tables, use_cache=False, kind=kind)
    return [
        BlockArguments((), dict(named), "hidden_states"),
        BlockArguments((tables[0],), named, None),
    ]


def test_tensors_stay_where_they_are_and_get_new_values():
    static = StaticArguments(arguments(1), SIZES)
    first, second = static.arguments
    tables = first.kwargs["position_embeddings"]
    assert second.args[0] is tables[0]
    assert second.kwargs["kind"] is KIND
    assert (first.hidden_keyword, second.hidden_keyword) == ("hidden_states", None)
    assert static.take(arguments(2))
    for mine, theirs in zip(tables, arguments(2)[0].kwargs["position_embeddings"]):
        assert torch.equal(mine, theirs)


def test_what_differs_in_more_than_values_does_not_fit():
    static = StaticArguments(arguments(1), SIZES)
    assert not static.take(arguments(1, tokens=7))
    assert not static.take(arguments(1, kind=object()))
    assert not static.take(arguments(1)[:1])
    apart = arguments(1)
    apart[1].args = (apart[1].args[0].clone(),)
    assert not static.take(apart)
    pattern = Pattern(documents([6]))
    assert not static.take(arguments(1, pattern))


def test_documents_are_followed_by_empty_ones():
    before, after = documents([2, 3, 1], [6]), documents([1, 1, 4], [2, 4])
    static = StaticArguments(arguments(1, Pattern(before, window=3)), SIZES)
    pattern = static.arguments[0].kwargs["attention_mask"]
    assert static.arguments[1].kwargs["attention_mask"] is pattern
    assert (pattern.window, pattern.chunk) == (3, None)
    starts = pattern.documents.starts(None)
    assert starts.tolist() == [0, 2, 5, 6] + [12] * 13
    assert starts.dtype == torch.int32
    assert pattern.documents.longest == 8
    assert static.take(arguments(2, Pattern(after, window=3)))
    assert starts.tolist() == [0, 1, 2, 6, 8] + [12] * 12
    assert not static.take(arguments(2, Pattern(after, window=4)))


def test_too_many_documents_or_a_longer_one_do_not_fit():
    fixed = FixedDocuments(documents([3] * 10), None, sizes_of([documents([3] * 10)]))
    assert sizes_of([documents([3] * 10)]) == (16, 4)
    assert sizes_of([None, documents([3] * 10), documents([9] + [1] * 20)]) == (32, 16)
    assert fixed.take(documents([3] * 10))
    assert fixed.take(documents([1] * 14 + [16 // 4] * 2))
    assert not fixed.take(documents([1] * 17))
    assert not fixed.take(documents([5, 5]))
    with pytest.raises(AttributeError):
        fixed.lengths  # noqa: B018  work that reads it cannot be recorded


def test_whole_rows_keep_their_documents():
    whole = documents([6], [6])
    static = StaticArguments(arguments(1, Pattern(whole)), SIZES)
    assert static.arguments[0].kwargs["attention_mask"].documents is whole
    assert static.take(arguments(2, Pattern(documents([6], [6]))))
    assert not static.take(arguments(2, Pattern(documents([2, 4], [6]))))
    assert sizes_of([whole, None]) == (0, 0) != sizes_of([whole, documents([2, 4], [6])])


def test_chunks_of_documents_are_counted():
    fixed = FixedDocuments(documents([40, 40]), 4, SIZES)
    assert fixed.starts(4).tolist() == [*range(0, 81, 4)] + [80] * 12
    assert np.all(np.diff(fixed.starts(4).numpy()) >= 0)
