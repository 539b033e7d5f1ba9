"""Tables, text files and folders give the right rows, the splits that their names indicate, and
errors that name the right place.
"""

from __future__ import annotations

import csv
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.data.sources.folders import files_of
from engine.data.sources.open_source import notes_on, open_source
from engine.errors import DataError
from tests.support.rows import write_rows

ROWS = [{"prompt": f'say "{i}", twice\nor once', "completion": f"é {i}\t!"} for i in range(5)]


def prepared(source, tokenizer, **changes):
    return prepare_data(
        DataConfig(**{"source": str(source), "packing": False, "eval_fraction": 0.0, **changes}),
        tokenizer,
        1,
    )


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_rows(path, rows)


def table(path, rows, delimiter):
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_tables_hold_the_rows_that_json_lines_hold(tmp_path, tokenizer):
    wanted = prepared(lines(tmp_path / "a.jsonl", ROWS), tokenizer).fingerprint
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        data = prepared(table(tmp_path / name, ROWS, delimiter), tokenizer)
        assert data.fingerprint == wanted and data.summary["rows_read"] == 5


def test_turns_in_a_cell_are_read_as_json(tmp_path, tokenizer):
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "an"}]
    data = prepared(table(tmp_path / "a.csv", [{"messages": json.dumps(turns)}], ","), tokenizer)
    assert data.train.ids.tolist() == tokenizer.apply_chat_template(turns)["input_ids"]


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path, tokenizer):
    lines(tmp_path / "whole.jsonl", ROWS)
    lines(tmp_path / "set/b/2.jsonl", ROWS[3:])
    table(lines(tmp_path / "set/b/1.csv", ROWS), ROWS[2:3], ",")
    lines(tmp_path / "set/a.jsonl", ROWS[:2])
    (tmp_path / "set/README.md").write_text("about")
    data = prepared(tmp_path / "set", tokenizer)
    assert data.fingerprint == prepared(tmp_path / "whole.jsonl", tokenizer).fingerprint
    lines(tmp_path / "set/c.jsonl", [{"prompt": 3, "completion": "a"}])
    with pytest.raises(DataError, match=r"^The column prompt in line 1 of c\.jsonl is a number"):
        prepared(tmp_path / "set", tokenizer)


def test_file_names_say_the_split(tmp_path, tokenizer):
    lines(tmp_path / "set/train-00000-of-00002.jsonl", ROWS[:1])
    lines(tmp_path / "set/train-00001-of-00002.jsonl", ROWS[1:2])
    lines(tmp_path / "set/test/part.jsonl", ROWS[2:])
    assert prepared(tmp_path / "set", tokenizer).summary["rows_read"] == 2
    assert prepared(tmp_path / "set", tokenizer, split="test").summary["rows_read"] == 3
    with pytest.raises(
        DataError, match=r"has no split validation; its files are called after test, train"
    ):
        prepared(tmp_path / "set", tokenizer, split="validation")


SPLITS = {  # what is read to train on, to test on and to validate on; "" is a refusal, * every file
    "training_notes.md chapter1.md": ("*", "*", "*"),
    "dev_ops.jsonl a.jsonl test_cases.jsonl": ("*", "*", "*"),
    "pretrain.jsonl latest.jsonl evaluate.jsonl": ("*", "*", "*"),
    "training_notes.md dev_ops.md": ("*", "*", "*"),
    "train-0.jsonl test-0.jsonl extra.jsonl": ("train-0.jsonl", "test-0.jsonl", ""),
    "a.jsonl b.jsonl test.jsonl": ("a.jsonl b.jsonl", "test.jsonl", ""),
    "train-00000-of-00002.jsonl train-00001-of-00002-0123456789abcdef.jsonl TEST_0.jsonl "
    "val2.jsonl": (
        "train-00000-of-00002.jsonl train-00001-of-00002-0123456789abcdef.jsonl",
        "TEST_0.jsonl",
        "val2.jsonl",
    ),
    "data-train.jsonl data.test.jsonl my_valid_03.jsonl": (
        "data-train.jsonl",
        "data.test.jsonl",
        "my_valid_03.jsonl",
    ),
    "train_clean.jsonl test_clean.jsonl train.jsonl": (
        "train.jsonl train_clean.jsonl",
        "test_clean.jsonl",
        "",
    ),
    "Training/a.jsonl dev/b.jsonl test/deep/c.jsonl": (
        "Training/a.jsonl",
        "test/deep/c.jsonl",
        "dev/b.jsonl",
    ),
    "train_sft-00000-of-00001.jsonl test_sft-00000-of-00001.jsonl a.jsonl": ("", "", ""),
    "train_notes/a.jsonl b.jsonl": ("*", "*", "*"),
}


