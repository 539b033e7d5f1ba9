"""JSON files are read piece by piece: the rows equal those that `json.loads` gives for the whole
file, but take only the memory of one item.
"""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.sources import json_files, json_text
from engine.data.sources.json_files import item_rows, line_rows
from engine.errors import DataError

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=9)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
rows = st.lists(st.dictionaries(st.text(max_size=5), values, max_size=4), min_size=1, max_size=6)
styles = st.sampled_from([{}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}])
examples = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True)
def few_bytes_at_a_time(monkeypatch):
    monkeypatch.setattr(json_text, "_CHUNK_BYTES", 3)


def read(path):
    found = item_rows(path)
    return None if found is None else [row for _, row in found()]


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_lists_and_lists_within_objects_are_what_the_whole_file_says(tmp_path):
    path = tmp_path / "a.json"

    @examples
    @given(
        rows,
        styles,
        st.sampled_from(["", "\ufeff", " \n"]),
        st.dictionaries(st.text(max_size=5), values, max_size=3),
    )
    def run(wanted, style, before, beside):
        path.write_text(before + json.dumps(wanted, **style), encoding="utf-8")
        assert read(path) == wanted
        tree = beside | {"rows": wanted} | {"after": 1}
        path.write_text(before + json.dumps(tree, **style), encoding="utf-8")
        lists = [value for value in tree.values() if isinstance(value, list) and value]
        if sum(isinstance(value[0], dict) for value in lists) > 1:
            assert read(path) == [tree]
        else:
            assert read(path) == wanted

    run()


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_whatever_json_refuses_is_one_sentence_at_the_same_place(tmp_path):
    path = tmp_path / "a.json"

    @examples
    @given(rows, styles, st.data())
    def run(wanted, style, data):
        text = json.dumps({"rows": wanted} if data.draw(st.booleans()) else wanted, **style)
        place = data.draw(st.integers(1, len(text) - 1))
        text = (
            text[:place]
            + data.draw(st.sampled_from(["", "x", "}", "]", ",", '"', "\n", "1"]))
            + text[place + data.draw(st.integers(0, 3)) :]
        )
        path.write_text(text, encoding="utf-8")
        try:
            tree = json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg == "Extra data":
                return
            with pytest.raises(DataError) as caught:
                read(path)
            place = f"at line {error.lineno}, column {error.colno}); fix the file."
            assert place in str(caught.value) or str(caught.value).startswith(
                "Item "
            )  # an item before the damaged place
        else:
            if isinstance(tree, list) and tree and all(isinstance(row, dict) for row in tree):
                assert read(path) == tree

    run()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}\n{"a": 2}\n', None),
        ('{"data": [{"a": 1}]}\n{"data": []}', None),
        ("3 4", None),
        ('{"messages": [{"a": 1}]}', [{"messages": [{"a": 1}]}]),
        ("{}", [{}]),
        ('{"a": []}', [{"a": []}]),
        ('{"a": [{"b": 1}], "a": 2}', [{"a": 2}]),
        ('{"a": 1, "a": [{"b": 1}]}', [{"b": 1}]),
        ('{"a": [1], "b": [{"c": 1}, {}]}', [{"c": 1}, {}]),
        ('{"a": [1, 2], "b": [{"c": 1}, {}]}', [{"a": 1, "b": {"c": 1}}, {"a": 2, "b": {}}]),
        (
            '{"messages": [{"role": "user", "content": "?"}], "tools": [{"type": "function"}]}',
            [
                {
                    "messages": [{"role": "user", "content": "?"}],
                    "tools": [{"type": "function"}],
                }
            ],
        ),
    ],
)
def test_other_shapes(tmp_path, text, expected):
    (tmp_path / "a.json").write_text(text)
    assert read(tmp_path / "a.json") == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[ ]", r"^a\.json is an empty list; "),
        ("tru", r"^a\.json is not valid JSON \(expecting value at line 1, column 1\)"),
        ('[{"a": 1}]\n[', r"^a\.json goes on after its list \(line 2, column 1\); "),
        ('"text"', r"^a\.json holds text; "),
        ('[{"a": 1}, [2]]', r"^Item 2 of a\.json is a list, not an object"),
        ("[" * 100_000, r"^a\.json is nested too deeply"),
        (b'[{"a": "\xff"}]', r"^Line 1 of a\.json is not UTF-8 text"),
        ('[{"a": "b', r"unterminated string starting at at line 1"),
    ],
)
def test_what_is_no_list_of_rows_is_one_sentence(tmp_path, text, sentence):
    (tmp_path / "a.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=sentence) as caught:
        read(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", ["9" * 5_000, "-" + "9" * 5_000, "[" + "9" * 5_000 + "]"])
def test_a_number_that_python_does_not_read_is_one_sentence(tmp_path, number):
    (tmp_path / "a.json").write_text(f'[{{"a": 1}},\n {{"a": {number}}}]')
    with pytest.raises(
        DataError,
        match=r"^a\.json holds a number with too many digits, in the value that begins at "
        r"line 2, column 2; write it as text\.$",
    ):
        read(tmp_path / "a.json")
    (tmp_path / "a.jsonl").write_text(f'{{"a": 1}}\n{{"a": {number}}}\n')
    with pytest.raises(
        DataError, match=r"^Line 2 of a\.jsonl holds a number with too many digits; .*that line\.$"
    ):
        list(line_rows(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("fraction", ["e-4999", ".25e-4999"])
def test_a_fraction_of_many_digits_is_read_in_any_pieces(tmp_path, monkeypatch, fraction):
    text = '[{"a": ' + "9" * 5_000 + fraction + '}, {"a": 0.' + "1" * 5_000 + "}]"
    (tmp_path / "a.json").write_text(text)
    for size in range(5_000, 5_015):
        monkeypatch.setattr(json_text, "_CHUNK_BYTES", size)
        assert read(tmp_path / "a.json") == json.loads(text)


@pytest.mark.parametrize("around", ["[{}]", '{{"version": 1, "data": [{}]}}'])
def test_a_long_list_takes_the_memory_of_an_item(tmp_path, monkeypatch, around):
    monkeypatch.setattr(json_text, "_CHUNK_BYTES", 1 << 16)
    path = tmp_path / "a.json"
    row = json.dumps({"text": "word " * 200})
    path.write_text(around.format(", ".join([row] * 10_000)))
    tracemalloc.start()
    try:
        assert sum(1 for _ in item_rows(path)()) == 10_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 20


def test_too_large_an_object_is_refused_and_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "_LONGEST_OBJECT", 50)
    monkeypatch.setattr(json_text, "LONGEST_VALUE", 50)
    (tmp_path / "a.json").write_text(json.dumps({"train": [{"a": 1}] * 9, "test": [{"a": 1}]}))
    with pytest.raises(DataError, match=r"^a\.json has several lists .* such as 'test', "):
        read(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps({"train": [1] * 99, "test": [{"a": 1}]}))
    with pytest.raises(DataError, match=r"^a\.json is one object that is too large for a row; "):
        read(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x" * 99}]))
    with pytest.raises(DataError, match=r"a value longer than .* MiB at line 1, column 2"):
        read(tmp_path / "a.json")
