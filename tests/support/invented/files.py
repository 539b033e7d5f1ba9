"""Files of many kinds are made of rows, and damaged as copies, crashes and editors damage them."""

from __future__ import annotations

import csv
import io
import json
from random import Random
from typing import Any

from tests.support.data_files import COMPRESS, as_arrow, as_feather, as_parquet, as_sheets

TABLES = (".csv", ".tsv", "semicolons.csv")
_DELIMITERS = {".csv": ",", ".tsv": "\t", "semicolons.csv": ";"}
_BINARY = (".parquet", ".arrow", ".feather", ".xlsx")
KINDS = (
    *(".jsonl", ".jsonl", ".jsonl", ".ndjson", ".json", "within.json", "columns.json"),
    *("indented.json", "lines.json", *TABLES, *_BINARY[:3], *_BINARY[:3], ".xlsx", ".txt"),
)
_ENCODINGS = (*["utf-8"] * 8, "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1")
DAMAGE = ("cut", "flip", "nulls", "join", "crlf", "begin", "twice", "empty")
MOVES_TEXTS = ("flip", "join", "begin")
"""In a table, this damage may move a text into the cell of another column."""


def made_file(rows: list[dict[str, Any]], kind: str, random: Random) -> tuple[str, bytes]:
    """Returns the name and the bytes of a file of these rows. Rows that a kind cannot hold become
    lines of JSON.
    """
    if kind in _BINARY:
        try:
            return f"data{kind}", _binary(rows, kind)
        except Exception:  # columns of mixed types, as pyarrow and openpyxl refuse them
            kind = ".jsonl"
    text = _text(rows, kind)
    encoding = random.choice(_ENCODINGS)
    try:
        content = text.encode(encoding)
    except UnicodeEncodeError:
        content = text.encode("utf-8", "surrogatepass")
    name = f"data{kind}"
    if random.random() < 0.15:
        ending = random.choice(sorted(COMPRESS))
        name, content = name + ending, COMPRESS[ending](content)
    return name, content


def _binary(rows: list[dict[str, Any]], kind: str) -> bytes:
    if kind == ".parquet":
        return as_parquet(rows)
    if kind == ".arrow":
        return as_arrow(rows, is_stream=len(rows) % 2 == 0)
    if kind == ".feather":
        return as_feather(rows)
    names = _names(rows)
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    return as_sheets({"Data": [names, *cells]})


def _text(rows: list[dict[str, Any]], kind: str) -> str:
    if kind in TABLES:
        return _table(rows, _DELIMITERS[kind])
    if kind == ".txt":
        return "\n\n".join(str(value) for row in rows for value in row.values())
    if kind == ".json":
        return json.dumps(rows)
    if kind == "within.json":
        return json.dumps({"version": 1, "rows": rows})
    if kind == "columns.json":
        return json.dumps({name: [row.get(name) for row in rows] for name in _names(rows)})
    if kind == "indented.json":
        return json.dumps(rows, indent=2)
    return "".join(json.dumps(row) + "\n" for row in rows)


def _table(rows: list[dict[str, Any]], delimiter: str) -> str:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter)
    names = _names(rows)
    writer.writerow(names)
    writer.writerows([[_cell(row.get(name)) for name in names] for row in rows])
    return file.getvalue()


def _names(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(value: Any) -> Any:
    """Returns a value as a program writes it into a cell."""
    if isinstance(value, dict | list):
        return json.dumps(value)
    return value if value is None or isinstance(value, str | bool | float) else str(value)


def damaged(content: bytes, how: str, random: Random) -> bytes:
    """Returns a file's bytes with this damage."""
    place = random.randint(0, len(content))
    if how == "cut":
        return content[:place]
    if how == "nulls":
        return content[:place] + bytes(random.choice((1, 7, 4096)))
    if how == "join":
        return content.replace(b"\n", b"", random.randint(1, 3))
    if how == "crlf":
        return content.replace(b"\n", b"\r\n")
    if how == "begin":
        return (
            random.choice((b"\n\n", b"\xff\xfe", b"PK\x03\x04", b"<!DOCTYPE html>", b"\x00"))
            + content
        )
    if how == "twice":
        return content + content
    if how == "empty":
        return random.choice((b"", b"\n", b" ", b"[]", b"{}", b"null", b"\xef\xbb\xbf"))
    changed = bytearray(content)
    for _ in range(random.randint(1, 4)):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)