@pytest.mark.parametrize("names", SPLITS)
def test_only_names_that_are_splits_say_one_and_what_is_left_out_is_said(tmp_path, names):
    for name in names.split():
        lines(tmp_path / "set" / name, ROWS)
    for split, expected in zip(("train", "test", "validation"), SPLITS[names]):
        config = DataConfig(source=str(tmp_path / "set"), split=split)
        if not expected:
            with pytest.raises(
                DataError, match=f"has no split {split}; its files are called after "
            ):
                open_source(config)
            continue
        wanted = sorted(
            tmp_path / "set" / name for name in (names if expected == "*" else expected).split()
        )
        assert files_of(tmp_path / "set", config) == wanted
        unused = ["data.split " + split + " is not used: the folder has no splits."]
        notes = unused if expected == "*" and split != "train" else []
        assert notes_on(config) == (
            [
                "A file of the folder set is left out, because its name says no split and others "
                "do: extra.jsonl."
            ]
            if "extra.jsonl" in names
            else notes
        )


def test_a_split_of_a_longer_name_is_asked_for_by_that_name(tmp_path, tokenizer):
    for name in ("train_sft-00000-of-00001", "test_sft-00000-of-00001", "train_gen-00000-of-00001"):
        lines(tmp_path / "set" / f"{name}.jsonl", ROWS)
    source = open_source(DataConfig(source=str(tmp_path / "set"), split="train_sft"))
    assert [member.name for member in source.members] == ["train_sft-00000-of-00001.jsonl"]
    with pytest.raises(
        DataError,
        match=r"no split train; its files are called after test_sft, train_gen, train_sft, ",
    ):
        prepared(tmp_path / "set", tokenizer)


def test_files_that_are_left_out_are_named_in_the_summary_and_the_preview(tmp_path, tokenizer):
    for name in ("train", "test", "extra", "more/b"):
        lines(tmp_path / "set" / f"{name}.jsonl", ROWS)
    note = (
        "2 files of the folder set are left out, because their names say no split and others do "
        "(first extra.jsonl)."
    )
    for _ in range(2):  # first made, then found in the cache
        assert note in prepared(tmp_path / "set", tokenizer).summary["warnings"]
    assert note in preview(DataConfig(source=str(tmp_path / "set")), tokenizer)["warnings"]


def test_a_folder_without_data_is_one_sentence(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"holds no data files"):
        prepared(tmp_path, tokenizer)


def test_splits_of_a_saved_data_set(tmp_path, tokenizer):
    import datasets

    datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_list(ROWS[:2]),
            "test": datasets.Dataset.from_list(ROWS[2:]),
        }
    ).save_to_disk(str(tmp_path / "saved"))
    assert prepared(tmp_path / "saved", tokenizer, split="test").summary["rows_read"] == 3
    with pytest.raises(
        DataError, match=r"saved has no split dev; it has train, test, set data\.split"
    ):
        prepared(tmp_path / "saved", tokenizer, split="dev")


def test_a_split_that_a_saved_data_set_or_a_folder_cannot_have_is_told(tmp_path, tokenizer):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    lines(tmp_path / "folder" / "a.jsonl", ROWS)
    for place in ("saved", "folder"):
        found = prepared(tmp_path / place, tokenizer, split="dev").summary
        assert "data.split dev is not used: the folder has no splits." in found["warnings"]


def test_maps_are_objects_as_in_other_files(tmp_path, tokenizer):
    turn = pa.map_(pa.string(), pa.string())
    talks = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "hello"}]] * 2
    pairs = [[list(each.items()) for each in talk] for talk in talks]
    table = pa.table({"messages": pa.array(pairs, pa.list_(turn))})
    parquet.write_table(table, tmp_path / "maps.parquet")
    lines(tmp_path / "objects.jsonl", [{"messages": talk} for talk in talks])
    found, expected = (
        prepared(tmp_path / name, tokenizer).train.ids.tolist()
        for name in ("maps.parquet", "objects.jsonl")
    )
    assert found == expected


def test_a_map_in_place_of_a_text_is_refused_for_what_it_is(tmp_path, tokenizer):
    kind = pa.map_(pa.string(), pa.string())
    table = pa.table({"prompt": pa.array([[("a", "b")]], kind), "completion": ["hello"]})
    parquet.write_table(table, tmp_path / "maps.parquet")
    text = r"^The column prompt in row 1 of maps\.parquet is an object, not "
    with pytest.raises(DataError, match=text):
        prepared(tmp_path / "maps.parquet", tokenizer)
