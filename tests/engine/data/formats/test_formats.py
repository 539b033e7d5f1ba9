"""Each kind of row becomes an example of its format, and each kind of bad input gets one plain
sentence.
"""

from __future__ import annotations

import json

import pytest

from engine.config.data_settings import DataColumns, DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.data.formats.formats import map_columns
from engine.data.sources import hub_connection
from engine.data.sources.open_source import open_source
from engine.errors import DataError
from tests.support.rows import write_rows

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "an hello"}]
SHAREGPT = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "an hello"}]
SAME = {
    "messages": {"messages": CHAT},
    "messages in conversations": {"conversations": CHAT},
    "messages of parts": {
        "messages": [
            CHAT[0],
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "an "}, {"type": "text", "text": "hello"}],
            },
        ]
    },
    "sharegpt": {"conversations": SHAREGPT},
    "alpaca": {"instruction": "hello", "input": "", "output": "an hello"},
    "alpaca without input": {"instruction": "hello", "response": "an hello"},
    "prompt_completion": {"prompt": "hello", "completion": "an hello"},
    "prompt_completion of messages": {"prompt": CHAT[:1], "completion": CHAT[1:]},
    "question and answer": {"question": "hello", "answer": "an hello", "id": 7},
}


def config(path, **changes) -> DataConfig:
    return DataConfig(
        **{
            "source": str(path),
            "max_seq_len": 128,
            "eval_fraction": 0.0,
            "packing": False,
            **changes,
        }
    )


@pytest.mark.parametrize("name", SAME)
def test_every_format_becomes_the_same_conversation(tmp_path, tokenizer, name):
    path = write_rows(tmp_path / "rows.jsonl", [SAME[name]])
    data = prepare_data(config(path), tokenizer, 1)
    assert data.train.ids.tolist() == tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert data.summary["format"] == name.split()[0].replace("question", "prompt_completion")
    assert data.summary["format_detected"] and data.summary["columns"]
    assert set(data.summary["columns"]) | set(data.summary["unused_columns"]) == set(SAME[name])


def test_alpaca_input_and_system_columns_are_used_and_shown(tmp_path, tokenizer):
    row = {"instruction": "hello", "input": "an", "output": "he", "system": "be"}
    path = write_rows(tmp_path / "rows.jsonl", [row])
    data = prepare_data(config(path), tokenizer, 1)
    turns = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hello\n\nan"},
        {"role": "assistant", "content": "he"},
    ]
    assert data.train.ids.tolist() == tokenizer.apply_chat_template(turns)["input_ids"]
    assert data.summary["columns"] == {
        "instruction": "the prompt",
        "input": "added to the prompt",
        "output": "the answer",
        "system": "the system turn",
    }


def test_json_jsonl_parquet_and_a_folder_hold_the_same_rows(tmp_path, tokenizer):
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"prompt": f"hello {i}", "completion": f"an {i}"} for i in range(7)]
    whole = [("a.jsonl", write_rows(tmp_path / "a.jsonl", rows))]
    for name, tree in (("list.json", rows), ("under.json", {"version": 1, "data": rows})):
        (tmp_path / name).write_text(json.dumps(tree, indent=1), encoding="utf-8")
        whole.append((name, tmp_path / name))
    whole.append(("lines.json", write_rows(tmp_path / "lines.json", rows)))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    whole.append(("a.parquet", tmp_path / "a.parquet"))
    prints = {prepare_data(config(path), tokenizer, 1).fingerprint for _, path in whole}
    assert len(prints) == 1
    assert [open_source(config(path)).total for _, path in whole] == [7] * len(whole)


