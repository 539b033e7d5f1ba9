"""Small files that unpack to more than anybody can read are told of in seconds, in one sentence."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import random
import time
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from engine.config.data_settings import DataConfig
from engine.data.batches import preview as previews
from engine.data.batches.preview import read_parts
from engine.data.sources import (
    bounded_lines,
    excel,
    json_files,
    json_text,
    memory_bound,
    parquet_sizes,
    sheet_xml,
    tables,
)
from engine.data.sources.open_source import notes_on, open_source
from engine.data.sources.parquet_sizes import rows_at_once
from engine.errors import DataError
from tests.support.data_files import as_sheets, write

MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
HEAD = "".join(
    f'<row r="{number}">'
    + "".join(f'<c t="inlineStr"><is><t>{text}</t></is></c>' for text in texts)
    + "</row>"
    for number, texts in enumerate((("prompt", "completion"), ("a", "b")), 1)
)
SHARED = (
    b'<Override PartName="/xl/sharedStrings.xml" ContentType="application/vnd.openxmlformats-'
    b'officedocument.spreadsheetml.sharedStrings+xml"/>'
)
SECONDS = 5.0
"""A preview of any of these files takes less of a core's time."""


def first_rows(path):
    """Reads what a preview reads; returns its rows, or the sentence that refuses the file."""
    config = DataConfig(source=str(path))
    began = time.process_time()
    try:
        (part,) = read_parts(config, 5)
        notes_on(config)
        return part
    except DataError as error:
        return str(error)
    finally:
        assert time.process_time() - began < SECONDS


def with_sheet(path: Path, rows: str | bytes, texts: bytes = b"") -> Path:
    """Writes a file of Excel whose one sheet has this XML in place of its rows."""
    path.write_bytes(as_sheets({"Only": [["a"]]}))
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as whole:
        parts = {name: whole.read(name) for name in whole.namelist()}
    content = rows.encode() if isinstance(rows, str) else rows
    begin = f'<worksheet xmlns="{MAIN}"><sheetData>'.encode()
    parts["xl/worksheets/sheet1.xml"] = begin + content + b"</sheetData></worksheet>"
    if texts:
        parts["xl/sharedStrings.xml"] = f'<sst xmlns="{MAIN}">'.encode() + texts + b"</sst>"
        kinds = parts["[Content_Types].xml"].replace(b"</Types>", SHARED + b"</Types>")
        parts["[Content_Types].xml"] = kinds
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, part in parts.items():
            made.writestr(name, part)
    return path


# ---------------------------------------------------------------------- sheets


def test_a_cell_beyond_any_table_is_refused_with_its_row_and_column(tmp_path):
    cell = '<row r="{0}"><c r="{1}{0}" t="inlineStr"><is><t>x</t></is></c></row>'
    for row, column in ((99_999_999_999, "A"), (1_048_577, "B"), (3, "ZZZ")):
        path = with_sheet(tmp_path / "a.xlsx", HEAD + cell.format(row, column))
        shown = first_rows(path)
        assert shown.startswith(f"Row {row:,} of a.xlsx has text in column ")
        assert "1,048,576 rows and 16,384 columns" in shown


def test_blank_cells_far_to_the_right_are_no_cells(tmp_path):
    blank = "".join(f'<row r="{row}"><c r="XFD{row}"/></row>' for row in range(3, 20_003))
    rows = first_rows(with_sheet(tmp_path / "a.xlsx", HEAD + blank)).rows
    assert [row for _, row, _ in rows] == [{"prompt": "a", "completion": "b"}]


def test_the_size_that_a_sheet_says_is_not_asked_of_it(tmp_path, monkeypatch):
    """openpyxl reads the whole sheet for it, where it comes late."""
    path = with_sheet(tmp_path / "a.xlsx", HEAD)
    monkeypatch.delattr("openpyxl.worksheet._reader.WorkSheetParser.parse_dimensions")
    assert len(first_rows(path).rows) == 1


