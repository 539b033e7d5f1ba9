"""Weights of answers, from the rows of a file to the labels of a micro-batch."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config.data_settings import DataConfig, DataSource
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.data.batches.rows import batches, one_pass
from engine.data.tokens import token_cache
from engine.data.tokens.tokenize import Execution
from engine.errors import DataError
from tests.support import data_tokenizers as made
from tests.support.rows import write_rows

ASKED = {"role": "user", "content": "say"}
ROWS = [
    {"messages": [ASKED, {"role": "assistant", "content": "one", **more}]}
    for more in [{}, {"weight": 1}, {"weight": 0.5}, {"weight": 3}, {}, {}]
]
END = "<|im_end|>"
ALONE = Execution()


def write(path, rows) -> str:
    write_rows(path, rows)
    return str(path)


def prepared(source, tokenizer, execution=ALONE, **values):
    settings = {"eval_fraction": 0.0, "shuffle": False, "packing": False} | values
    return prepare_data(DataConfig(source=source, **settings), tokenizer, 1, execution=execution)


def said(batch, tokenizer) -> list[list[tuple[str, float]]]:
    """The trained tokens of each line, as text for each run of one weight."""
    found = []
    for labels, weights in zip(batch.labels, batch.weights):
        runs: list[tuple[list[int], float]] = []
        for label, weight in zip(labels[labels >= 0], weights[labels >= 0]):
            if not runs or runs[-1][1] != weight:
                runs.append(([], float(weight)))
            runs[-1][0].append(int(label))
        found.append([(tokenizer.decode(ids), weight) for ids, weight in runs])
    return found


def test_every_label_of_an_answer_has_its_weight_and_no_other_position(tmp_path, tokenizer):
    rows = prepared(write(tmp_path / "a.jsonl", ROWS), tokenizer).train
    (batch,) = batches(rows, 6, 6, 1)
    weights = (1.0, 1.0, 0.5, 3.0, 1.0, 1.0)
    assert said(batch, tokenizer) == [[(f"one{END}", weight)] for weight in weights]
    assert batch.weights.dtype == np.float32 and not batch.weights[batch.labels < 0].any()
    counts = (batch.labels >= 0).sum(axis=1)
    assert batch.loss_weight == float(counts @ np.array(weights))
    assert batch.loss_tokens == counts.sum()
    (found,) = prepared(str(tmp_path / "a.jsonl"), tokenizer).summary["warnings"]
    assert found.startswith("The losses of an answer are multiplied by the weight that its row")
    assert found.endswith("(2 times).")


def test_a_micro_batch_without_weights_has_no_array_and_nor_has_a_file_without(tmp_path, tokenizer):
    rows = prepared(write(tmp_path / "a.jsonl", ROWS), tokenizer).train
    has_weights = [batch.weights is not None for batch in one_pass(rows, 1)]
    assert has_weights == [False, False, True, True, False, False]
    plain = [
        {"messages": [ASKED, {"role": "assistant", "content": "one", **more}]}
        for more in ({}, {"weight": 1}, {"weight": 0}, {"train": False})
    ]
    rows = prepared(write(tmp_path / "b.jsonl", plain), tokenizer).train
    assert len(rows) == 2 and not len(rows.weights)
    assert all(batch.weights is None for batch in one_pass(rows, 1))
    names = [path.name for path in token_cache.cache_folder().glob("*/*weights*")]
    assert names == ["train.weights"]


def test_weights_of_zero_leave_the_tokens_that_they_left_out_before(tmp_path, tokenizer):
    """The rows are those of the same conversations without the answers' training, to the bit."""
    said_before = {"role": "assistant", "content": "first"}
    turns = [ASKED, said_before, ASKED, {"role": "assistant", "content": "second"}]
    flagged = [turns[0], said_before | {"weight": 0}, *turns[2:]]
    switched = [turns[0], said_before | {"train": False}, *turns[2:]]
    found = [
        prepared(write(tmp_path / f"{name}.jsonl", [{"messages": row}]), tokenizer)
        for name, row in (("a", flagged), ("b", switched))
    ]
    assert found[0].fingerprint == found[1].fingerprint
    (one,), (other,) = (batches(each.train, 1, 1, 1) for each in found)
    assert np.array_equal(one.labels, other.labels) and one.weights is None
    assert tokenizer.decode(one.labels[one.labels >= 0].tolist()) == f"second{END}"


def test_answers_of_one_conversation_have_weights_of_their_own(tmp_path, tokenizer):
    row = {
        "messages": [
            *(ASKED, {"role": "assistant", "content": "one", "weight": 0.25}),
            *(ASKED, {"role": "assistant", "content": "two"}),
            *(ASKED, {"role": "assistant", "content": "no", "weight": 0}),
            *(ASKED, {"role": "assistant", "content": "three", "weight": 2}),
        ]
    }
    source = write(tmp_path / "a.jsonl", [row])
    (batch,) = batches(prepared(source, tokenizer).train, 1, 1, 1)
    assert said(batch, tokenizer) == [[(f"one{END}", 0.25), (f"two{END}", 1), (f"three{END}", 2)]]
    (batch,) = batches(prepared(source, tokenizer, train_on="all").train, 1, 1, 1)
    (runs,) = said(batch, tokenizer)
    weighted = [(text, weight) for text, weight in runs if weight != 1]
    assert weighted == [(f"one{END}", 0.25), (f"three{END}", 2)]
    assert "no" not in "".join(text for text, _ in runs).replace("<|im", "")


