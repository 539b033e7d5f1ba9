"""Which tokens a row trains: never the first of a document, and never one of the next document.

Two rules keep a document from learning how another one begins. The encoder marks no first token as
trained, and a row gives the last position of a document no label. Either alone would do for the
labels. The first also keeps the counts of trained tokens true. The second holds for token files
that another version wrote. Each has a test of its own, since neither can be seen through the other.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.packing import Rows
from engine.data.batches.rows import DocumentTokens, Order, RowSet, one_pass
from tests.support import data_tokenizers as made

LIMIT = 16


@pytest.mark.parametrize("bos", [False, True])
def test_the_first_token_of_a_document_is_never_trained(tmp_path, bos):
    """A text longer than a row is divided; each part is a document and has a first token."""
    path = tmp_path / "data.txt"
    path.write_text("hello an hello he " * 40, encoding="utf-8")
    tokenizer = made.byte_level_tokenizer(made.CHATML, bos=bos)
    config = DataConfig(source=str(path), max_seq_len=LIMIT, eval_fraction=0.0)
    rows = prepare_data(config, tokenizer, seed=1).train
    documents = len(rows.starts) - 1
    assert documents > 3 and np.diff(rows.starts).max() == LIMIT
    loss_mask = np.asarray(rows.loss_mask[:])
    assert not loss_mask[rows.starts[:-1]].any()
    assert int(loss_mask.sum()) == rows.tokens - documents == rows.loss_tokens
    assert sum(batch.loss_tokens for batch in one_pass(rows, 3)) == rows.loss_tokens


def test_a_label_never_reaches_into_the_next_document():
    """All tokens are marked here, as no encoder of this version marks them."""
    lengths = np.array([3, 1, 4, 2])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(100, 100 + starts[-1], dtype=np.int32)
    documents = DocumentTokens(ids, np.ones(len(ids), bool), starts)
    packed = Rows(np.array([2, 0, 1, 3]), np.array([0, 3, 4]))
    rows = RowSet(documents, packed, 0, Order(0, False))
    assert rows.row(0).labels.tolist() == [105, 106, 107, -100, 101, 102, -100, -100]
    assert rows.row(1).labels.tolist() == [109, -100]


@pytest.mark.parametrize("limit, asked", [(LIMIT, 0), (64, 4)])
def test_an_answer_that_was_cut_is_not_asked_for(tmp_path, limit, asked):
    """What is left of it is trained, but no model could give it exactly."""
    path = tmp_path / "data.jsonl"
    row = {"prompt": "hello", "completion": " hello an hello he" * 3}
    path.write_text((json.dumps(row) + "\n") * 8, encoding="utf-8")
    config = DataConfig(source=str(path), max_seq_len=limit, eval_fraction=0.5)
    data = prepare_data(config, made.byte_level_tokenizer(), seed=1)
    assert len(data.eval_prompts(8)) == asked
    assert data.eval.loss_tokens and data.eval.row_lengths.max() <= limit