@pytest.mark.slow("a sheet of a million cells, which takes a second")
def test_a_row_of_millions_of_cells_is_refused(tmp_path):
    path = with_sheet(tmp_path / "a.xlsx", f"{HEAD}<row>{'<c/>' * 1_100_000}</row>")
    shown = first_rows(path)
    assert shown.startswith(
        "a.xlsx is too large for a file of Excel (row 3 has more than 64 MiB or"
    )
    assert shown.endswith("; save it as .csv.")


def test_blank_rows_without_end_are_refused(tmp_path, monkeypatch):
    path = with_sheet(tmp_path / "a.xlsx", HEAD + "<row/>" * 5000)
    assert len(first_rows(path).rows) == 1
    monkeypatch.setattr(sheet_xml, "MOST_ROWS", 1000)
    assert "a sheet has more than 1,000 rows" in first_rows(path)


def test_blank_cells_without_end_are_refused(tmp_path, monkeypatch):
    path = with_sheet(tmp_path / "a.xlsx", HEAD + f"<row>{'<c/>' * 1000}</row>" * 100)
    assert len(first_rows(path).rows) == 1
    monkeypatch.setattr(excel, "MOST_BLANK", 100_000)
    assert first_rows(path).startswith("a.xlsx has 0 MiB of blank cells up to row ")


def test_a_text_in_every_cell_of_a_row_counts_each_time(tmp_path):
    texts = b"<si><t>" + b"x" * (1 << 20) + b"</t></si>"
    rows = HEAD + '<row r="3">' + '<c t="s"><v>0</v></c>' * 70 + "</row>"
    path = with_sheet(tmp_path / "a.xlsx", rows, texts)
    shown = first_rows(path)
    assert shown.startswith("Row 3 of a.xlsx has more than 64 MiB of text, most of it in column 1;")


def test_texts_without_end_are_refused(tmp_path, monkeypatch):
    path = with_sheet(tmp_path / "a.xlsx", HEAD, b"<si/>" * 2000)
    monkeypatch.setattr(sheet_xml, "_MOST_TEXTS", 1000)
    assert "it has more than 1,000 texts" in first_rows(path)


def test_styles_without_end_are_refused(tmp_path):
    path = with_sheet(tmp_path / "a.xlsx", HEAD)
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as whole:
        parts = {name: whole.read(name) for name in whole.namelist()}
    parts["xl/styles.xml"] = f'<styleSheet xmlns="{MAIN}"><fonts>'.encode() + b"<font/>" * (1 << 20)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, part in parts.items():
            made.writestr(name, part)
    assert "xl/styles.xml has more than 524,288 tags" in first_rows(path)


def test_a_cell_of_many_pages_is_read(tmp_path):
    rows = HEAD + f'<row><c t="inlineStr"><is><t>{"word " * 2_000_000}</t></is></c></row>'
    found = first_rows(with_sheet(tmp_path / "a.xlsx", rows)).rows
    assert len(found[1][1]["prompt"]) == 10_000_000


# ---------------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("begin", "line", "column"),
    [('a,"b\n', 2, 2), ('x,y\nlong,"short"\n"b\n', 4, 1)],
)
def test_a_quote_that_never_ends_is_named(tmp_path, monkeypatch, begin, line, column):
    monkeypatch.setattr(tables, "LONGEST_LINE", 1 << 20)
    content = f"prompt,completion\n{begin}".encode() + b"a line of text\n" * 200_000
    shown = first_rows(write(tmp_path / "a.csv.gz", gzip.compress(content)))
    assert shown.startswith(f"The row of a.csv.gz that begins in line {line} is longer than 1 MiB,")
    assert f"most of it in column {column}; end the double quote that begins there" in shown


def test_a_cell_of_a_table_that_has_many_lines_is_read(tmp_path):
    text = "a line of text\n" * 100_000
    path = write(tmp_path / "a.csv", f'prompt,completion\n"{text}",b\nc,d\n')
    rows = [row for _, row in open_source(DataConfig(source=str(path))).read()]
    assert [len(row["prompt"]) for row in rows] == [len(text), 1]