def test_a_folder_saved_by_datasets_is_read(tmp_path, tokenizer):
    import datasets

    rows = [{"prompt": f"hello {i}", "completion": f"an {i}"} for i in range(4)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    data = prepare_data(config(tmp_path / "saved"), tokenizer, 1)
    assert data.summary["rows_read"] == 4 and data.summary["format"] == "prompt_completion"


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    line = json.dumps(SAME["alpaca"], ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n\r\n  \n{line}\n".encode())
    assert prepare_data(config(path), tokenizer, 1).summary["rows_read"] == 2


GOOD = json.dumps(SAME["messages"])
BAD_FILES = {
    "an empty file": ("a.jsonl", "", r"^a\.jsonl is empty; "),
    "only blank lines": ("a.jsonl", "\n\n", r"^a\.jsonl has no rows\.$"),
    "an empty list": ("a.json", "[]", r"^a\.json is an empty list; "),
    "a broken line": (
        "a.jsonl",
        GOOD + '\n{"messages": [}\n',
        r'^Line 2 of a\.jsonl is not valid JSON: `{"messages": \[}`\. Fix or remove that line\.$',
    ),
    "a line that is a list": ("a.jsonl", "[1]\n", r"^Line 1 of a\.jsonl is a list, not an object"),
    "broken json": (
        "a.json",
        '[{"text": "a"},\n {"text" "b"}]',
        r"^a\.json is not valid JSON \(.* line 2, column 10\)",
    ),
    "json of a number": ("a.json", "3", r"^a\.json holds a number"),
    "an item of text": ("a.json", '[{"text": "a"}, "b"]', r"^Item 2 of a\.json is text"),
    "a suffix": ("a.docx", "x", r"^a\.docx is not a data file\. Use JSON, JSONL, CSV"),
    "a row of a table with a cell too many": (
        "a.csv",
        "text\na,b\n",
        r"^Row 1 of a\.csv has 2 cells, but the header",
    ),
    "a column twice": (
        "a.tsv",
        "text\ttext\na\tb\n",
        r"^The header of a\.tsv names the column text twice",
    ),
    "an open quote": ("a.csv", 'text\n"a\n', r"^a\.csv cannot be read after row 0"),
    "a table that is not utf-8": ("a.csv", b"text\n\xff\n", r"^Line 2 of a\.csv is not UTF-8 text"),
    "text that is not utf-8": ("a.txt", b"a\xff\n", r"^Line 1 of a\.txt is not UTF-8 text"),
    "a header alone": ("a.csv", "text\n", r"^a\.csv has a header but no rows\.$"),
    "no parquet": ("a.parquet", "PAR?", r"^a\.parquet cannot be read as Parquet"),
    "unknown columns": (
        "a.jsonl",
        '{"foo": 1, "bar": 2}\n',
        r"^The columns of a\.jsonl \(foo, bar\) fit no known format",
    ),
    "text that is a number": (
        "a.jsonl",
        '{"text": "a"}\n{"text": 3}\n',
        r"^The column text in line 2 of a\.jsonl is a number",
    ),
    "messages that are text": (
        "a.jsonl",
        '{"messages": "hi"}\n',
        r"^The column messages in line 1 of a\.jsonl is text",
    ),
    "a turn without role": (
        "a.jsonl",
        GOOD + '\n{"messages": [{"content": "a"}]}\n',
        r"^There is no role in turn 1 of messages in line 2 of a\.jsonl",
    ),
    "content that is a number": (
        "a.jsonl",
        '{"messages": [{"role": "user", "content": 3}]}\n',
        r"^The content of turn 1 of messages in line 1 of a\.jsonl is a number",
    ),
    "an image": (
        "a.jsonl",
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n',
        r"^There is an image in the content of turn 1 of messages in line 1 of a\.jsonl, but ",
    ),
    "an unknown speaker": (
        "a.jsonl",
        '{"conversations": [{"from": "narrator", "value": "a"}]}\n',
        r"^The role 'narrator' in turn 1 of conversations in line 1 of a\.jsonl is not known",
    ),
    "a missing column": (
        "a.jsonl",
        '{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n',
        r"^The column completion is missing in line 2 of a\.jsonl",
    ),
    "not utf-8": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "\xff"}\n',
        r"^Line 2 of a\.jsonl is not UTF-8",
    ),
    "only empty texts": (
        "a.jsonl",
        '{"text": " "}\n',
        r"^a\.jsonl has no token to train on: 0 of 1 rows .*the row is empty",
    ),
    "only empty answers": ("a.jsonl", '{"prompt": "a", "completion": null}\n', r"0 of 1 rows"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_input_is_one_sentence_that_names_the_place(tmp_path, tokenizer, name):
    filename, content, pattern = BAD_FILES[name]
    path = tmp_path / filename
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=pattern) as caught:
        prepare_data(config(path), tokenizer, 1)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_a_format_that_the_columns_do_not_have_is_refused_with_what_it_needs(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", [SAME["alpaca"]])
    with pytest.raises(
        DataError,
        match=r"data\.format is messages, which needs a column messages.*instruction, input",
    ):
        prepare_data(config(path, format="messages"), tokenizer, 1)


def test_a_file_or_hub_id_that_is_not_there_is_one_sentence(tokenizer, monkeypatch):
    with pytest.raises(DataError, match=r"There is no file nowhere/a\.jsonl"):
        prepare_data(config("nowhere/a.jsonl"), tokenizer, 1)
    import datasets

    def refuse(*arguments, **named):
        raise ConnectionError("Couldn't reach the hub\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    sentence = r"^This computer cannot reach Hugging Face .*, and the data set owner/name is"
    with pytest.raises(DataError, match=sentence):
        prepare_data(config("owner/name"), tokenizer, 1)
    monkeypatch.setattr(hub_connection, "why_cut_off", lambda: None)
    with pytest.raises(
        DataError,
        match=r"^The data set owner/name cannot be loaded \(Couldn't reach the hub\); check",
    ):
        prepare_data(config("owner/name"), tokenizer, 1)


def test_hub_data_sets_come_through_datasets_with_subset_and_split(tokenizer, monkeypatch):
    import datasets

    asked = []

    def load(name, subset=None, split=None, streaming=False):
        asked.append((name, subset, split, streaming))
        return datasets.Dataset.from_list([SAME["question and answer"]] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = prepare_data(config("owner/name:main", split="test"), tokenizer, 1)
    shown = preview(config("owner/name:main", split="test"), tokenizer)
    assert asked == [("owner/name", "main", "test", False), ("owner/name", "main", "test", True)]
    assert data.summary["rows_read"] == shown["rows_measured"] == 3


def test_the_format_of_a_file_is_known_by_its_first_filled_rows(tmp_path, tokenizer):
    source = open_source(
        config(
            write_rows(tmp_path / "a.jsonl", [{"conversations": []}, {"conversations": SHAREGPT}])
        )
    )
    rows = [row for _, row in source.read()]
    assert map_columns("auto", rows, source, DataColumns()).format == "sharegpt"
    data = prepare_data(config(tmp_path / "a.jsonl"), tokenizer, 1)
    assert data.summary["rows_skipped"] == 1
    assert data.summary["skipped_because"] == {"the row is empty": 1}


def test_preview_shows_the_text_and_marks_what_is_trained(tmp_path, tokenizer):
    rows = [SAME["messages"]] * 30 + [{"messages": CHAT[:1]}]
    shown = preview(config(write_rows(tmp_path / "a.jsonl", rows)), tokenizer, rows=2)
    assert shown["format"] == "messages"
    assert shown["columns"] == {"messages": "the turns of the conversation"}
    assert len(shown["rows"]) == 2
    assert shown["rows_measured"] == 31
    assert shown["rows_skipped"] == 1
    first = shown["rows"][0]
    (pieces,) = first["documents"]
    assert "".join(piece["text"] for piece in pieces) == tokenizer.apply_chat_template(
        CHAT, tokenize=False
    )
    assert [piece["text"] for piece in pieces if piece["trained"]] == ["an hello<|im_end|>"]
    assert sum(shown["histogram"]["counts"]) == len(shown["lengths"]) == 30
    assert first["tokens"] == shown["lengths"][0] and 0 < shown["percent_trained"] < 100
    assert json.loads(json.dumps(shown)) == shown


def test_a_preview_reads_no_further_than_it_shows(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", [SAME["messages"]] * 300)
    path.write_text(path.read_text() + "broken\n")
    assert preview(config(path), tokenizer)["rows_measured"] == 200
    with pytest.raises(DataError, match="Line 301"):
        prepare_data(config(path), tokenizer, 1)
