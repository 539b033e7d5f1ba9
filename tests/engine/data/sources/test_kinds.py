"""Every kind of file gives the rows and the tokens that the plain lines of JSON give, alone, in a
folder and through a registry, compressed or not, in any encoding.
"""

from __future__ import annotations

import json

import pytest

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.data.sources.folders import files_of
from engine.data.sources.open_source import notes_on, open_source
from engine.errors import DataError
from tests.support import data_files as made
from tests.support.data_files import COMPRESS, ROWS, write

TEXTS = made.texts_of(ROWS)
BINARIES = made.binaries_of(ROWS)
NOTES = {
    "semicolons.csv": "semicolons.csv is read with semicolons between the cells.",
    "excel.csv": "excel.csv is read with semicolons between the cells.",
    "tabs.csv": "tabs.csv is read with tabs between the cells.",
    "bars.csv": "bars.csv is read with bars between the cells.",
    "commas.tsv": "commas.tsv is read with commas between the cells.",
    "a.xlsx": "Of the 3 sheets of a.xlsx, only Data is read.",
}


@pytest.fixture(scope="module")
def wanted(tokenizer, tmp_path_factory):
    """The fingerprint of the tokens of `ROWS`."""
    return prepared(
        write(tmp_path_factory.mktemp("plain") / "a.jsonl", TEXTS["a.jsonl"]), tokenizer
    )


def prepared(source, tokenizer):
    config = DataConfig(source=str(source), packing=False, eval_fraction=0.1)
    data = prepare_data(config, tokenizer, 1)
    assert data.summary["rows_read"] == len(ROWS) and data.summary["rows_skipped"] == 0
    return data.fingerprint


def rows_of(path, streaming=True):
    return [row for _, row in open_source(DataConfig(source=str(path)), streaming).read()]


@pytest.mark.parametrize("name", [*TEXTS, *BINARIES])
def test_a_file_of_each_kind_is_shown_and_trained_as_its_rows(tmp_path, tokenizer, wanted, name):
    path = write(tmp_path / name, (TEXTS | BINARIES)[name])
    config = DataConfig(source=str(path))
    shown = preview(config, tokenizer)
    assert shown["rows_measured"] == len(ROWS) and shown["format"] == "prompt_completion"
    assert [note for note in shown["warnings"] if "read" in note] == [
        NOTES[note] for note in [name] if name in NOTES
    ]
    assert open_source(config).total == len(ROWS)
    assert prepared(path, tokenizer) == wanted


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("name", TEXTS)
def test_a_compressed_text_has_the_rows_of_the_plain_one(tmp_path, name, compression):
    path = write(tmp_path / (name + compression), COMPRESS[compression](TEXTS[name].encode()))
    assert rows_of(path) == rows_of(path, streaming=False) == ROWS
    assert open_source(DataConfig(source=str(path))).total == len(ROWS)


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_compressed_text_is_shown_and_trained(tmp_path, tokenizer, wanted, compression):
    content = COMPRESS[compression](TEXTS["semicolons.csv"].encode("utf-16"))
    path = write(tmp_path / f"A.CSV{compression}", content)
    note = f"A.CSV{compression} is read as UTF-16-LE."
    assert note in preview(DataConfig(source=str(path)), tokenizer)["warnings"]
    assert prepared(path, tokenizer) == wanted


@pytest.mark.parametrize("compression", COMPRESS)
def test_passages_of_a_compressed_text_are_those_of_the_plain_one(tmp_path, compression):
    text = "\n\n".join(f"{i} hällo\r\nan" * 30 for i in range(9))
    plain = rows_of(write(tmp_path / "a.md", text))
    assert "".join(row["text"] for row in plain).count("hällo\nan") == 270
    assert (
        rows_of(write(tmp_path / f"a.md{compression}", COMPRESS[compression](text.encode())))
        == plain
    )


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_a_file_of_many_blocks_and_frames_is_whole(tmp_path, compression):
    """The thread that decompresses hands on more than two blocks."""
    rows = [{"text": f"{i} " * 400} for i in range(14000)]
    content = made.as_lines(rows).encode()
    assert len(content) > 3 * (8 << 20)
    half = len(content) // 2
    frames = COMPRESS[compression](content[:half]) + COMPRESS[compression](content[half:])
    path = write(tmp_path / f"a.jsonl{compression}", frames)
    assert rows_of(path) == rows


