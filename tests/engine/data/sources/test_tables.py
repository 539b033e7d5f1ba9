"""What stands between the cells of a table is found, and a sheet of Excel is read as it is seen."""

from __future__ import annotations

import datetime as dt
import time
import zipfile

import pytest

from engine.config.data_settings import DataConfig
from engine.data.sources import sheet_xml
from engine.data.sources.open_source import notes_on, open_source
from engine.data.sources.tables import delimiter_of, refuse_equal_names
from engine.errors import DataError
from tests.support.data_files import as_sheets, write

DELIMITERS = {
    "a.csv": [
        ("a,b\n1,2\n", ","),
        ("price;text\n1,5;a, b\n2,5;c, d\n", ";"),  # decimal commas
        ('a;b\n"x, y, z";1\n"u, v; w";2\n', ";"),
        ('a,b\n"x; y; z",1\n"u; v; w",2\n', ","),
        ("Frage, kurz;Antwort\na;b\nc;d\n", ";"),
        ("a\tb\n1, 2\t3\n", "\t"),
        ("a|b|c\n1,2|3;4|5\n", "|"),
        ("text\nhello\nworld\n", ","),  # one column
        ("text\nhello; you\nworld\n", ","),
        ("a;b\n", ";"),  # a header alone
        ("a,b\n1,2,3\n1,2\n", ","),  # a wrong row
        ('a;b\n"over\n\nlines, many\n";2\n', ";"),
        ('"a;b","c;d"\n"1;2","3;4"\n', ","),
        ("sep=|\na|b\n1|2\n", "|"),
        ("a;b\r1;2\r3;4\r", ";"),
        ("", ","),
    ],
    "a.tsv": [
        ("a\tb\n1\t2\n", "\t"),
        ("a,b\n1,2\n", ","),
        ("a, b\tc\nx, y\tz\n", "\t"),  # both divide all rows alike
        ("text\na, b\n", "\t"),
    ],
}
CASES = [(name, *case) for name, cases in DELIMITERS.items() for case in cases]


@pytest.mark.parametrize("name, text, delimiter", CASES)
def test_the_delimiter_is_the_one_that_divides_the_header_and_the_rows_alike(
    tmp_path, name, text, delimiter
):
    assert delimiter_of(write(tmp_path / name, text)) == delimiter


def test_a_row_that_is_wrong_far_behind_does_not_change_the_delimiter(tmp_path):
    path = write(tmp_path / "a.csv", "a;b\n" + "1,0;2\n" * 5000 + "1;2;3\n")
    with pytest.raises(DataError, match=r"^Row 5001 of a\.csv has 3 cells.*texts with semicolons"):
        open_source(DataConfig(source=str(path)))


# ---------------------------------------------------------------------- Excel


def rows_of(path):
    source = open_source(DataConfig(source=str(path)), streaming=True)
    return [(source.where(number), row) for number, row in source.read()]


def test_a_cell_is_the_text_that_a_person_sees(tmp_path):
    seen = {
        "text": ("a, b\nc", "a, b\nc"),
        "whole": (7, "7"),
        "fraction": (0.1 + 0.2, "0.3"),
        "large": (123456789012, "123456789012"),
        "truth": (True, "TRUE"),
        "day": (dt.datetime(2024, 2, 1), "2024-02-01"),
        "moment": (dt.datetime(2024, 2, 1, 12, 30), "2024-02-01 12:30:00"),
        "time": (dt.time(12, 30), "12:30:00"),
        "empty": (None, ""),
        "last": ("z", "z"),
    }
    cells = [list(seen), [value for value, _ in seen.values()]]
    ((where, row),) = rows_of(write(tmp_path / "a.xlsx", as_sheets({"Only": cells})))
    assert row == {name: text for name, (_, text) in seen.items()}
    assert where == "row 2 of a.xlsx"
    assert notes_on(DataConfig(source=str(tmp_path / "a.xlsx"))) == []


def test_formats_of_numbers_are_those_of_the_sheet(tmp_path):
    import openpyxl

    workbook = openpyxl.Workbook()
    formats = ["General", "0", "0.00", "#,##0", "#,##0.0", "0%", "0.0%"]
    workbook.active.append(formats)
    workbook.active.append([1234.5678] * len(formats))
    for cell, number_format in zip(workbook.active[2], formats):
        cell.number_format = number_format
    workbook.save(tmp_path / "a.xlsx")
    ((_, row),) = rows_of(tmp_path / "a.xlsx")
    shown = ["1234.5678", "1235", "1234.57", "1,235", "1,234.6", "123457%", "123456.8%"]
    assert list(row.values()) == shown


def test_blank_rows_are_passed_over_and_rows_keep_the_numbers_of_excel(tmp_path):
    cells = [[], ["a", "b"], [], ["1", None], [None, " "], ["2", "x"]]
    rows = rows_of(write(tmp_path / "a.xlsx", as_sheets({"Only": cells})))
    assert rows == [
        ("row 4 of a.xlsx", {"a": "1", "b": ""}),
        ("row 6 of a.xlsx", {"a": "2", "b": "x"}),
    ]


def test_a_column_of_turns_is_read_as_json(tmp_path):
    cells = [["messages"], ['[{"role": "user", "content": "a"}]']]
    ((_, row),) = rows_of(write(tmp_path / "a.xlsx", as_sheets({"Only": cells})))
    assert row == {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    "cells, pattern",
    [
        ([["a", "b"], ["1", "2", "3"]], r"^Row 2 of a\.xlsx has 3 cells, but the header names 2"),
        ([["a", "a"], ["1", "2"]], r"^The header of a\.xlsx names the column a twice; "),
    ],
)
def test_a_wrong_sheet_is_one_sentence(tmp_path, cells, pattern):
    path = write(tmp_path / "a.xlsx", as_sheets({"Only": cells}))
    with pytest.raises(DataError, match=pattern):
        rows_of(path)


def test_a_sheet_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.xlsx", as_sheets({"Only": [["a"], ["1"]]}))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr("xl/bomb.xml", b" " * (2 << 20))
    monkeypatch.setattr(sheet_xml, "_LARGEST_PART", 1 << 20)
    with pytest.raises(
        DataError, match=r"^a\.xlsx is too large .* \(xl/bomb\.xml unpacks to 2 MiB"
    ):
        rows_of(path)


def test_a_header_of_very_many_columns_is_looked_through_once():
    begun = time.process_time()
    refuse_equal_names([f"c{number}" for number in range(200_000)], "a.csv")
    assert time.process_time() - begun < 5
    with pytest.raises(DataError, match=r"^The header of a\.csv names the column b twice"):
        refuse_equal_names(["a", "b", "c", "b"], "a.csv")
