"""The same rows are trained alike in whatever order they stand, into whatever files they are
divided, and in whatever kind of file: the columns are those of all rows.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import itertools
import json
import lzma
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from engine.config.data_settings import DataConfig, DataSource
from engine.config.preference_settings import read_as
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import check_first_rows, preview
from engine.data.formats.survey import survey_of
from engine.data.sources import open_source as opening
from engine.data.tokens import column_survey as columns_room
from engine.errors import DataError
from tests.support import references as reference
from tests.support.sets import slow_but

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
CALLED = {
    "messages": [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "Rain."},
    ],
    "tools": [TOOL],
}
AS_TOLD = {
    "messages": [
        CALLED["messages"][0],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
            ],
        },
        *CALLED["messages"][2:],
    ],
    "tools": [TOOL],
}
"""As chat templates are given it."""


@pytest.fixture(scope="module")
def tokenizer():
    return reference.tokenizer("qwen")


def lines(path: Path, rows: list[dict[str, Any]], opened: Any = open) -> Path:
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def config(source, **changes) -> DataConfig:
    values = {"max_seq_len": 1024, "eval_fraction": 0.0, "packing": False} | changes
    return DataConfig(source=source if isinstance(source, tuple) else str(source), **values)


def loss_mask(source, tokenizer, reads="examples", **changes) -> Counter:
    """Returns how often each example occurs: of each of its documents the tokens and marks."""
    data = prepare_data(read_as(config(source, **changes), reads), tokenizer, 1)
    rows = data.train
    documents = [
        (tuple(rows.ids[begin:end].tolist()), tuple(rows.loss_mask[begin:end].tolist()))
        for begin, end in zip(rows.starts, rows.starts[1:])
    ]
    size = 2 if reads == "pairs" else 1
    return Counter(tuple(documents[at : at + size]) for at in range(0, len(documents), size))


def as_templates_write(row: dict[str, Any], tokenizer) -> list[int]:
    """Returns the tokens of plain transformers."""
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    messages = [*system, *row["messages"]]
    written = tokenizer.apply_chat_template(messages, tools=row.get("tools"), return_dict=True)
    return written["input_ids"]


# ---------------------------------------------------------------------- what the first rows lack


@pytest.mark.parametrize("early", [0, 25])
def test_tools_of_later_rows_are_trained_with(tmp_path, tokenizer, early):
    rows = [CHAT] * early + [CALLED] * 2 + [CHAT] * (25 - early)
    found = loss_mask(lines(tmp_path / "rows.jsonl", rows), tokenizer)
    reported = [CHAT] * 25 + [AS_TOLD] * 2
    ids = Counter(tuple(as_templates_write(row, tokenizer)) for row in reported)
    assert Counter(ids_of(found)) == ids


def ids_of(found: Counter) -> Counter:
    return Counter({document[0][0]: count for document, count in found.items()})


def test_system_turns_and_inputs_of_later_rows_are_read(tmp_path, tokenizer):
    late = CHAT | {"system": "Be short."}
    found = loss_mask(lines(tmp_path / "a.jsonl", [CHAT] * 25 + [late]), tokenizer)
    assert tuple(as_templates_write(late, tokenizer)) in ids_of(found)

    pair = {"instruction": "Say it.", "output": "a"}
    rows = [pair] * 25 + [pair | {"input": "Loud."}, pair | {"history": [["Hi", "Hello"]]}]
    (tmp_path / "b.json").write_text(json.dumps(rows))
    found = ids_of(loss_mask(tmp_path / "b.json", tokenizer))
    turns = [
        {"role": "user", "content": "Say it.\n\nLoud."},
        {"role": "assistant", "content": "a"},
    ]
    assert tuple(as_templates_write({"messages": turns}, tokenizer)) in found
    turns = [*CHAT["messages"], {"role": "user", "content": "Say it."}, turns[1]]
    assert tuple(as_templates_write({"messages": turns}, tokenizer)) in found


def test_a_folder_of_chats_and_tool_chats_has_the_columns_of_both(tmp_path, tokenizer):
    lines(tmp_path / "a_chat.jsonl", [CHAT] * 25)
    lines(tmp_path / "b_tools.jsonl", [CALLED] * 25)
    found = ids_of(loss_mask(tmp_path, tokenizer))
    assert found[tuple(as_templates_write(AS_TOLD, tokenizer))] == 25


def test_a_later_column_can_be_named(tmp_path, tokenizer):
    rows = [CHAT] * 250 + [CHAT | {"mine": [TOOL]}]
    path = lines(tmp_path / "rows.jsonl", rows)
    named = config(path).columns.__class__(messages="messages", tools="mine")
    check_first_rows(config(path, columns=named))
    assert "error" not in preview(config(path, columns=named), tokenizer)
    found = ids_of(loss_mask(path, tokenizer, columns=named))
    assert tuple(as_templates_write(CHAT | {"tools": [TOOL]}, tokenizer)) in found


def test_a_class_in_a_later_row_is_known_and_a_mark_is_refused_in_any_order(tmp_path, tokenizer):
    rows = [{"prompt": "a", "completion": "b", "label": 1}] * 30
    rows.append({"prompt": "a", "completion": "b", "label": 7})
    for place, order in enumerate((rows, rows[::-1])):
        assert loss_mask(lines(tmp_path / f"{place}.jsonl", order), tokenizer).total() == 31
    marked = [{"prompt": "a", "completion": "b"}] * 30 + rows[:1]
    for place, order in enumerate((marked, marked[::-1])):
        with pytest.raises(DataError, match=r"^The column label of m\d\.jsonl marks answers"):
            loss_mask(lines(tmp_path / f"m{place}.jsonl", order), tokenizer)


def test_turns_of_two_kinds_are_read_alike_in_any_order(tmp_path, tokenizer):
    shown = {"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    rows = [CHAT] + [shown] * 30
    for place, order in enumerate((rows, rows[::-1])):
        found = ids_of(loss_mask(lines(tmp_path / f"{place}.jsonl", order), tokenizer))
        assert found == {tuple(as_templates_write(CHAT, tokenizer)): 31}


def test_the_kind_of_most_values_tells_the_format(tmp_path, tokenizer):
    """Trees of OpenAssistant, of which one row has a question, are refused by that row."""
    tree = {"role": "prompter", "text": "Hi", "replies": [{"role": "assistant", "text": "Hello"}]}
    rows = [{"prompt": "Hi"}] + [{"prompt": tree}] * 30
    for place, order in enumerate((rows, rows[::-1])):
        with pytest.raises(DataError, match=r"^There is no text in reply 0 of prompt in line \d+"):
            loss_mask(lines(tmp_path / f"{place}.jsonl", order), tokenizer)


def test_names_in_other_letters_are_chosen_alike_in_any_order(tmp_path, tokenizer):
    row = {"Prompt": "one", "PROMPT": "two", "completion": "b"}
    turned = {"completion": "b", "PROMPT": "two", "Prompt": "one"}
    found = [
        loss_mask(lines(tmp_path / f"{place}.jsonl", [each]), tokenizer)
        for place, each in enumerate((row, turned))
    ]
    assert found[0] == found[1]


def test_the_column_of_marks_is_the_same_in_any_order(tmp_path, tokenizer):
    good = {"prompt": "a", "completion": "b", "label": True}
    bad = {"prompt": "a", "completion": "c", "kto_tag": False}
    for place, rows in enumerate(([good, bad], [bad, good])):
        with pytest.raises(DataError, match=r"^The column kto_tag in line \d of \d\.jsonl marks"):
            loss_mask(lines(tmp_path / f"{place}.jsonl", rows), tokenizer, reads="labels")


# ---------------------------------------------------------------------- the same rows, laid out


def text_of(number: int, words: int) -> str:
    chosen = random.Random(number)
    return " ".join(chosen.choice(["sea", "ship", "sail", "wind", "ä b"]) for _ in range(words))


def chats(number: int) -> dict[str, Any]:
    row = json.loads(json.dumps(CALLED if number % 45 == 8 else CHAT))
    row["messages"][0]["content"] = f"{number} {text_of(number, 4)}"
    if "tools" in row:
        row["tools"] = json.dumps(row["tools"])
    if number % 48 == 6:
        row["system"] = text_of(number, 3)
    return row


def sharegpt(number: int) -> dict[str, Any]:
    shown = text_of(number, 4)
    row: dict[str, Any] = {
        "conversations": [{"from": "human", "value": shown}, {"from": "gpt", "value": f"{number}"}]
    }
    if number % 47 == 10:
        row["conversations"][1:1] = [
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": "rain"},
        ]
        row["tools"] = json.dumps([TOOL])
    return row | ({"system": text_of(number, 2)} if number % 46 == 4 else {})


def alpaca(number: int) -> dict[str, Any]:
    row: dict[str, Any] = {"instruction": text_of(number, 5), "output": f"{number}"}
    if number % 43 == 5:
        row["input"] = text_of(number + 1, 2)
    if number % 44 == 7:
        row["history"] = [["Hi", f"Hello {number}"]]
    if number % 42 == 9:
        row["system"] = text_of(number, 2)
    return row


def preferences(number: int) -> dict[str, Any]:
    row = {"prompt": text_of(number, 4), "chosen": f"yes {number}", "rejected": f"no {number}"}
    return row | ({"tools": json.dumps([TOOL])} if number % 45 == 8 else {})


def marked(number: int) -> dict[str, Any]:
    row = {"prompt": text_of(number, 4), "completion": f"{number}", "label": number % 3 == 0}
    return row | ({"system": text_of(number, 2)} if number % 41 == 11 else {})


def texts(number: int) -> dict[str, Any]:
    return {"text": f"{number} {text_of(number, 9)}"} | ({"id": number} if number > 50 else {})


def in_cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the cells of a table: lists are JSON, and what is missing is empty."""
    header = list(dict.fromkeys(name for row in rows for name in row))

    def cell(value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        return json.dumps(value)

    return header, [[cell(row.get(name)) for name in header] for row in rows]


def table(folder: Path, rows: list[dict[str, Any]], suffix: str = ".csv") -> Path:
    header, cells = in_cells(rows)
    with (folder / f"t{suffix}").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t" if suffix == ".tsv" else ",").writerows([header, *cells])
    return folder / f"t{suffix}"


def sheet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    import openpyxl

    book = openpyxl.Workbook(write_only=True)
    page = book.create_sheet()
    header, cells = in_cells(rows)
    for row in [header, *cells]:
        page.append(row)
    book.save(folder / "t.xlsx")
    return folder / "t.xlsx"


def in_arrow(folder: Path, rows: list[dict[str, Any]], kind: str) -> Path:
    names = dict.fromkeys(name for row in rows for name in row)
    whole = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    path = folder / f"t.{kind}"
    if kind == "parquet":
        parquet.write_table(whole, path, row_group_size=13)
    elif kind == "feather":
        feather.write_feather(whole, str(path))
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, whole.schema) as stream:
            stream.write_table(whole, max_chunksize=13)
    return path


