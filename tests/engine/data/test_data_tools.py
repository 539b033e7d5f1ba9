"""Tool calls, tools and system turns reach the chat template, in every form in which a row may
contain them.
"""

from __future__ import annotations

import json

import pytest

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.errors import DataError
from tests.support import references as reference
from tests.support.data_tokenizers import CHATML, byte_level_tokenizer
from tests.support.rows import write_rows

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TURNS = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]
SHAREGPT = [
    {"from": "human", "value": "1 + 2?"},
    {"from": "function_call", "value": json.dumps(CALL["function"])},
    {"from": "observation", "value": "3"},
    {"from": "gpt", "value": "It is 3."},
]
AS_TEXT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    ],
}
SAME = {
    "objects": {"messages": TURNS, "tools": TOOLS},
    "arguments and tools as JSON text": {
        "messages": [TURNS[0], AS_TEXT, *TURNS[2:]],
        "tools": json.dumps(TOOLS),
    },
    "bare calls": {
        "messages": [TURNS[0], {"role": "assistant", "tool_calls": [CALL["function"]]}, *TURNS[2:]],
        "tools": TOOLS,
    },
    "sharegpt": {"conversations": SHAREGPT, "tools": json.dumps(TOOLS)},
}


@pytest.fixture(scope="module")
def tokenizer():
    return reference.tokenizer("qwen")


def prepared(path, tokenizer, rows, **changes):
    write_rows(path, rows)
    return prepare_data(
        DataConfig(source=str(path), packing=False, eval_fraction=0.0, **changes), tokenizer, 1
    )


@pytest.mark.parametrize("name", SAME)
def test_tool_calls_and_tools_are_rendered_as_the_template_does(tmp_path, tokenizer, name):
    data = prepared(tmp_path / "a.jsonl", tokenizer, [SAME[name]])
    expected = tokenizer.apply_chat_template(TURNS, tools=TOOLS)["input_ids"]
    assert data.train.ids.tolist() == expected
    loss_mask = tokenizer.decode(data.train.ids[data.train.loss_mask].tolist())
    assert loss_mask == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
        "It is 3.<|im_end|>"
    )
    assert data.summary["columns"]["tools"] == "the tools that the chat template is told of"


def test_a_system_column_or_turn_and_rows_without_tools_stand_beside_each_other(
    tmp_path, tokenizer
):
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"messages": TURNS, "tools": TOOLS, "system": "Be brief."},
        {"messages": [system, TURNS[0], TURNS[3]]},
        {"messages": [TURNS[0], TURNS[3]], "tools": []},
    ]
    data = prepared(tmp_path / "a.jsonl", tokenizer, rows)
    wanted = [
        tokenizer.apply_chat_template([system, *TURNS], tools=TOOLS),
        tokenizer.apply_chat_template(rows[1]["messages"]),
        tokenizer.apply_chat_template(rows[2]["messages"]),
    ]
    assert data.train.ids.tolist() == [i for one in wanted for i in one["input_ids"]]


def test_nulls_that_parquet_fills_in_are_no_arguments(tmp_path, tokenizer):
    import pyarrow as pa
    from pyarrow import parquet

    other = {"type": "function", "function": {"name": "show", "arguments": {"text": "x"}}}
    rows = [
        {"messages": TURNS},
        {"messages": [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [other]}]},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    config = DataConfig(source=str(tmp_path / "a.parquet"), packing=False, eval_fraction=0.0)
    ids = prepare_data(config, tokenizer, 1).train.ids.tolist()
    assert ids == [
        i for row in rows for i in tokenizer.apply_chat_template(row["messages"])["input_ids"]
    ]


def test_a_template_that_knows_no_tool_calls_is_said(tmp_path):
    with pytest.raises(
        DataError, match="leaves out the tool calls of the answer.*line 1 of a.jsonl"
    ):
        prepared(tmp_path / "a.jsonl", byte_level_tokenizer(CHATML), [{"messages": TURNS[:2]}])


BAD = {
    "calls of text": (
        [{"messages": [{"role": "assistant", "content": "", "tool_calls": "add"}]}],
        r"^The tool_calls of turn 1 of messages in line 1 of a\.jsonl are text, not a list",
    ),
    "a call without name": (
        [{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]}],
        r"^A call in the tool_calls of turn 1 .* has no function name",
    ),
    "tools that are no JSON": (
        [{"messages": TURNS, "tools": "add"}],
        r"^The column tools in line 1 .* not valid JSON",
    ),
    "tools that are names": (
        [{"messages": TURNS, "tools": ["add"]}],
        r"^The column tools .* not a list of function",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tools_are_one_sentence(tmp_path, tokenizer, name):
    rows, pattern = BAD[name]
    with pytest.raises(DataError, match=pattern) as caught:
        prepared(tmp_path / "a.jsonl", tokenizer, rows)
    assert str(caught.value).endswith(".")