def test_turns_that_become_rows_of_their_own_keep_their_weights(tmp_path):
    """A template that drops earlier reasoning has each answer rendered by itself."""
    tokenizer = made.byte_level_tokenizer(REWRITING)
    answers = [
        {"role": "assistant", "content": text, "weight": weight}
        for text, weight in (("one", 0.5), ("two", 1), ("three", 4))
    ]
    row = {"messages": [turn for answer in answers for turn in (ASKED, answer)]}
    rows = prepared(write(tmp_path / "a.jsonl", [row]), tokenizer).train
    (batch,) = batches(rows, 3, 3, 1)
    assert [[weight for _, weight in line] for line in said(batch, tokenizer)] == [[0.5], [1], [4]]


REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last or m.role == 'user' %}{{ m.content }}{% else %}earlier {{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("first", [0, 3, 700])
def test_a_weight_may_come_late_and_helper_processes_find_the_same(tmp_path, tokenizer, first):
    """Batches of rows are tokenized one by one; those before the first weight get ones."""
    rows = [ROWS[0]] * first + [ROWS[2]] + [ROWS[0]] * 700
    source = write(tmp_path / "a.jsonl", rows)
    found = prepared(source, tokenizer, Execution(processes=0))
    weights = [float(found.train.row(i).weights.max()) for i in range(len(found.train))]
    assert weights == [1.0] * first + [0.5] + [1.0] * 700
    assert len(found.train.weights) == len(found.train.ids)
    again = prepared(source, tokenizer)
    assert again.summary["cached"] and again.fingerprint == found.fingerprint
    for path in token_cache.cache_folder().glob("*/manifest.json"):
        path.unlink()
    helped = prepared(source, tokenizer, Execution(processes=2))
    assert not helped.summary["cached"] and helped.fingerprint == found.fingerprint


def test_other_weights_are_other_data(tmp_path, tokenizer):
    def fingerprint(weight: float) -> str:
        turns = [ASKED, {"role": "assistant", "content": "one", "weight": weight}]
        source = write(tmp_path / f"{weight}.jsonl", [{"messages": turns}, ROWS[0]])
        return prepared(source, tokenizer).fingerprint

    assert len({fingerprint(weight) for weight in (1, 0.5, 0.25)}) == 3


def test_a_damaged_file_of_weights_is_made_again(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", ROWS)
    expected = prepared(source, tokenizer).fingerprint
    (path,) = token_cache.cache_folder().glob("*/train.weights")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    again = prepared(source, tokenizer)
    assert not again.summary["cached"] and again.fingerprint == expected


def test_a_mix_of_data_with_and_without_weights(tmp_path, tokenizer):
    plain = [{"prompt": f"q{i}", "completion": "two"} for i in range(4)]
    parts = [
        DataSource(write(tmp_path / "a.jsonl", plain), weight=2.0),
        DataSource(write(tmp_path / "b.jsonl", ROWS)),
    ]
    for packing in (False, True):
        rows = prepared(parts, tokenizer, packing=packing, max_seq_len=128, shuffle=True).train
        assert rows.packed == packing
        found: dict[tuple[str, float], int] = {}
        for batch in one_pass(rows, 1):
            if batch.weights is None:
                text = tokenizer.decode(batch.labels[batch.labels >= 0].tolist())
                runs = [(text, 1.0)]
            else:
                (runs,) = said(batch, tokenizer)
            for text, weight in runs:
                for answer in text.split(END)[:-1]:
                    found[answer, weight] = found.get((answer, weight), 0) + 1
        assert found == {("two", 1.0): 8, ("one", 1.0): 4, ("one", 0.5): 1, ("one", 3.0): 1}


def test_an_answer_that_is_cut_keeps_the_weights_of_its_tokens(tmp_path, tokenizer):
    long = {"role": "assistant", "content": "one " * 40, "weight": 0.5}
    rows = prepared(
        write(tmp_path / "a.jsonl", [{"messages": [ASKED, long]}]), tokenizer, max_seq_len=96
    ).train
    (batch,) = batches(rows, 1, 1, 1)
    assert batch.labels.shape == (1, 96)
    assert set(batch.weights[batch.labels >= 0].tolist()) == {0.5}


def test_the_preview_says_the_weight_of_an_answer(tmp_path, tokenizer):
    found = preview(DataConfig(source=write(tmp_path / "a.jsonl", ROWS)), tokenizer)
    trained = [
        [piece for piece in row["documents"][0] if piece["trained"]] for row in found["rows"]
    ]
    assert [[piece.get("weight") for piece in row] for row in trained[:4]] == [
        [None],
        [None],
        [0.5],
        [3.0],
    ]
    assert all(row[0]["text"] == f"one{END}" for row in trained)


def test_a_bad_weight_names_its_line(tmp_path, tokenizer):
    bad = {"messages": [ASKED, {"role": "assistant", "content": "x", "weight": -0.5}]}
    source = write(tmp_path / "a.jsonl", [*ROWS, bad])
    with pytest.raises(
        DataError, match=r"^The weight of turn 2 of messages in line 7 of .* -0\.5;"
    ):
        prepared(source, tokenizer)