def of_columns(folder: Path, rows: list[dict[str, Any]]) -> Path:
    names = dict.fromkeys(name for row in rows for name in row)
    (folder / "t.json").write_text(
        json.dumps({name: [row.get(name) for row in rows] for name in names})
    )
    return folder / "t.json"


def a_list(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "t.json").write_text(json.dumps(rows, indent=1))
    return folder / "t.json"


def as_zstd(folder: Path, rows: list[dict[str, Any]]) -> Path:
    plain = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with pa.CompressedOutputStream(str(folder / "t.jsonl.zst"), "zstd") as file:
        file.write(plain)
    return folder / "t.jsonl.zst"


def saved(folder: Path, rows: list[dict[str, Any]]) -> Path:
    import datasets

    names = dict.fromkeys(name for row in rows for name in row)
    whole = [{name: row.get(name) for name in names} for row in rows]
    datasets.Dataset.from_list(whole).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def compressed(folder: Path, rows: list[dict[str, Any]], suffix: str, opened: Any) -> Path:
    return lines(folder / f"t.jsonl{suffix}", rows, opened)


ONE_FILE = {
    "lines": lambda folder, rows: lines(folder / "t.jsonl", rows),
    "a list": a_list,
    "columns": of_columns,
    "a table": table,
    "a table with tabs": partial(table, suffix=".tsv"),
    "a sheet": sheet,
    "parquet": partial(in_arrow, kind="parquet"),
    "arrow": partial(in_arrow, kind="arrow"),
    "feather": partial(in_arrow, kind="feather"),
    "gzip": partial(compressed, suffix=".gz", opened=gzip.open),
    "bzip2": partial(compressed, suffix=".bz2", opened=bz2.open),
    "xz": partial(compressed, suffix=".xz", opened=lzma.open),
    "zstd": as_zstd,
    "saved by datasets": saved,
}
IN_FOLDERS = ("lines", "a list", "a table", "parquet", "feather", "gzip")


