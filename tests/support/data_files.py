"""Data files of every kind with the same rows, as other programs write them."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

ROWS = [{"prompt": f'say "{i}", twice; 😀', "completion": f"é {i} | !\nand on"} for i in range(40)]


def zstd(content: bytes) -> bytes:
    """As a frame of zstd."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstd,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def as_lines(rows: list[dict]) -> str:
    """One object a line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def as_table(rows: list[dict], delimiter: str) -> str:
    """A header and its rows."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def as_arrow(rows: list[dict], is_stream: bool) -> bytes:
    """As a file or a stream of Arrow, in batches of a few rows."""
    table = pa.Table.from_pylist(rows)
    sink = io.BytesIO()
    begin = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with begin(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue()


def as_feather(rows: list[dict]) -> bytes:
    """As a file of Feather, which compresses its columns."""
    from pyarrow import feather

    sink = io.BytesIO()
    feather.write_feather(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def as_parquet(rows: list[dict]) -> bytes:
    """As a file of Parquet."""
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def as_sheets(sheets: dict[str, list[list]]) -> bytes:
    """As a file of Excel: the cells of each sheet by its name. The hour of its making is left out,
    so that the same sheets make the same bytes.
    """
    import openpyxl

    workbook = openpyxl.Workbook()
    workbook.remove(workbook.active)
    for name, rows in sheets.items():
        sheet = workbook.create_sheet(name)
        for row in rows:
            sheet.append(row)
    sink, again = io.BytesIO(), io.BytesIO()
    workbook.save(sink)
    with zipfile.ZipFile(sink) as made, zipfile.ZipFile(again, "w", zipfile.ZIP_DEFLATED) as file:
        for name in made.namelist():
            content = made.read(name)
            if name == "docProps/core.xml":
                content = re.sub(rb"\d{4}-\d\d-\d\dT[\d:]+Z", b"2026-01-01T00:00:00Z", content)
            file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return again.getvalue()


def texts_of(rows: list[dict]) -> dict[str, str]:
    """The rows as a text file of each kind, by its suffix."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pandas = {name: {str(i): text for i, text in enumerate(columns[name])} for name in columns}
    return {
        "a.jsonl": as_lines(rows),
        "b.ndjson": as_lines(rows).replace("\n", "\r\n\r\n"),
        "c.jsonlines": as_lines(rows).rstrip("\n"),
        "d.json": as_lines(rows),
        "list.json": json.dumps(rows, indent=1, ensure_ascii=False),
        "within.json": json.dumps({"version": 1, "rows": rows}),
        "columns.json": json.dumps(columns),
        "pandas.json": json.dumps(pandas),
        "values.json": "\n".join(json.dumps(row, indent=2) for row in rows),
        "list.jsonl": json.dumps(rows, indent=1),
        "line.jsonl": json.dumps(rows),
        "values.jsonl": "\n".join(json.dumps(row, indent=2) for row in rows),
        "commas.csv": as_table(rows, ","),
        "semicolons.csv": as_table(rows, ";"),
        "tabs.csv": as_table(rows, "\t"),
        "bars.csv": as_table(rows, "|"),
        "tabs.tsv": as_table(rows, "\t"),
        "commas.tsv": as_table(rows, ","),
        "excel.csv": "sep=;\r\n" + as_table(rows, ";"),
    }


def binaries_of(rows: list[dict]) -> dict[str, bytes]:
    """The rows as a binary file of each kind, by its name."""
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    return {
        "a.parquet": as_parquet(rows),
        "file.arrow": as_arrow(rows, is_stream=False),
        "stream.arrow": as_arrow(rows, is_stream=True),
        "a.feather": as_feather(rows),
        "b.FEATHER": as_arrow(rows, is_stream=False),
        "a.xlsx": as_sheets({"Empty": [], "Data": cells, "More": [["a"], ["b"]]}),
    }


def write(path: Path, content: str | bytes) -> Path:
    """Writes a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
