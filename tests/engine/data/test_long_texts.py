"""Texts that are longer than a row: each token but the first of a text is predicted exactly once,
whatever the overlap, the file and the number of processes; and the tokens are those of the text as
a whole.
"""

from __future__ import annotations

import itertools
import json
import random
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.pages.new.data_figures import lengths_text
from engine.config.data_settings import DataConfig, DataSource
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.data.batches.rows import IGNORED
from engine.data.formats.example import Text
from engine.data.sources.text_files import CONTEXT, cut_place, passages
from engine.data.tokens.text_tokens import TextTokens, pieces
from engine.data.tokens.tokenize import Execution
from engine.errors import ConfigError
from tests.support import data_tokenizers as made

LIMIT = 16
TOKENIZERS = {
    "bytes": made.byte_level_tokenizer(),
    "trimmed": made.byte_level_tokenizer(trim_offsets=True, bos=True),
    "sentencepiece": made.sentencepiece_tokenizer(),
    "by normalizer": made.sentencepiece_tokenizer(legacy=True),
}
BOOK = "".join(
    f"Chapter {i}\n\nhello an hello, he   said {i}\n\thello é 😀日 an\r\n" + "\n" * (i % 4)
    for i in range(40)
)


def config(source, **changes):
    values = {"max_seq_len": LIMIT, "eval_fraction": 0.0, "shuffle": False, "packing": False}
    return DataConfig(source=str(source), **(values | changes))


def file_of(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode())
    return path


def book(tmp_path):
    return file_of(tmp_path / "book.txt", BOOK)


def tokens_of(text, tokenizer):
    """Returns the tokens of a text as one, with those around it, as a file of it is read."""
    ids = tokenizer(text.replace("\r\n", "\n"))["input_ids"]
    return [*ids, tokenizer.eos_token_id]


def labels_of(rows):
    """Returns the labels of all rows, in their order."""
    found = [rows.row(i).labels for i in range(len(rows))]
    return [label for labels in found for label in labels.tolist() if label != IGNORED]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("overlap", [0, 1, 5, 8])
def test_each_token_is_predicted_once_and_the_text_is_whole(tmp_path, name, overlap):
    tokenizer = TOKENIZERS[name]
    rows = prepare_data(config(book(tmp_path), overlap=overlap), tokenizer, 1).train
    whole = tokens_of(BOOK, tokenizer)
    assert labels_of(rows) == whole[1:]
    repeated = max(1, overlap)
    texts = [rows.row(i).input_ids.tolist() for i in range(len(rows))]
    assert [len(text) for text in texts[:-1]] == [LIMIT] * (len(texts) - 1)
    for before, text in itertools.pairwise(texts):
        assert text[:repeated] == before[-repeated:]
    assert texts[0] + [each for text in texts[1:] for each in text[repeated:]] == whole


def test_any_kind_of_file_and_packing_trains_the_same_tokens(tmp_path):
    tokenizer = TOKENIZERS["bytes"]
    plain = BOOK.replace("\r\n", "\n")
    line = file_of(tmp_path / "a.jsonl", json.dumps({"text": plain}) + "\n")
    pq.write_table(pa.table({"text": [plain]}), tmp_path / "a.parquet")
    wanted = tokens_of(BOOK, tokenizer)[1:]
    for path in (line, tmp_path / "a.parquet"):
        assert labels_of(prepare_data(config(path), tokenizer, 1).train) == wanted
    packed = prepare_data(config(book(tmp_path), packing=True, shuffle=True), tokenizer, 1).train
    assert sorted(labels_of(packed)) == sorted(wanted) and packed.longest == LIMIT


def test_validation_rows_and_rows_to_train_on_are_the_whole_text(tmp_path):
    tokenizer = TOKENIZERS["bytes"]
    data = prepare_data(config(book(tmp_path), eval_fraction=0.3), tokenizer, 1)
    both = labels_of(data.train) + labels_of(data.eval)
    assert sorted(both) == sorted(tokens_of(BOOK, tokenizer)[1:])
    assert 0.15 < len(data.eval) / (len(data.eval) + len(data.train)) < 0.45