def test_blank_lines_without_end_are_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' + b"\n" * 5000))
    assert len(first_rows(path).rows) == 1
    monkeypatch.setattr(bounded_lines, "MOST_BLANK", 1000)
    assert first_rows(path).startswith("a.jsonl.gz has 1,000 blank lines up to line 1,002;")


def wide(path: Path, columns: int) -> Path:
    """Writes a file with one row of many columns."""
    names = [f"c{number}" for number in range(columns)]
    if path.name.endswith(".csv.gz"):
        table = f"{','.join(names)}\n{','.join('x' for _ in names)}\n"
        return write(path, gzip.compress(table.encode()))
    if path.name.endswith(".jsonl"):
        return write(path, json.dumps(dict.fromkeys(names, 1)) + "\n")
    if path.name.endswith(".xlsx"):
        return write(path, as_sheets({"Only": [names, ["x"] * columns]}))
    parquet.write_table(pa.table({name: [1] for name in names}), path)
    return path


@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl", "a.xlsx", "a.parquet"])
def test_a_row_of_very_many_columns_is_refused(tmp_path, name):
    assert len(first_rows(wide(tmp_path / name, 4096)).rows) == 1
    shown = first_rows(wide(tmp_path / name, 4097))
    assert f" of {name} has 4,097 columns, and a row has at most 4,096; keep those " in shown


def test_a_preview_reads_no_further_rows_once_they_are_long(tmp_path, monkeypatch):
    monkeypatch.setattr(previews, "_MOST_CHARACTERS", 10_000)
    path = write(tmp_path / "a.jsonl", (json.dumps({"text": "x" * 4000}) + "\n") * 100)
    part = first_rows(path)
    assert len(part.rows) == 3 and part.has_more
    path = write(tmp_path / "b.jsonl", json.dumps({"messages": [{"role": ""}] * 400}) + "\n" * 9)
    assert len(first_rows(path).rows) == 1


# ---------------------------------------------------------------------- one value of JSON