def divided(folder: Path, rows: list[dict[str, Any]], chosen: random.Random) -> list[Path]:
    """Writes the rows into up to five files, each of a kind of its own, and returns them."""
    borders = sorted({0, len(rows), *(chosen.randrange(1, len(rows)) for _ in range(4))})
    files = []
    for place, (begin, end) in enumerate(itertools.pairwise(borders)):
        inner = folder / f"{place}"
        inner.mkdir()
        kind = chosen.choice(IN_FOLDERS)
        # An object of columns has more than one row, and so has a list beside it.
        files.append(ONE_FILE[kind](inner, rows[begin:end]))
    return files


KINDS = {
    "chats": (chats, "examples"),
    "alpaca": (alpaca, "examples"),
    "preferences": (preferences, "pairs"),
    "marked answers": (marked, "labels"),
    "sharegpt": (sharegpt, "examples"),
    "texts": (texts, "examples"),
    "chosen answers": (preferences, "examples"),
}
MORE_KINDS = "a plain run has a kind of each reader"
PLAIN_KINDS = ("chats", "preferences", "marked answers", "texts")


@pytest.mark.slow("it writes each kind of rows into each kind of file")
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_train_the_same_tokens_in_any_layout(tmp_path, tokenizer, kind):
    made, reads = KINDS[kind]
    rows = [made(number) for number in range(100)]
    expected = loss_mask(lines(tmp_path / "rows.jsonl", rows), tokenizer, reads)
    assert expected.total() == 100 and len(expected) > 90
    for seed, (layout, written) in enumerate(ONE_FILE.items()):
        folder = tmp_path / layout
        folder.mkdir()
        order = random.Random(seed).sample(rows, len(rows))
        assert loss_mask(written(folder, order), tokenizer, reads) == expected, layout