def test_a_reader_that_stops_early_leaves_no_thread(tmp_path):
    import threading

    content = made.as_lines([{"text": "word " * 400}] * 9000).encode()
    path = write(tmp_path / "a.jsonl.gz", COMPRESS[".gz"](content))
    rows = open_source(DataConfig(source=str(path)), streaming=True).read()
    next(rows)
    assert [thread for thread in threading.enumerate() if "decompress" in thread.name]
    rows.close()
    assert not [thread for thread in threading.enumerate() if "decompress" in thread.name]


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"]
)
@pytest.mark.parametrize("name", ["a.jsonl", "list.json", "semicolons.csv", "a.txt"])
def test_an_encoding_that_is_clear_is_read_and_told(tmp_path, encoding, name):
    texts = TEXTS | {"a.txt": "hällo\n\nan 😀\n"}
    mark = b"\0\0\xfe\xff" if encoding == "utf-32-be" else b""
    path = write(tmp_path / name, mark + texts[name].encode(encoding))
    assert rows_of(path) == rows_of(write(tmp_path / "plain" / name, texts[name]))
    found = [note for note in notes_on(DataConfig(source=str(path))) if "read as UTF" in note]
    assert len(found) == (encoding != "utf-8-sig")


def test_a_folder_of_compressed_files_is_one_data_set_with_its_splits(tmp_path, tokenizer, wanted):
    folder = tmp_path / "set"
    zstd, gzip = COMPRESS[".zst"], COMPRESS[".gz"]
    write(folder / "train-00000-of-00003.jsonl.gz", gzip(made.as_lines(ROWS[:9]).encode()))
    write(folder / "train-00001-of-00003.csv.zst", zstd(made.as_table(ROWS[9:20], ";").encode()))
    write(folder / "train-00002-of-00003.arrow", made.as_arrow(ROWS[20:], is_stream=True))
    write(folder / "test.jsonl.gz", gzip(made.as_lines(ROWS[:3]).encode()))
    write(folder / "val_0.jsonlines", made.as_lines(ROWS[:2]))
    write(folder / "README.md.gz", gzip(b"about"))
    assert prepared(folder, tokenizer) == wanted
    totals = {
        split: open_source(DataConfig(source=str(folder), split=split)).total
        for split in ("train", "test", "validation")
    }
    assert totals == {"train": len(ROWS), "test": 3, "validation": 2}
    assert notes_on(DataConfig(source=str(folder))) == [
        "train-00001-of-00003.csv.zst is read with semicolons between the cells."
    ]
    assert preview(DataConfig(source=str(folder)), tokenizer)["rows"][0]["where"] == (
        "line 1 of train-00000-of-00003.jsonl.gz"
    )


def test_suffixes_of_a_kind_are_no_part_of_a_name_that_says_a_split(tmp_path):
    names = ["train_clean.jsonl.gz", "test_clean.jsonl.gz", "test-00000-of-00002.csv.zst"]
    for name in names:
        write(tmp_path / name, b"x")
    config = DataConfig(source=str(tmp_path), split="test")
    assert [path.name for path in files_of(tmp_path, config)] == sorted(names[1:])


def test_notes_on_many_files_are_few(tmp_path):
    for number in range(9):
        write(tmp_path / f"{number}.csv", "a;b\n1;2\n")
    notes = notes_on(DataConfig(source=str(tmp_path)))
    assert len(notes) == 6 and notes[-1].startswith("4 more ")


def test_a_registry_names_a_compressed_file(tmp_path, tokenizer, wanted):
    write(tmp_path / "rows.csv.gz", COMPRESS[".gz"](TEXTS["semicolons.csv"].encode()))
    columns = {"prompt": "prompt", "response": "completion"}
    registry = {"mine": {"file_name": "rows.csv.gz", "columns": columns}}
    write(tmp_path / "dataset_info.json", json.dumps(registry))
    source = f"{tmp_path / 'dataset_info.json'}:mine"
    assert prepared(source, tokenizer) == wanted
    assert "rows.csv.gz is read with semicolons between the cells." in notes_on(
        DataConfig(source=source)
    )


def test_columns_of_unequal_length_are_one_sentence(tmp_path):
    path = write(tmp_path / "a.json", json.dumps({"prompt": ["a", "b"], "completion": ["c"]}))
    with pytest.raises(DataError, match=r"^a\.json is an object of columns that have 1 to 2 cells"):
        rows_of(path)