ROW = b'{"prompt": "a", "completion": "b"}'
TOO_LARGE = " is one object that is too large for a row; write a list of objects, one for each row."
PACKED = {
    ".gz": gzip.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def packed(path: Path, content: bytes) -> Path:
    return write(path, PACKED[path.suffix](content))


@pytest.mark.parametrize("suffix", PACKED)
def test_an_object_with_a_list_without_end_is_refused(tmp_path, monkeypatch, suffix):
    path = packed(tmp_path / f"a.json{suffix}", b'{"a": [' + b"1," * 5000 + b'1], "b": [1]}')
    assert "cells; write as many for each column" in first_rows(path)
    monkeypatch.setattr(json_files, "_MOST_CELLS", 1000)
    assert first_rows(path) == path.name + TOO_LARGE


@pytest.mark.slow("the first three of a hundred million items are read, for three seconds")
def test_a_list_of_a_hundred_million_items_takes_seconds(tmp_path):
    million = gzip.compress(b"1," * 1_000_000)
    content = gzip.compress(b'{"a": [') + million * 100 + gzip.compress(b"1]}")
    path = write(tmp_path / "a.json.gz", content)
    assert path.stat().st_size < 1 << 20
    assert first_rows(path) == path.name + TOO_LARGE


def test_a_window_of_gigabytes_is_refused(tmp_path):
    """A frame of Zstandard says how much of what came before it needs (RFC 8878, 3.1.1.1.2)."""
    rows = b"[" + ROW + b"]"
    block = ((len(rows) << 3) | 1).to_bytes(3, "little") + rows  # raw, and the last one
    path = tmp_path / "a.json.zst"
    for log, refused in ((17, False), (31, True)):
        path.write_bytes(MAGIC["zstd"] + bytes((0, (log - 10) << 3)) + block)
        found = first_rows(path)
        if refused:
            assert found.startswith("a.json.zst is damaged (") and "memory" in found
        else:
            assert [row for _, row, _ in found.rows] == [json.loads(ROW)]


def test_members_without_end_are_refused(tmp_path, monkeypatch):
    path = packed(tmp_path / "a.json.gz", b"{" + b'"a": 1,' * 5000 + b'"b": 1}')
    assert len(first_rows(path).rows) == 1
    monkeypatch.setattr(json_files, "_MOST_MEMBERS", 1000)
    assert first_rows(path) == path.name + TOO_LARGE


def test_white_space_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(json_text, "LONGEST_VALUE", 8 << 20)
    path = packed(tmp_path / "a.json.gz", b"[" + b" \n" * (5 << 20) + ROW + b"]")
    assert first_rows(path).startswith("a.json.gz is not valid JSON (more than 8 MiB of white ")


def rows_of(path: Path) -> list[dict[str, object]]:
    return [row for _, row in open_source(DataConfig(source=str(path)), counted=False).read()]


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('{"data": %s}', None),
        ('{"version": 1, "few": [1, 2], "data": %s, "more": [1, 2], "end": {"a": [1]}}', None),
        ('{"data": %s, "other": [{"prompt": "c"}]}', "other"),
        ('{"data": %s, "turns": [{"role": "user", "content": "c"}]}', "turns"),
        ('{"data": %s, "names": %s}', "names"),
        ('{"names": %s, "data": %s}', "data"),
    ],
)
def test_rows_in_a_large_object_are_read_and_what_follows_is_looked_at(
    tmp_path, monkeypatch, text, refused
):
    """The lists of a small object tell together what its rows are. Of a large one, the end is
    looked at once the rows are read.
    """
    monkeypatch.setattr(json_files, "_MOST_OBJECTS", 100)
    row = ROW.decode()
    lists = [json.dumps([json.loads(row)] * 500)]
    if text.count("%s") == 2:
        names = json.dumps(["x"] * 500)
        lists = [names, *lists] if text.startswith('{"names') else [*lists, names]
    path = packed(tmp_path / "a.json.gz", (text % tuple(lists)).encode())
    assert len(first_rows(path).rows) == 200
    if refused is None:
        assert rows_of(path) == [json.loads(row)] * 500
        return
    with pytest.raises(DataError, match=f"several lists of as many items .* '{refused}'"):
        rows_of(path)


# ---------------------------------------------------------------------- columns of a dictionary


def of_one_text(path: Path, size: int) -> pa.Table:
    """Writes a file of Parquet in which 5,000 rows have the same text of this size."""
    text = pa.array(["x" * size])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), text)
    table = pa.table({"text": column})
    options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30, "store_schema": False}
    parquet.write_table(table, path, **options)
    assert path.stat().st_size < 4096
    return table


def test_rows_of_a_long_text_are_read_few_at_once(tmp_path):
    of_one_text(tmp_path / "a.parquet", 2 << 20)
    group = parquet.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0)
    assert group.total_byte_size < 1 << 22, "the sizes that the file tells hide it"
    with (tmp_path / "a.parquet").open("rb") as file:
        assert rows_at_once(group, file, "a.parquet") == 255


@pytest.mark.slow("hundreds of megabytes are decoded, for seconds")
def test_a_dictionary_of_one_long_text_is_read_a_few_rows_at_a_time(tmp_path):
    """A kilobyte of Parquet that pyarrow would read as 80 gigabytes at once."""
    table = of_one_text(tmp_path / "a.parquet", 16 << 20)
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    before = pa.default_memory_pool().bytes_allocated()
    for name in ("a.parquet", "a.arrow"):
        rows = open_source(DataConfig(source=str(tmp_path / name)), streaming=True).read()
        found = list(itertools.islice(rows, 2))
        assert [len(row["text"]) for _, row in found] == [16 << 20] * 2
        assert pa.default_memory_pool().bytes_allocated() - before < 1 << 30
        rows.close()