@pytest.mark.parametrize("kind", slow_but(KINDS, PLAIN_KINDS, MORE_KINDS))
def test_the_same_rows_train_the_same_tokens_in_any_order_and_division(tmp_path, tokenizer, kind):
    made, reads = KINDS[kind]
    rows = [made(number) for number in range(100)]
    expected = loss_mask(lines(tmp_path / "rows.jsonl", rows), tokenizer, reads)
    assert expected.total() == 100 and len(expected) > 90
    for seed in range(3):
        chosen = random.Random(seed)
        order = chosen.sample(rows, len(rows))
        # The keys of each row in another order, too.
        order = [dict(chosen.sample(list(row.items()), len(row))) for row in order]
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        files = divided(folder, order, chosen)
        assert loss_mask(folder, tokenizer, reads) == expected, f"a folder, order {seed}"
        mix = tuple(DataSource(source=str(file)) for file in files)
        assert loss_mask(mix, tokenizer, reads) == expected, f"a mix, order {seed}"


# ---------------------------------------------------------------------- large files and streams


@pytest.fixture
def large(monkeypatch):
    """Every file is too large for a preview to survey."""
    monkeypatch.setattr(columns_room, "_QUICK", -1)
    monkeypatch.setattr(columns_room, "_LEAST_KEPT", 0)


