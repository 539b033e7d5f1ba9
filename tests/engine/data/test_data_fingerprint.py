"""The fingerprint of a data set is the same as when all data was held in lists, so that older runs
can be resumed.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_left, insort

import numpy as np
import pytest

from engine.config.data_settings import DataConfig, DataSource
from engine.data.batches.loader import prepare_data
from engine.data.formats.formats import map_columns
from engine.data.sources.open_source import open_source
from engine.data.tokens import mapped_arrays
from engine.data.tokens.documents import TextRows
from engine.data.tokens.encode import Encoder
from engine.data.tokens.render import RejectedExample
from engine.data.tokens.rendered import Handling
from tests.support.rows import write_rows

SEED_OF_THE_SPLIT = 20_010_911


def former_fingerprint(config: DataConfig, tokenizer, seed: int) -> str:
    """Returns the fingerprint as it used to be computed, from lists of documents."""
    encoder = Encoder(tokenizer, Handling(config.train_on), config.max_seq_len)
    sides: tuple[list, list] = ([], [])
    for part, weight in config.parts():
        train, validation = former_documents(part, encoder)
        passes, more = divmod(max(1, round(weight * len(train))), len(train))
        chosen = np.random.default_rng(SEED_OF_THE_SPLIT).permutation(len(train))[:more]
        visited = train * passes + [train[i] for i in sorted(chosen.tolist())]
        sides[0].extend(document for example in visited for document in example)
        sides[1].extend(document for example in validation for document in example)
    digest = hashlib.blake2b(digest_size=16)
    for documents in sides:
        lengths = np.array([len(document.ids) for document in documents], dtype=np.int64)
        rows = [[number] for number in range(len(documents))]
        if config.packing:
            numbers = np.arange(len(documents))
            order = (
                np.random.default_rng([seed]).permutation(numbers) if config.shuffle else numbers
            )
            rows = former_pack(lengths, config.max_seq_len, order)
        for array in (
            np.concatenate([np.empty(0, np.int32), *(document.ids for document in documents)]),
            np.concatenate([np.empty(0, bool), *(document.loss_mask for document in documents)]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.fromiter(itertools.chain(*rows), np.int64),
            np.fromiter(map(len, rows), np.int64),
        ):
            digest.update(np.int64(len(array)).tobytes())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def former_documents(config: DataConfig, encoder: Encoder) -> tuple[list, list]:
    source = open_source(config)
    rows = list(source.read())
    columns = map_columns(config.format, [row for _, row in rows[:20]], source, config.columns)
    held = set()
    if config.eval_fraction > 0 and len(rows) >= 2:
        count = min(max(1, round(len(rows) * config.eval_fraction)), len(rows) - 1)
        held = set(np.random.default_rng(SEED_OF_THE_SPLIT).permutation(len(rows))[:count].tolist())
    train, validation = [], []
    texts = TextRows(config) if columns.format == "text" else None
    for place, (number, row) in enumerate(rows):
        example = columns.example(row, source.where(number))
        found = encoder.encode([example])[0] if example is not None else RejectedExample("")
        if texts is not None:
            found = texts.of_row(row, found)
        if not isinstance(found, RejectedExample):
            (validation if place in held else train).append(found.documents)
    if config.eval_fraction > 0 and not validation and len(train) > 1:
        validation.append(train.pop())
    return train, validation


def former_pack(lengths: np.ndarray, max_seq_len: int, order: np.ndarray) -> list[list[int]]:
    rows: list[list[int]] = []
    rows_by_space: dict[int, list[int]] = {}
    spaces: list[int] = []
    for document, length in zip(order.tolist(), lengths[order].tolist()):
        place = bisect_left(spaces, length)
        if place == len(spaces):
            space, row = max_seq_len, len(rows)
            rows.append([])
        else:
            space = spaces[place]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del rows_by_space[space], spaces[place]
        rows[row].append(document)
        space -= length
        if space not in rows_by_space:
            rows_by_space[space] = []
            insort(spaces, space)
        rows_by_space[space].append(row)
    return rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, choose = tmp_path_factory.mktemp("data"), np.random.default_rng(7)
    written = {
        "pairs": [
            {
                "prompt": f"q{i} " + "he" * int(choose.integers(0, 30)),
                "completion": f"a{i}" if i % 17 else "",
            }
            for i in range(700)
        ],
        "texts": [{"text": "hello an " * int(choose.integers(1, 90))} for _ in range(60)],
        "turns": [
            {
                "messages": [
                    {"role": "user", "content": f"{i}"},
                    {"role": "assistant", "content": "an"},
                ]
                * (i % 4)
            }
            for i in range(50)
        ],
        "last": [{"prompt": f"q{i}", "completion": "a" if i != 1 else ""} for i in range(3)],
    }
    for name, rows in written.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return {name: str(folder / f"{name}.jsonl") for name in written}


CASES = {
    "packed and shuffled": ("pairs", {}),
    "in order": ("pairs", {"shuffle": False}),
    "one a row": ("pairs", {"packing": False}),
    "none for validation": ("pairs", {"eval_fraction": 0.0}),
    "texts in parts": ("texts", {"max_seq_len": 32}),
    "conversations": ("turns", {"train_on": "all"}),
    "the last is for validation": ("last", {"eval_fraction": 0.01}),
    "a mix": ((("pairs", 0.3), ("texts", 2.5), ("turns", 1.0)), {"max_seq_len": 100}),
    "a mix in order": ((("texts", 3.0), ("pairs", 1.0)), {"shuffle": False, "packing": False}),
    "one with a weight": ((("texts", 0.01),), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_fingerprint_is_what_it_was(files, tokenizer, name, monkeypatch):
    monkeypatch.setattr(mapped_arrays, "_CHUNK", 1000)  # every array is read in several pieces
    source, changes = CASES[name]
    source = (
        files[source]
        if isinstance(source, str)
        else tuple(DataSource(files[n], weight) for n, weight in source)
    )
    config = DataConfig(source, **{"max_seq_len": 128, "eval_fraction": 0.1, **changes})
    former = former_fingerprint(config, tokenizer, 5)
    for cached in (False, True):
        data = prepare_data(config, tokenizer, 5)
        assert data.fingerprint == former and data.summary["cached"] == cached
        assert data.train.loss_tokens == sum(
            (data.train.row(i).labels != -100).sum() for i in range(len(data.train))
        )