def test_a_row_that_may_be_larger_than_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_sizes, "_MOST_BYTES", 1 << 20)
    table = pa.table({"text": ["x" * (4 << 20)]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    shown = first_rows(tmp_path / "a.parquet")
    assert shown.startswith("a.parquet has rows that may take 4 MiB each, and a row has at most")


def test_rows_of_ordinary_columns_are_read_a_thousand_at_once(tmp_path):
    rows = [{"text": f"row {number}", "more": [1.5] * 8} for number in range(3000)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    group = parquet.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0)
    with (tmp_path / "a.parquet").open("rb") as file:
        assert rows_at_once(group, file, "a.parquet") == 1024


# ---------------------------------------------------------------------- decompressed pages, batches

WHOLE = 987_656
"""Bytes of the one long text in the files below, when it is not compressed."""


def a_length_replaced(path: Path, before: bytes, after: bytes) -> None:
    """Writes another length over the one place of a file that has this length."""
    content = path.read_bytes()
    assert content.count(before) == 1, content.count(before)
    path.write_bytes(content.replace(before, after))


MAGIC = {"zstd": b"\x28\xb5\x2f\xfd", "lz4": b"\x04\x22\x4d\x18"}


def stated(number: int, compression: str) -> bytes:
    """Returns how a compressed buffer of so many bytes begins."""
    return number.to_bytes(8, "little") + MAGIC[compression]


def of_a_long_text(path: Path, kind: str, compression: str, in_dictionary: bool) -> Path:
    """Writes a file or a stream of Arrow whose text of `WHOLE` bytes says that it has 40 GiB."""
    table = pa.table({"text": pa.array(["x" * WHOLE])})
    if in_dictionary:
        table = pa.table({"text": table["text"].dictionary_encode()})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with getattr(pa.ipc, f"new_{kind}")(str(path), table.schema, options=options) as writer:
        writer.write_table(table)
    assert path.stat().st_size < 16_384
    a_length_replaced(path, stated(WHOLE, compression), stated(40 << 30, compression))
    return path


@pytest.mark.parametrize("in_dictionary", [False, True], ids=["of rows", "of a dictionary"])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_batch_that_decompresses_to_more_than_the_memory_is_refused(
    tmp_path, kind, compression, in_dictionary
):
    shown = first_rows(of_a_long_text(tmp_path / "a.arrow", kind, compression, in_dictionary))
    assert shown.startswith("a.arrow has a batch of rows that takes 40.0 GiB of memory when it is")
    assert shown.endswith("; write the file again with fewer rows in each batch, or as Parquet.")


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_later_batch_is_refused_when_its_turn_comes(tmp_path, kind):
    table = pa.table({"text": ["short"] * 9 + ["x" * WHOLE]})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    path = tmp_path / "a.arrow"
    with getattr(pa.ipc, f"new_{kind}")(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=5)
    source = open_source(DataConfig(source=str(path)), streaming=True)
    assert sum(1 for _ in source.read()) == 10
    before = stated(WHOLE + 4 * len("short"), "zstd")
    a_length_replaced(path, before, stated(40 << 30, "zstd"))
    rows = open_source(DataConfig(source=str(path)), streaming=True).read()
    assert [row["text"] for _, row in itertools.islice(rows, 5)] == ["short"] * 5
    with pytest.raises(DataError, match="takes 40.0 GiB of memory"):
        next(rows)


def test_dictionaries_that_grow_count_together(tmp_path, monkeypatch):
    path, made = tmp_path / "a.arrow", []
    options = pa.ipc.IpcWriteOptions(compression="zstd", emit_dictionary_deltas=True)
    schema = pa.schema({"text": pa.dictionary(pa.int32(), pa.string())})
    with pa.ipc.new_stream(str(path), schema, options=options) as writer:
        for number in range(8):
            made.append(chr(97 + number) * WHOLE)
            column = pa.DictionaryArray.from_arrays(pa.array([number], pa.int32()), pa.array(made))
            writer.write_batch(pa.record_batch([column], schema))
    monkeypatch.setattr(memory_bound, "_ALWAYS_READ", 0)
    monkeypatch.setattr(memory_bound, "_USUAL_BYTES", 5 * WHOLE)
    rows = open_source(DataConfig(source=str(path)), streaming=True).read()
    assert [row["text"][:1] for _, row in itertools.islice(rows, 4)] == ["a", "b", "c", "d"]
    with pytest.raises(DataError, match="takes 5 MiB of memory"):
        next(rows)


def test_what_an_honest_program_compresses_is_read_whatever_its_size(tmp_path, monkeypatch):
    """A batch beyond the usual bound, of texts that are hardly compressed."""
    monkeypatch.setattr(memory_bound, "_ALWAYS_READ", 0)
    monkeypatch.setattr(memory_bound, "_USUAL_BYTES", 1 << 10)
    texts = [random.Random(number).randbytes(300).hex() for number in range(200)]
    table = pa.table({"text": texts})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema, options=options) as writer:
        writer.write_table(table)
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    for name in ("a.arrow", "a.parquet"):
        rows = open_source(DataConfig(source=str(tmp_path / name)), streaming=True).read()
        assert [row["text"] for _, row in rows] == texts


def varint(number: int) -> bytes:
    """Returns a number as the footer has it."""
    number *= 2
    parts = []
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def with_false_footer(path: Path) -> Path:
    """Makes the footer of a file of Parquet say that nothing in it is large."""
    group = parquet.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(place) for place in range(group.num_columns)]
    found = {group.total_byte_size, *(column.total_uncompressed_size for column in columns)}
    content = path.read_bytes()
    begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = content[begin:]
    for large in found:
        length = len(varint(large))
        small = 1 << 7 * (length - 1)  # the least that is written as long
        assert varint(large) in footer and len(varint(small)) == length
        footer = footer.replace(varint(large), varint(small))
    path.write_bytes(content[:begin] + footer)
    again = parquet.ParquetFile(path).metadata.row_group(0)
    assert again.total_byte_size < group.total_byte_size // 3
    return path


