"""Texts that go on from row to row are divided for a whole batch at once, into the same documents
that a loop over their passages and rows makes.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from engine.config.data_settings import DataConfig
from engine.data.sources.text_files import Passage, lengths_of_passages, passages
from engine.data.tokens.documents import AcceptedExample, Document, Documents, TextRows
from engine.data.tokens.encoded import Encoded, divided
from engine.data.tokens.rendered import RejectedExample

pytestmark = pytest.mark.computing


def looped(batch, config):
    """Yields the documents that are complete with each passage of `batch` (ids, marks, whether the
    text goes on), one row after another.
    """
    repeated = max(1, config.overlap)
    ids, loss_mask, waiting = [], [], []
    for passage in batch:
        if passage is None:
            waiting += [(ids, loss_mask)] * any(loss_mask)
            ids, loss_mask = [], []
            yield RejectedExample("unreadable")
            continue
        ids, loss_mask = [*ids, *passage[0].tolist()], [*loss_mask, *passage[1].tolist()]
        while len(ids) >= config.max_seq_len:
            if any(loss_mask[: config.max_seq_len]):
                waiting.append((ids[: config.max_seq_len], loss_mask[: config.max_seq_len]))
            begin = config.max_seq_len - repeated
            ids = ids[begin:]
            loss_mask = [False] * repeated + loss_mask[begin + repeated :]
        if not passage[2]:
            waiting += [(ids, loss_mask)] * any(loss_mask)
            ids, loss_mask = [], []
        yield waiting
        waiting = []
    yield waiting + [(ids, loss_mask)] * any(loss_mask)


def document(ids, loss_mask):
    return Document(np.array(ids, np.int32), np.array(loss_mask, bool), None, len(ids))


def encoded(batch):
    rows = [[document(*passage[:2])] if passage else [] for passage in batch]
    skipped = [
        (place, RejectedExample("unreadable")) for place, each in enumerate(batch) if not each
    ]
    answers = np.zeros((len(batch), 2), np.int64)
    return Encoded(Documents.joined(rows), answers, 0, skipped, Counter())


def assert_alike(one, other):
    for name, values in vars(one).items():
        there = vars(other)[name]
        assert values.dtype == there.dtype and np.array_equal(values, there), name


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("limit", "overlap"), [(2, 0), (7, 0), (7, 3), (64, 0), (64, 32)])
def test_a_batch_gives_the_documents_of_its_passages(monkeypatch, seed, limit, overlap):
    draw = np.random.default_rng([seed, limit, overlap])
    config = DataConfig("a.txt", max_seq_len=limit, overlap=overlap)
    ends, fails = ((0.02, 0.01), (0.3, 0.0), (0.0, 0.0))[seed % 3]
    data = []
    for _ in range(120):
        length = int(draw.integers(0, draw.choice([2, limit, 4 * limit])))
        marks = draw.random(length) < draw.choice([0.0, 0.02, 1.0])
        passage = (draw.integers(0, 999, length), marks, draw.random() >= ends)
        data.append(None if draw.random() < fails else passage)
    wanted = looped(data, config)
    texts, at_once = TextRows(config), []
    of_passages = texts.of_passages
    monkeypatch.setattr(
        texts, "of_passages", lambda found: at_once.append(of_passages(found)) or at_once[-1]
    )
    begin = 0
    while begin < len(data):
        batch = data[begin : begin + int(draw.integers(1, 12))]
        begin += len(batch)
        rows = [(0, Passage("x", "", "x" * bool(each and each[2])), "") for each in batch]
        found = divided(texts, rows, encoded(batch))
        of_rows = list(itertools.islice(wanted, len(batch)))
        skipped = [place for place, each in enumerate(of_rows) if isinstance(each, RejectedExample)]
        assert [place for place, _ in found.skipped] == skipped
        plain = [[] if isinstance(each, RejectedExample) else each for each in of_rows]
        assert_alike(
            found.documents, Documents.joined([[document(*one) for one in each] for each in plain])
        )
        assert found.cut == 0 and found.answers.shape == (len(batch), 2)
    rest = [(each.ids.tolist(), each.loss_mask.tolist()) for each in texts.rest()]
    assert rest == next(wanted)
    assert sum(each is not None for each in at_once) > (5 if ends < 0.1 else -1)


@pytest.mark.parametrize("choice", ["cut", "skip"])
def test_texts_that_do_not_go_on_are_taken_one_by_one(choice):
    texts = TextRows(DataConfig("a.txt", max_seq_len=3, long_texts=choice))
    passage = document([1, 2], [False, True])
    continues, ends = Passage("x", "", "x"), Passage("x", "x", "")
    assert texts.of_passages(Documents.joined([[passage]])) is None
    assert texts.of_row(continues, AcceptedExample([passage], False, None)).documents == []
    found = texts.of_row(ends, AcceptedExample([passage], False, None))
    if choice == "skip":
        assert found == RejectedExample("the text is longer than data.max_seq_len")
    else:
        assert found.cut and found.documents[0].ids.tolist() == [1, 2, 1]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("has_more", [False, True])
def test_documents_of_some_rows(share, has_more):
    draw = np.random.default_rng(3)
    counts = draw.integers(0, 4, 60)
    lengths = draw.integers(1, 9, counts.sum())
    tokens = int(lengths.sum())
    more = (draw.random(len(lengths)), draw.random(tokens).astype(np.float32))
    nothing = (np.zeros(0), np.zeros(0, np.float32))
    marks = draw.random(tokens) < 0.5
    of_all = Documents(
        np.arange(tokens, dtype=np.int32), marks, lengths, counts, *(more if has_more else nothing)
    )
    wanted = draw.random(60) < share
    documents = np.repeat(wanted, counts)
    kept = np.repeat(documents, lengths)
    found = of_all.of_rows(wanted)
    of_more = (more[0][documents], more[1][kept]) if has_more else nothing
    assert_alike(
        found,
        Documents(of_all.ids[kept], marks[kept], lengths[documents], counts[wanted], *of_more),
    )


@pytest.mark.parametrize("text", ["hello an hé said. " * 900, "x" * 5_000, "\n \n", "日本\n" * 700])
def test_passages_of_known_lengths_are_the_same(tmp_path, text):
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    plain = [(number, each["text"], each.before, each.after) for number, each in passages(path, 20)]
    lengths = lengths_of_passages(path, 20)
    assert list(lengths) == [len(each) for _, each, _, _ in plain]
    again = passages(path, 20, lengths)
    assert [(number, each["text"], each.before, each.after) for number, each in again] == plain
    stale = passages(path, 20, [1, 0, 7] + [60] * 20)  # as where the file has changed
    assert "".join(each["text"] for _, each in stale) == "".join(each[1] for each in plain)
