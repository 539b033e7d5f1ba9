"""No row, however odd, raises anything but DataError or BrokenText."""

from __future__ import annotations

import contextlib
import datetime as dt
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config.data_settings import DataColumns, DataConfig
from engine.data.formats.all_formats import FORMATS
from engine.data.formats.choose_columns import columns_to_choose, guessed
from engine.data.formats.formats import map_columns
from engine.data.formats.values import BrokenText
from engine.data.sources.open_source import Source
from engine.errors import DataError

pytestmark = pytest.mark.computing

SOURCE = Source("a.jsonl", "line", None, lambda: iter(()))
USUAL = sorted(
    {
        name
        for made in FORMATS.values()
        for names in (*made.required.values(), *made.optional.values())
        for name in names
    }
    | {"label", "kto_tag", "images", "weight", "train", "message_id", "parent_id", "role"}
)
KEYS = [
    *("role", "from", "content", "value", "text", "type", "name", "parts", "rank", "label"),
    *("weight", "train", "loss_weight", "train_detail", "refusal", "images", "replies"),
    *("tool_calls", "function_call", "function", "arguments", "functionCall", "image_url"),
]
many = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
deep: Any = "end"
for _ in range(1000):
    deep = [deep]
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-200, 200),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.sampled_from(
        ["user", "assistant", "human", "gpt", "tool", "function_call", "model", "function"]
    ),
    st.sampled_from(['{"name": "f", "arguments": "{}"}', "[1]", "[[", "\ud800", "model_a", "tie"]),
    st.sampled_from([10**2000, deep, {"a": deep}, dt.datetime(2024, 1, 1), object(), {1: 2}]),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=2)), inner, max_size=2),
    ),
    max_leaves=12,
)
turns = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "function"])},
        optional={key: values for key in KEYS if key != "role"},
    ),
    max_size=4,
)
rows = st.dictionaries(
    st.one_of(st.sampled_from(USUAL), st.sampled_from(USUAL), st.text(max_size=3)),
    st.one_of(values, turns),
    min_size=1,
    max_size=5,
)


MANY = pytest.mark.slow("it invents 60 data sets, for some five seconds")


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
@pytest.mark.parametrize("count", [20, pytest.param(60, marks=MANY)])
def test_rows_of_any_values_are_read_or_refused_in_a_sentence(count):
    @settings(many, max_examples=count)
    @given(st.lists(rows, min_size=1, max_size=3))
    def run(found):
        try:
            columns = map_columns("auto", found, SOURCE, DataColumns())
        except DataError as error:
            assert "\n" not in str(error).replace("\\n", "")
        else:
            for row in found:
                with contextlib.suppress(DataError, BrokenText):
                    columns.example(row, "line 1")
        guessed(found)
        columns_to_choose(DataConfig(source="a"), found)

    run()


@pytest.mark.slow("it invents 30 rows for each format, for some ten seconds")
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_rows_of_any_values_under_the_usual_names_of_a_format(name):
    made = FORMATS[name]
    parts = {part: names[0] for part, names in (*made.required.items(), *made.optional.items())}
    shaped = st.fixed_dictionaries(
        {column: st.one_of(values, turns) for column in dict.fromkeys(parts.values())}
    )

    @settings(many, max_examples=30)
    @given(shaped)
    def run(row):
        with contextlib.suppress(DataError, BrokenText):
            columns = map_columns(name, [row], SOURCE, DataColumns())
            columns.example(row, "line 1")

    run()


@pytest.mark.parametrize(
    "value", [10**5000, float("nan"), deep, {"a": deep}, b"x", {1: 2}], ids=range(6)
)
def test_a_turn_with_a_value_that_no_template_can_write_is_refused_or_kept(value):
    turns = [{"role": "user", "content": "a", "key": value, "weight": value}]
    row = {"messages": turns, "weight": value, "system": value}
    columns = map_columns("messages", [row], SOURCE, DataColumns())
    with pytest.raises(DataError):
        columns.example(row, "line 1")
