"""Rows become batches: packing, shifted labels, padding, the validation split and an order that can
be resumed are tested.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.packing import pack
from engine.data.batches.rows import batches, micro_batch_bounds, one_pass
from engine.data.tokens.tokenize import Execution
from engine.errors import DataError
from tests.support import data_tokenizers as made
from tests.support.rows import write_rows


@pytest.fixture(scope="module")
def tokenizer():
    return made.byte_level_tokenizer(made.CHATML_GENERATION)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "rows.jsonl"
    choose = np.random.default_rng(3)
    rows = [
        {"prompt": f"q{i} " + "he" * int(choose.integers(0, 20)), "completion": f"a{i}"}
        for i in range(60)
    ]
    return write_rows(path, rows)


def prepared(source, tokenizer, seed=1, packing_problem="", **changes):
    settings = {"source": str(source), "max_seq_len": 128, "eval_fraction": 0.1, **changes}
    return prepare_data(DataConfig(**settings), tokenizer, seed, packing_problem)


def test_packing_fills_rows_and_loses_nothing():
    choose = np.random.default_rng(1)
    lengths = choose.integers(1, 100, 2000)
    rows = pack(lengths, 100, choose.permutation(2000))
    assert sorted(rows.documents.tolist()) == list(range(2000)) and rows.packed
    fills = np.array([lengths[rows[i]].sum() for i in range(len(rows))])
    assert fills.max() <= 100 and fills.mean() > 96
    few = pack(np.array([6, 5, 4, 5]), 10, np.arange(4))
    assert [few[i].tolist() for i in range(len(few))] == [[0, 2], [1, 3]]


def test_labels_are_shifted_and_never_cross_documents(source, tokenizer):
    rows = prepared(source, tokenizer).train
    assert rows.packed
    for i in range(len(rows)):
        row = rows.row(i)
        assert row.documents == len(rows.rows[i])
        assert len(row.input_ids) == rows.row_length(i) <= 128
        starts = np.flatnonzero(row.position_ids == 0)
        assert len(starts) == row.documents
        for start, end in zip(starts, [*starts[1:], len(row.input_ids)]):
            assert row.position_ids[start:end].tolist() == list(range(end - start))
            assert row.labels[end - 1] == -100
            text = tokenizer.decode(row.input_ids[start:end].tolist())
            wanted = row.labels[start:end] != -100
            assert (
                row.labels[start:end][wanted] == row.input_ids[start + 1 : end][wanted[:-1]]
            ).all()
            number = text.split("<|im_start|>user\nq")[1].split()[0]
            assert (
                tokenizer.decode(row.labels[start:end][wanted].tolist()) == f"a{number}<|im_end|>"
            )


def test_padding_is_a_document_of_its_own_and_is_not_counted(source, tokenizer):
    rows = prepared(source, tokenizer).train
    (batch,) = batches(rows, 4, 4, 1)
    assert batch.input_ids.dtype == batch.labels.dtype == batch.position_ids.dtype == np.int64
    real = [rows.row_length(int(i)) for i in rows.order(0)[:4]]
    assert batch.tokens == sum(real) and batch.loss_tokens == int((batch.labels != -100).sum()) > 0
    assert batch.input_ids.shape[1] == max(real)
    for line, length in enumerate(real):
        assert (batch.labels[line, length:] == -100).all()
        assert batch.position_ids[line, length:].tolist() == list(
            range(batch.input_ids.shape[1] - length)
        )
        assert (batch.input_ids[line, length:] == tokenizer.pad_token_id).all()


def test_without_packing_one_document_a_row_and_no_positions(source, tokenizer):
    for changes in ({"packing": False}, {"packing_problem": "tiny: documents see each other"}):
        data = prepared(source, tokenizer, **changes)
        assert len(data.train) == data.summary["train_examples"] == 54
        assert not data.summary["packing"]
        for batch in batches(data.train, 8, 4, 2):
            assert batch.position_ids is None and len(batch.input_ids) == 4
    assert any(
        "Packing is off" in w and "tiny: documents see each other" in w
        for w in data.summary["warnings"]
    )


def test_like_lengths_stand_together_within_a_step_and_every_row_is_there(source, tokenizer):
    rows = prepared(source, tokenizer, packing=False).train
    whole = batches(rows, 12, 12, 3)[0]
    parts = batches(rows, 12, 3, 3)
    assert sum(p.tokens for p in parts) == whole.tokens
    assert sum(p.input_ids.size for p in parts) < whole.input_ids.size
    assert sum(p.loss_tokens for p in parts) == whole.loss_tokens


@pytest.mark.parametrize("rows", [1, 2, 7, 12, 100, 148])
def test_micro_batches_are_as_few_and_as_equal_as_can_be(rows):
    for size in range(1, rows + 1):
        bounds = micro_batch_bounds(rows, size)
        sizes = [stop - start for start, stop in bounds]
        assert bounds[0][0] == 0 and bounds[-1][1] == rows
        assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
        assert len(sizes) == -(-rows // size) and max(sizes) <= size
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
        if rows % size == 0:
            assert set(sizes) == {size}


def test_uneven_micro_batches_have_the_rows_of_a_step(source, tokenizer):
    rows = prepared(source, tokenizer, packing=False).train
    whole = batches(rows, 10, 10, 2)[0]
    parts = batches(rows, 10, 4, 2)
    assert [len(part.input_ids) for part in parts] == [4, 3, 3]
    lengths = [
        [int((line != tokenizer.pad_token_id).sum()) for line in part.input_ids] for part in parts
    ]
    # The longest rows are found where most rows are.
    in_order = [length for own in lengths for length in own]
    assert in_order == sorted(in_order, reverse=True)
    assert (sum(p.tokens for p in parts), sum(p.loss_tokens for p in parts)) == (
        whole.tokens,
        whole.loss_tokens,
    )


def test_the_order_is_a_function_of_seed_epoch_and_step(source, tokenizer):
    data = prepared(source, tokenizer, packing=False)
    rows, again = data.train, prepared(source, tokenizer, packing=False).train
    assert data.fingerprint == prepared(source, tokenizer, packing=False).fingerprint
    for step in (9, 1, 5):
        one, two = batches(rows, 8, 8, step)[0], batches(again, 8, 8, step)[0]
        assert (one.input_ids == two.input_ids).all() and (one.labels == two.labels).all()
    reseeded = prepared(source, tokenizer, seed=2, packing=False).train
    unshuffled = prepared(source, tokenizer, packing=False, shuffle=False).train
    assert (rows.order(0) != rows.order(1)).any()
    assert (rows.order(0) != reseeded.order(0)).any()
    assert unshuffled.order(3).tolist() == list(range(54))


def test_steps_read_one_epoch_after_another(source, tokenizer):
    rows = prepared(source, tokenizer, packing=False).train
    assert rows.steps_of(1, 8) == 7
    assert rows.steps_of(2, 8) == 14
    assert rows.steps_of(0.5, 8) == 4
    wanted = [i for epoch in range(3) for i in rows.order(epoch).tolist()]
    seen = []
    for step in range(1, 21):
        (batch,) = batches(rows, 8, 8, step)
        assert len(batch.input_ids) == 8
        seen.extend(batch.input_ids[:, : batch.input_ids.shape[1]].tolist())
    for place, line in enumerate(seen):
        ids = rows.row(wanted[place]).input_ids.tolist()
        assert line[: len(ids)] == ids and set(line[len(ids) :]) <= {tokenizer.pad_token_id}


def test_the_validation_split_is_disjoint_exact_and_independent_of_the_seed(source, tokenizer):
    first, second = prepared(source, tokenizer, seed=1), prepared(source, tokenizer, seed=2)
    assert first.summary["eval_examples"] == 6 and first.summary["train_examples"] == 54
    assert first.eval_prompts(9) == second.eval_prompts(9)
    asked = {prompt.prompt_text for prompt in first.eval_prompts(9)}
    trained = tokenizer.decode(first.train.ids.tolist())
    assert len(asked) == 6 and not any(text + "<|im_end|>" in trained for text in asked)
    (only,) = list(one_pass(first.eval, 100))
    assert only.tokens == first.summary["eval_tokens"]
    assert only.loss_tokens == first.eval.loss_tokens
    assert sum(len(b.input_ids) for b in one_pass(first.eval, 1)) == len(first.eval)


@pytest.mark.parametrize(
    ("rows", "fraction", "validation"), [(1, 0.5, 0), (2, 0.01, 1), (2, 0.9, 1), (10, 0.0, 0)]
)
def test_small_sets_keep_a_row_on_either_side(tmp_path, tokenizer, rows, fraction, validation):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"q{i}", "completion": "a"}) + "\n" for i in range(rows))
    )
    summary = prepared(path, tokenizer, eval_fraction=fraction).summary
    assert (summary["train_examples"], summary["eval_examples"]) == (rows - validation, validation)


def test_a_validation_row_is_found_even_when_the_chosen_one_is_skipped(tmp_path, tokenizer):
    for empty in range(3):
        path = tmp_path / "a.jsonl"
        rows = [{"prompt": f"q{i}", "completion": "" if i == empty else "a"} for i in range(3)]
        write_rows(path, rows)
        summary = prepared(path, tokenizer, eval_fraction=0.01).summary
        assert (summary["train_examples"], summary["eval_examples"], summary["rows_skipped"]) == (
            1,
            1,
            1,
        )


def test_the_only_usable_row_is_trained_even_when_it_was_chosen_for_validation(tmp_path, tokenizer):
    for usable in range(3):
        path = tmp_path / f"{usable}.jsonl"
        rows = [{"prompt": "a", "completion": "b" if i == usable else ""} for i in range(3)]
        write_rows(path, rows)
        summary = prepared(path, tokenizer, eval_fraction=0.3).summary
        assert (summary["train_examples"], summary["eval_examples"]) == (1, 0)


def test_long_rows_are_cut_and_rows_without_an_answer_left_are_skipped(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    rows = [
        {"prompt": "q", "completion": "b" * 50},
        {"prompt": "q" * 50, "completion": "b"},
        {"prompt": "q", "completion": "b"},
    ]
    write_rows(path, rows)
    data = prepared(path, tokenizer, eval_fraction=0.0, max_seq_len=40)
    assert (
        data.summary["rows_cut"],
        data.summary["rows_skipped"],
        data.summary["train_examples"],
    ) == (1, 1, 2)
    assert data.summary["skipped_because"] == {"no trained token is left within max_seq_len": 1}
    assert data.summary["tokens_per_example"]["longest"] == 40
    assert any("max_seq_len 40" in warning for warning in data.summary["warnings"])
    with pytest.raises(DataError, match="no token to train on: 0 of 3 rows are usable"):
        prepared(path, tokenizer, max_seq_len=5)


def test_progress_is_told_and_can_stop_the_preparation(source, tokenizer):
    found = []
    prepare_data(
        DataConfig(source=str(source)),
        tokenizer,
        1,
        execution=Execution(lambda *told_now: found.append(told_now)),
    )
    assert found[-1] == (60, 60, "Tokenized rows.jsonl")

    def stop(done, total, message):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_data(DataConfig(source=str(source)), tokenizer, 1, execution=Execution(stop))


def test_the_data_side_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys, engine.data.batches.loader, engine.data.batches.preview; "
        "sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