def test_each_file_of_a_folder_is_a_text_of_its_own(tmp_path):
    tokenizer = TOKENIZERS["bytes"]
    texts = ["hello " * 30, " ", "an\n", "he said " * 9]
    for number, text in enumerate(texts):
        file_of(tmp_path / "books" / f"{number}.md", text)
    rows = prepare_data(config(tmp_path / "books"), tokenizer, 1).train
    wanted = [tokens_of(text, tokenizer)[1:] for text in texts if text.strip()]
    assert labels_of(rows) == [label for labels in wanted for label in labels]


@pytest.mark.slow("it starts two processes")
def test_other_processes_make_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.data.tokens.encoded._LONG_TEXT", 1000)
    tokenizer = TOKENIZERS["bytes"]
    rows = ["hello an " * 30, BOOK * 12, "an hello " * 30]
    for path in (
        file_of(tmp_path / "a.txt", BOOK * 12),
        file_of(tmp_path / "a.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows)),
    ):
        found = []
        for processes in (0, 2):
            monkeypatch.setenv("RAMSTREAM_CACHE", str(tmp_path / f"{path.suffix}-{processes}"))
            asked = config(path, eval_fraction=0.2, overlap=3)
            data = prepare_data(asked, tokenizer, 1, "", Execution(processes=processes))
            assert not data.summary["cached"]
            found.append(data.fingerprint)
        assert found[0] == found[1]


def test_a_long_text_may_be_cut_or_skipped_and_is_counted(tmp_path):
    tokenizer = TOKENIZERS["bytes"]
    rows = [{"text": "hello " * 20}, {"text": "hello an"}]
    file_of(tmp_path / "lines" / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    for number, row in enumerate(rows):
        file_of(tmp_path / "files" / f"{number}.txt", row["text"])
    for path in (tmp_path / "lines", tmp_path / "files"):
        cut = prepare_data(config(path, long_texts="cut"), tokenizer, 1)
        assert cut.summary["rows_cut"] == 1 and cut.train.row_lengths.tolist() == [LIMIT, 4]
        skip = prepare_data(config(path, long_texts="skip"), tokenizer, 1)
        assert skip.summary["skipped_because"] == {"the text is longer than data.max_seq_len": 1}
        assert skip.train.row_lengths.tolist() == [4]


@pytest.mark.parametrize("overlap", [-1, 9])
def test_an_overlap_that_leaves_too_little_is_refused(overlap):
    with pytest.raises(ConfigError, match=r"outside 0 to 8, half of data\.max_seq_len; choose"):
        config("a.txt", overlap=overlap).check()


def test_the_preview_says_how_many_rows_a_text_gives(tmp_path):
    tokenizer = TOKENIZERS["bytes"]
    path = book(tmp_path)
    rows = len(prepare_data(config(path), tokenizer, 1).train)
    shown = preview(config(path), tokenizer)
    assert shown["text_rows"] == f"The first 1 text gives {rows} rows of at most 16 tokens."
    assert lengths_text(shown).endswith(shown["text_rows"])
    assert shown["rows"][1]["documents"][0][0]["trained"] is False
    long = file_of(tmp_path / "long.txt", BOOK * 30)
    found = preview(config(long), tokenizer)["text_rows"]
    assert found.startswith("All of the text gives about ")
    about = int(found.split("about ")[1].split(" row")[0].replace(",", ""))
    assert about == pytest.approx(30 * rows, rel=0.05)
    short = file_of(tmp_path / "short.txt", "hello an")
    assert preview(config(short), tokenizer)["text_rows"] == ""
    mix = DataConfig((DataSource(str(path)), DataSource(str(short))), max_seq_len=LIMIT)
    assert preview(mix, tokenizer)["text_rows"].startswith("The first 2 texts give ")


# ---------------------------------------------------------------------- pieces of a text

WORDS = ["hello", "an", "he", "é日", "😀", "x" * 90, " ", "  ", "\n", "\n\n", ". ", "\t", "<|end|>"]


def invented(seed):
    draw = random.Random(seed)
    spaced = draw.random() < 0.7
    return "".join(
        draw.choice(WORDS) + (" " if spaced and draw.random() < 0.8 else "") for _ in range(400)
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["bytes", "trimmed"])
def test_nothing_of_a_text_is_lost_where_it_is_divided(monkeypatch, seed, name):
    """Words here may be longer than the context: then tokens may be others, but none is missing."""
    monkeypatch.setattr("engine.data.tokens.text_tokens._LONGEST_PIECE", 50)
    tokenizer, text = TOKENIZERS[name], Text(invented(seed))
    assert "".join(piece.text for piece in pieces(text)) == text.text
    (ids,) = TextTokens(tokenizer, None, LIMIT).whole([text])
    assert tokenizer.decode(ids, skip_special_tokens=False) == text.text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_those_of_the_whole_text(monkeypatch, name):
    monkeypatch.setattr("engine.data.tokens.text_tokens._LONGEST_PIECE", 90)
    tokenizer = TOKENIZERS[name]
    text = BOOK.replace("\r\n", "\n")
    texts = [text, "hello an " * 70, "日本。" * 90, "an", ""]
    found = TextTokens(tokenizer, None, LIMIT).whole([Text(text) for text in texts])
    for text, ids in zip(texts, found):
        assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_tokenizer_gets_no_long_text_even_without_a_space(monkeypatch):
    """It takes 200 bytes for each character, and some take more than linear time for a word."""
    monkeypatch.setattr("engine.data.tokens.text_tokens._LONGEST_PIECE", 90)
    monkeypatch.setattr("engine.data.tokens.text_tokens._AT_ONCE", 400)
    tokens = TextTokens(TOKENIZERS["bytes"], None, LIMIT)
    asked = []
    plain = tokens._encodings
    monkeypatch.setattr(tokens, "_encodings", lambda texts: asked.append(texts) or plain(texts))
    text = "x" * 5_000
    (ids,) = tokens.whole([Text(text)])
    assert TOKENIZERS["bytes"].decode(ids) == text
    assert max(len(each) for texts in asked for each in texts) <= 90 + 2 * CONTEXT
    assert max(map(len, asked)) <= 5


def test_a_long_text_tells_of_progress_and_can_be_given_up(tmp_path, monkeypatch):
    """Even while a single row is read, on which no helper process works."""
    monkeypatch.setattr("engine.data.tokens.text_tokens._LONGEST_PIECE", 50)
    monkeypatch.setattr("engine.data.tokens.text_tokens._AT_ONCE", 100)
    monkeypatch.setattr("engine.data.tokens.encoded._LONG_TEXT", 200)
    line = file_of(tmp_path / "a.jsonl", json.dumps({"text": BOOK}) + "\n")
    told = []

    def tell(done, total, message):
        told.append((done, total, message))
        if len(told) == 12:
            raise KeyboardInterrupt

    for processes in (0, 1):
        told.clear()
        with pytest.raises(KeyboardInterrupt):
            how = Execution(tell, processes=processes)
            prepare_data(config(line), TOKENIZERS["bytes"], 1, execution=how)
        assert set(told[-4:]) == {(0, 1, "Tokenizing a.jsonl")}


def test_a_text_ends_between_words_if_it_can():
    assert cut_place("hello an hello", 0, 12) == 8
    assert cut_place("1 1 1 1\n1 1 1", 0, 11) == 8
    assert cut_place("a, b, c, d, e", 0, 10) == 8
    assert cut_place("x" * 30, 0, 10) == 10


def test_passages_of_one_huge_line_are_the_file_and_take_little_memory(tmp_path):
    line = "wörd😀" * 400_000
    path = file_of(tmp_path / "a.txt", line)
    tracemalloc.start()
    found = total = 0
    try:
        for _, passage in passages(path, 256):
            assert line.startswith(passage["text"], total)
            assert passage.before == line[max(0, total - CONTEXT) : total]
            total += len(passage["text"])
            found += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == len(line)
    assert found > 2000
    assert peak < 12e6


def test_passages_know_their_lines_and_a_blank_file_has_none(tmp_path):
    lines = [f"line {number} of the text an hello" for number in range(1, 200)]
    path = file_of(tmp_path / "a.txt", "\n".join(lines))
    for number, passage in passages(path, LIMIT):
        first = passage["text"].lstrip("\n").split(" of ")[0]
        assert not first.startswith("line ") or first == f"line {number}"
    assert not list(passages(file_of(tmp_path / "b.txt", "\n \n"), LIMIT))


def test_token_files_hold_what_is_trained(tmp_path):
    rows = prepare_data(config(book(tmp_path), overlap=4), TOKENIZERS["bytes"], 1).train
    loss_mask = np.asarray(rows.loss_mask[:])
    assert rows.loss_tokens == int(loss_mask.sum()) == len(labels_of(rows))