def test_a_run_says_what_the_preview_of_a_large_file_could_not_show(tmp_path, tokenizer, large):
    path = lines(tmp_path / "rows.jsonl", [CHAT] * 300 + [CALLED])
    shown = preview(config(path), tokenizer)
    assert "tools" not in shown["columns"]
    assert (
        "The columns are those of the first 200 rows of rows.jsonl; a run looks at all rows first, "
        "and says what else it finds."
    ) in shown["warnings"]
    found = prepare_data(config(path), tokenizer, 1).summary
    assert "tools" in found["columns"]
    assert (
        "The column tools (the tools that the chat template is told of) is used, although the "
        "first 200 rows of rows.jsonl lack it."
    ) in found["warnings"]
    again = preview(config(path), tokenizer)
    assert "tools" in again["columns"], "the run has kept what it found"
    assert not any("first 200 rows" in warning for warning in again["warnings"])


def test_rows_are_read_once_for_their_number_and_their_columns(tmp_path, tokenizer, large, counts):
    path = lines(tmp_path / "rows.jsonl", [CHAT] * 30)
    assert columns_room.count_rows(config(path)) == 30
    assert counts == ["rows.jsonl"]
    preview(config(path), tokenizer)
    prepare_data(config(path), tokenizer, 1)
    assert counts == ["rows.jsonl"], "neither the preview nor the run read it again"
    lines(path, [CHAT] * 30 + [CALLED])
    assert "tools" in prepare_data(config(path), tokenizer, 1).summary["columns"]
    assert counts == ["rows.jsonl"] * 2, "but another content is read"


@pytest.fixture
def counts(monkeypatch):
    """The files whose columns were looked at."""
    found: list[str] = []
    surveyed = columns_room._surveyed

    def counting(source, *limits):
        found.append(source.name)
        return surveyed(source, *limits)

    monkeypatch.setattr(columns_room, "_surveyed", counting)
    return found


def test_named_columns_beyond_the_first_rows_of_a_large_file_are_there(tmp_path, tokenizer, large):
    test_a_later_column_can_be_named(tmp_path, tokenizer)


def test_a_column_that_appears_while_rows_are_read_stops_the_run(tmp_path, tokenizer, monkeypatch):
    path = lines(tmp_path / "rows.jsonl", [CHAT] * 30 + [CALLED])
    first = survey_of([CHAT])
    monkeypatch.setattr(columns_room, "_surveyed", lambda source, *limits: first)
    text = r"^The column tools first appears in line 31 of rows\.jsonl, .* data\.columns"
    with pytest.raises(DataError, match=text):
        prepare_data(config(path), tokenizer, 1)


def test_a_skimmed_row_tells_what_a_whole_one_tells(tmp_path):
    """Of long lists the first items tell the kind."""
    for made, _ in KINDS.values():
        rows = [made(number) for number in range(100)]
        for kind in ("parquet", "arrow"):
            source = opening.open_source(config(in_arrow(tmp_path, rows, kind)))
            whole = survey_of(row for _, row in source.read())
            skimmed = survey_of(row for _, row in source.skim())
            assert {name: column.kinds for name, column in whole.columns.items()} == {
                name: column.kinds for name, column in skimmed.columns.items()
            }
