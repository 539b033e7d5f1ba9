"""Rows that are not packed are grouped by length: little padding, every row once an epoch, and an
order that depends on the seed alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.data.batches.length_bucketing import padded_length
from engine.data.batches.packing import one_each
from engine.data.batches.rows import DocumentTokens, Order, RowSet, batches, one_pass
from engine.runtime.device.block_graphs import MOST_SHAPES

SEED = 3


def rows_of(lengths: np.ndarray, seed: int = SEED, shuffle: bool = True) -> RowSet:
    """Returns rows of these lengths; every token of row i is i + 1, and all are trained."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
    documents = DocumentTokens(ids, np.ones(len(ids), bool), starts)
    return RowSet(documents, one_each(len(lengths)), 0, Order(seed, shuffle))


@pytest.fixture
def lengths() -> np.ndarray:
    """Returns lengths as of conversations: most are short, a few are long."""
    return np.random.default_rng(0).lognormal(4.5, 0.8, 1000).clip(8, 1024).astype(np.int64)


def padding(rows: RowSet, batch_size: int, micro_batch_size: int, steps: int) -> float:
    """Returns the positions of some steps, in multiples of their tokens."""
    positions = tokens = 0
    for step in range(1, steps + 1):
        for batch in batches(rows, batch_size, micro_batch_size, step):
            positions += batch.input_ids.size
            tokens += batch.tokens
    return positions / tokens


@pytest.mark.parametrize("batch_size", [1, 7, 16, 1000, 3000])
def test_every_row_comes_once_an_epoch(lengths, batch_size):
    rows = rows_of(lengths).grouped_by_length(batch_size)
    for epoch in range(4):
        assert sorted(rows.order(epoch).tolist()) == list(range(1000))
        again = rows_of(lengths).grouped_by_length(batch_size)
        assert (again.order(epoch) == rows.order(epoch)).all()


def test_a_step_has_rows_of_similar_length(lengths):
    apart = rows_of(lengths)
    rows = apart.grouped_by_length(16)
    assert padding(apart, 16, 16, 300) > 2.5
    assert padding(rows, 16, 16, 300) < 1.15  # over five epochs, with the steps that two share
    assert padding(rows, 16, 4, 300) < padding(rows, 16, 16, 300)


def test_the_lengths_of_steps_come_in_random_order(lengths):
    order = rows_of(lengths).grouped_by_length(16).order(0)
    means = lengths[order[: 62 * 16]].reshape(62, 16).mean(1)
    assert abs(np.corrcoef(np.arange(62), means)[0, 1]) < 0.3
    assert means.max() > 4 * means.min()


def test_the_groups_differ_from_epoch_to_epoch_and_by_the_seed():
    lengths = np.random.default_rng(1).integers(8, 1024, 4000)
    rows = rows_of(lengths).grouped_by_length(16)

    def steps(order: np.ndarray) -> set[frozenset[int]]:
        return {frozenset(step.tolist()) for step in order.reshape(-1, 16)}

    first, second = steps(rows.order(0)), steps(rows.order(1))
    reseeded = steps(rows_of(lengths, seed=4).grouped_by_length(16).order(0))
    assert len(first & second) == len(first & reseeded) == 0


def test_an_order_without_groups_is_a_permutation_by_the_seed(lengths):
    for epoch in range(3):
        expected = np.random.default_rng((epoch, SEED)).permutation(1000)
        assert (rows_of(lengths).order(epoch) == expected).all()
    in_order = rows_of(lengths, shuffle=False).grouped_by_length(16)
    assert in_order.order(2).tolist() == list(range(1000))


def test_an_evaluation_takes_rows_by_length(lengths):
    rows = rows_of(lengths).grouped_by_length(16)
    grouped, plain = list(one_pass(rows, 16)), list(one_pass(rows_of(lengths), 16))
    for found in (grouped, plain):
        assert sum(len(batch.input_ids) for batch in found) == 1000
        assert sum(batch.loss_tokens for batch in found) == lengths.sum() - 1000
    seen = [int(row[0]) for batch in grouped for row in batch.input_ids]
    assert sorted(seen) == list(range(1, 1001))
    sizes = [sum(batch.input_ids.size for batch in found) for found in (grouped, plain)]
    assert sizes[0] < 1.1 * lengths.sum() and sizes[0] < sizes[1] / 2
    assert [int(row[0]) for batch in plain for row in batch.input_ids] == list(range(1, 1001))


@pytest.mark.parametrize("pad_up_to", [0, 1024])
def test_the_mean_length_is_that_of_the_steps(lengths, pad_up_to):
    rows = rows_of(lengths).grouped_by_length(16)
    shapes = [
        batch.input_ids.size
        for step in range(1, 63)
        for batch in batches(rows, 16, 5, step, pad_up_to)
    ]
    assert rows.mean_padded_length(16, 5, pad_up_to) == pytest.approx(sum(shapes) / (62 * 16))
    assert rows_of(lengths[:3]).mean_padded_length(16, 5, pad_up_to) == lengths[:3].max()


@pytest.fixture(scope="module")
def corpus() -> np.ndarray:
    """Returns the lengths of 4,000 documents, half of them of fewer than 245 tokens."""
    drawn = np.exp(np.random.default_rng(0).normal(5.5, 1, 4000))
    return drawn.clip(2, 2048).astype(np.int64)


@pytest.mark.parametrize("pad_up_to", [0, 2048])
@pytest.mark.parametrize("batch_size", [8, 32])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4, 8, 32])
def test_less_than_15_percent_of_a_step_is_padding(corpus, batch_size, micro_batch_size, pad_up_to):
    """Rows have one document each, in the order and with the padding of a run, compiled or not."""
    rows = rows_of(corpus).grouped_by_length(batch_size)
    size = min(micro_batch_size, batch_size)
    positions = tokens = 0
    for step in range(1, 65):
        for batch in batches(rows, batch_size, size, step, pad_up_to):
            positions += batch.input_ids.size
            tokens += batch.tokens
    waste = 100 * (1 - tokens / positions)
    assert waste < (12 if pad_up_to else 5)
    assert rows.percent_padding(batch_size, size, pad_up_to) == pytest.approx(waste)


def test_padded_lengths_are_few_and_no_longer_than_multiples_of_128():
    lengths = {padded_length(length, 2048) for length in range(1, 2049)}
    assert len(lengths) == MOST_SHAPES == 24 and {32, 64, 160, 320, 640, 1152, 2048} <= lengths
    for length in range(1, 5000):
        assert (
            length <= padded_length(length, 4999) <= max(length, min(-(-length // 128) * 128, 4999))
        )
    assert padded_length(300, 0) == 300 and padded_length(300, 310) == 310