PLAIN = {"compression": "zstd", "use_dictionary": False}


def test_pages_that_together_decompress_to_more_than_the_memory_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({f"text {at}": ["x" * WHOLE] for at in range(40)}), path, **PLAIN)
    with_false_footer(path)
    assert len(first_rows(path).rows[0][1]) == 40
    monkeypatch.setattr(memory_bound, "_ALWAYS_READ", 0)
    monkeypatch.setattr(memory_bound, "_USUAL_BYTES", 16 << 20)
    shown = first_rows(path)
    assert shown.startswith("a.parquet has a page for each column that takes 38 MiB of memory when")
    assert shown.endswith("; write the file again with smaller pages (data page size).")


@pytest.mark.parametrize("options", [PLAIN, {**PLAIN, "data_page_version": "2.0"}], ids=["1", "2"])
def test_rows_are_limited_by_the_pages_and_not_by_what_the_footer_says(
    tmp_path, monkeypatch, options
):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [*["short"] * 10_000, *["x" * WHOLE] * 10]})
    options = {**options, "write_batch_size": 1, "data_page_size": 1 << 16}
    parquet.write_table(table, path, **options)
    with_false_footer(path)
    group = parquet.ParquetFile(path).metadata.row_group(0)
    with path.open("rb") as file:
        assert rows_at_once(group, file, "a.parquet") == 1024
        monkeypatch.setattr(parquet_sizes, "_MOST_BYTES", 4 << 20)
        # Four of the long texts, each of which has a page, are in any place that they can be in.
        assert rows_at_once(group, file, "a.parquet") == 4
    rows = open_source(DataConfig(source=str(path)), streaming=True).read()
    assert sum(1 for _ in rows) == 10_010


def test_texts_that_repeat_what_was_before_them_may_be_as_long_as_their_page(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    encoding = {"column_encoding": {"text": "DELTA_BYTE_ARRAY"}, "data_page_size": 1 << 24}
    texts = ["x" * WHOLE + str(number) for number in range(3)]
    parquet.write_table(pa.table({"text": texts}), path, **PLAIN, **encoding)
    group = parquet.ParquetFile(path).metadata.row_group(0)
    monkeypatch.setattr(parquet_sizes, "_MOST_BYTES", 2 << 20)
    with path.open("rb") as file:
        assert rows_at_once(group, file, "a.parquet") == 2
