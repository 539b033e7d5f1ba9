"""One conversation, as twelve programs write it, has the tokens that transformers makes of it in
the form of OpenAI, and the same answers are trained.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.errors import DataError
from tests.support import references as reference
from tests.support.rows import write_rows

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "air", "description": "Quality of the air", "parameters": SCHEMA},
}


def call(city: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "air", "arguments": {"city": city}}}


ASKED = {"role": "user", "content": "Air in Bern and Lyon?"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [call("Bern"), call("Lyon")]}
RESULTS = [{"role": "tool", "content": '{"aqi": 10}'}, {"role": "tool", "content": "72"}]
LAST = {"role": "assistant", "content": "Bern is good."}
SYSTEM = {"role": "system", "content": "Be brief."}
CANONICAL = [SYSTEM, ASKED, CALLS, *RESULTS, LAST]
BERN, LYON = (f'{{"name": "air", "arguments": {{"city": "{city}"}}}}' for city in ("Bern", "Lyon"))
TRAINED = (
    f"<tool_call>\n{BERN}\n</tool_call>\n<tool_call>\n{LYON}\n</tool_call><|im_end|>"
    "Bern is good.<|im_end|>"
)


def swift(role_of_calls: str, role_of_results: str) -> list[dict[str, Any]]:
    """The turns of ms-swift: one for each call, and one for each result."""
    return [
        SYSTEM,
        ASKED,
        {"role": role_of_calls, "content": BERN},
        {"role": role_of_calls, "content": LYON},
        *({"role": role_of_results, "content": turn["content"]} for turn in RESULTS),
        LAST,
    ]


def sharegpt(calls: str, results: str) -> list[dict[str, Any]]:
    return [
        {"from": "human", "value": ASKED["content"]},
        {"from": calls, "value": f"[{BERN}, {LYON}]"},
        *({"from": results, "value": turn["content"]} for turn in RESULTS),
        {"from": "gpt", "value": LAST["content"]},
    ]


def use(key: str, city: str, **more: str) -> dict[str, Any]:
    return {"name": "air", key: {"city": city}, **more}


PROGRAMS: dict[str, dict[str, Any]] = {
    "OpenAI": {"messages": CANONICAL, "tools": [TOOL]},
    "ms-swift": {"messages": swift("tool_call", "tool_response"), "tools": json.dumps([TOOL])},
    "ms-swift with objects": {
        "messages": [
            *(SYSTEM, ASKED),
            {"role": "tool_call", "content": use("arguments", "Bern")},
            {"role": "tool_call", "content": use("arguments", "Lyon")},
            {"role": "tool_response", "content": {"aqi": 10}},
            {"role": "tool_response", "content": "72"},
            LAST,
        ],
        "tools": [TOOL],
    },
    "LLaMA-Factory": {
        "conversations": sharegpt("function_call", "observation"),
        "system": "Be brief.",
        "tools": json.dumps([TOOL["function"]]),
    },
    "LLaMA-Factory as openai": {
        "messages": [
            *(SYSTEM, ASKED),
            {"role": "function_call", "content": f"[{BERN}, {LYON}]"},
            *({"role": "observation", "content": turn["content"]} for turn in RESULTS),
            LAST,
        ],
        "tools": [TOOL],
    },
    "capital letters and hyphens": {
        "messages": [
            {"role": "System", "content": "Be brief."},
            {"role": "Human", "content": ASKED["content"]},
            {"role": "Function-Call", "content": BERN},
            {"role": "FUNCTION_CALL", "content": LYON},
            *({"role": "Tool_Response", "content": turn["content"]} for turn in RESULTS),
            {"role": "Assistant", "content": LAST["content"]},
        ],
        "tools": [TOOL],
    },
    "torchtune": {
        "messages": [
            *(SYSTEM, ASKED, CALLS),
            *({"role": "ipython", "content": turn["content"]} for turn in RESULTS),
            {"role": "AI", "content": LAST["content"], "masked": False},
        ],
        "tools": [TOOL],
    },
    "Anthropic": {
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": ASKED["content"]}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "toolu_1", **use("input", "Bern")},
                    {"type": "tool_use", "id": "toolu_2", **use("input", "Lyon")},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": '{"aqi": 10}'}],
                    },
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": "72",
                        "is_error": False,
                    },
                ],
            },
            LAST,
        ],
        "tools": [
            {"name": "air", "description": "Quality of the air", "input_schema": SCHEMA},
        ],
    },
    "Bedrock": {
        "schemaVersion": "bedrock-conversation-2024",
        "system": [{"text": "Be brief."}, {"cachePoint": {"type": "default"}}],
        "messages": [
            {"role": "user", "content": [{"text": ASKED["content"]}]},
            {
                "role": "assistant",
                "content": [
                    {"toolUse": use("input", "Bern", toolUseId="a")},
                    {"toolUse": use("input", "Lyon", toolUseId="b")},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"toolResult": {"toolUseId": "a", "content": [{"json": {"aqi": 10}}]}},
                    {"toolResult": {"toolUseId": "b", "content": [{"text": "72"}]}},
                ],
            },
            {"role": "assistant", "content": [{"text": LAST["content"]}]},
        ],
        "toolConfig": {
            "tools": [
                {
                    "toolSpec": {
                        "name": "air",
                        "description": "Quality of the air",
                        "inputSchema": {"json": SCHEMA},
                    }
                }
            ]
        },
    },
    "Gemini": {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": ASKED["content"]}]},
            {
                "role": "model",
                "parts": [{"functionCall": use("args", city)} for city in ("Bern", "Lyon")],
            },
            {
                "role": "tool",
                "parts": [{"functionResponse": {"name": "air", "response": {"aqi": 10}}}],
            },
            {"role": "function", "parts": [{"functionResponse": {"name": "air", "response": 72}}]},
            {"role": "model", "parts": [{"text": LAST["content"]}]},
        ],
        "tools": [{"functionDeclarations": [TOOL["function"]]}],
    },
    "Cohere": {
        "messages": [
            {"role": "System", "message": "Be brief."},
            {"role": "User", "message": ASKED["content"]},
            CALLS,
            *({"role": "TOOL", "content": turn["content"]} for turn in RESULTS),
            {"role": "Chatbot", "message": LAST["content"]},
        ],
        "tools": [TOOL],
    },
    "calls within <function>": {
        "messages": [
            *(SYSTEM, ASKED),
            {"role": "assistant", "tool_calls": [use("parameters", "Bern"), call("Lyon")]},
            *RESULTS,
            LAST,
        ],
        "system_instruction": "Never used, since the turns have their own.",
        "tools": {"tools": [TOOL]},
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return reference.tokenizer("qwen")


def prepared(path, tokenizer, *rows, **changes):
    write_rows(path, rows)
    config = DataConfig(source=str(path), packing=False, eval_fraction=0.0, shuffle=False)
    return prepare_data(config.__class__(**{**vars(config), **changes}), tokenizer, 1)


def trained_text(data, tokenizer) -> str:
    return tokenizer.decode(data.train.ids[data.train.loss_mask].tolist())


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_conversation_of_any_program_is_that_of_openai(tmp_path, tokenizer, program):
    data = prepared(tmp_path / "a.jsonl", tokenizer, PROGRAMS[program])
    expected = tokenizer.apply_chat_template(CANONICAL, tools=[TOOL])["input_ids"]
    assert data.train.ids.tolist() == expected
    assert trained_text(data, tokenizer) == TRAINED


def test_an_answer_and_the_calls_behind_it_are_one_answer(tmp_path, tokenizer):
    shown = {"role": "assistant", "content": "I look."}
    rows = {"messages": [ASKED, shown, *swift("tool_call", "tool")[2:]], "tools": [TOOL]}
    data = prepared(tmp_path / "a.jsonl", tokenizer, rows)
    canonical = [ASKED, CALLS | shown, *RESULTS, LAST]
    expected = tokenizer.apply_chat_template(canonical, tools=[TOOL])["input_ids"]
    assert data.train.ids.tolist() == expected
    assert trained_text(data, tokenizer).startswith("I look.\n<tool_call>")


def test_what_a_tool_gave_and_what_the_user_adds_are_two_turns(tmp_path, tokenizer):
    result = {"type": "tool_result", "tool_use_id": "a", "content": "rain"}
    row = {
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", **use("input", "X")}],
            },
            {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
            LAST,
        ]
    }
    data = prepared(tmp_path / "a.jsonl", tokenizer, row)
    canonical = [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call("X")]},
        {"role": "tool", "content": "rain"},
        {"role": "user", "content": "And now?"},
        LAST,
    ]
    assert data.train.ids.tolist() == tokenizer.apply_chat_template(canonical)["input_ids"]


SYSTEMS = [
    *("system", "system_prompt", "systemPrompt", "system_instruction", "systemInstruction"),
    *("System", "system_message"),
]


@pytest.mark.parametrize("column", SYSTEMS)
@pytest.mark.parametrize(
    "value",
    ["Be brief.", ["Be brief."], [{"text": "Be brief."}], [{"type": "text", "text": "Be brief."}]],
    ids=["text", "texts", "bedrock", "anthropic"],
)
def test_a_system_column_of_any_form_is_the_system_turn(tmp_path, tokenizer, column, value):
    data = prepared(tmp_path / "a.jsonl", tokenizer, {column: value, "messages": [ASKED, LAST]})
    expected = tokenizer.apply_chat_template([SYSTEM, ASKED, LAST])["input_ids"]
    assert data.train.ids.tolist() == expected


@pytest.mark.parametrize("tools", ["null", "{}", "[]", "", " [] ", "None", [], {}, None])
def test_no_tools_are_no_tools_however_they_are_written(tmp_path, tokenizer, tools):
    rows = [{"messages": [ASKED, LAST], "tools": tools}, {"messages": CANONICAL, "tools": [TOOL]}]
    data = prepared(tmp_path / "a.jsonl", tokenizer, *rows)
    assert data.train.ids.tolist() == [
        *tokenizer.apply_chat_template([ASKED, LAST])["input_ids"],
        *tokenizer.apply_chat_template(CANONICAL, tools=[TOOL])["input_ids"],
    ]


def filled(value: Any) -> Any:
    """A value with nulls where another row has something, as `Dataset.to_json` writes it."""
    if isinstance(value, dict):
        return {key: filled(item) for key, item in value.items()} | {"another": None}
    return [filled(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("program", ["OpenAI", "Anthropic", "Bedrock", "Gemini"])
def test_nulls_that_datasets_fill_into_json_lines_are_no_arguments(tmp_path, tokenizer, program):
    row = {column: filled(value) for column, value in PROGRAMS[program].items()}
    data = prepared(tmp_path / "a.jsonl", tokenizer, row)
    expected = tokenizer.apply_chat_template(CANONICAL, tools=[TOOL])["input_ids"]
    assert data.train.ids.tolist() == expected


@pytest.mark.parametrize("reads", [{"chosen": "chosen", "rejected": "rejected"}, {}])
def test_nulls_of_chosen_answers_and_prompts_are_pruned_too(tmp_path, tokenizer, reads):
    if reads:
        row = {"prompt": [ASKED], "chosen": [CALLS], "rejected": [LAST]}
    else:
        row = {"prompt": [ASKED], "completion": [CALLS]}
    data = prepared(tmp_path / "a.jsonl", tokenizer, {k: filled(v) for k, v in row.items()})
    assert data.train.ids.tolist() == tokenizer.apply_chat_template([ASKED, CALLS])["input_ids"]


def test_a_null_within_arguments_as_json_text_is_an_argument(tmp_path, tokenizer):
    arguments = {"city": "Bern", "unit": None}
    asked = {"type": "function", "function": {"name": "air", "arguments": json.dumps(arguments)}}
    row = {"messages": [ASKED, {"role": "assistant", "tool_calls": [asked]}]}
    data = prepared(tmp_path / "a.jsonl", tokenizer, row)
    asked = {"type": "function", "function": {"name": "air", "arguments": arguments}}
    canonical = [ASKED, {"role": "assistant", "content": "", "tool_calls": [asked]}]
    assert data.train.ids.tolist() == tokenizer.apply_chat_template(canonical)["input_ids"]
    assert '"unit": null' in trained_text(data, tokenizer)


REFUSED = {
    "an unknown role": (
        [ASKED, {"role": "critic", "content": "bad"}],
        r"^The role 'critic' in turn 2 of messages in line 1 of a\.jsonl is not known; write user, "
        r"assistant, system or tool, or say what it is in data\.roles, such as critic=user",
    ),
    "a call that is none": (
        [ASKED, {"role": "tool_call", "content": "air(Bern)"}],
        r"^There is no call in turn 2 of messages .* write its content as JSON \{name, arguments\}",
    ),
    "an unknown part": (
        [ASKED, {"role": "assistant", "content": [{"guardContent": {"text": "x"}}]}],
        r"^A part in the content of turn 2 .* has no type, and its keys \(guardContent\) do not",
    ),
    "an unknown type": (
        [ASKED, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}],
        r"^A part in the content of turn 2 .* has the type 'redacted_thinking', which is not known",
    ),
    "an image of Bedrock": (
        [{"role": "user", "content": [{"image": {"format": "png"}}]}, LAST],
        r"^There is an image in the content of turn 1",
    ),
    "a result in an answer": (
        [ASKED, {"role": "assistant", "content": [{"toolResult": {"content": []}}]}],
        r"^There is a result of a tool in turn 2 .*, which is an answer",
    ),
    "a call of a user": (
        [{"role": "user", "content": "a", "tool_calls": [call("Bern")]}, LAST],
        r"^There is a call in turn 1 .*; only an answer \(assistant\) calls tools",
    ),
    "a call without name": (
        [ASKED, {"role": "assistant", "content": [{"toolUse": {"input": {}}}]}],
        r"^A call in the content of turn 2 .* has no name",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, tokenizer, name):
    messages, shown = REFUSED[name]
    with pytest.raises(DataError, match=shown):
        prepared(tmp_path / "a.jsonl", tokenizer, {"messages": messages})


def test_a_role_of_the_settings_is_what_they_say(tmp_path, tokenizer):
    row = {
        "messages": [
            {"role": "customer", "content": ASKED["content"]},
            {"role": "Agent 7", "content": LAST["content"]},
        ]
    }
    roles = ("customer=user", "Agent 7 = assistant")
    data = prepared(tmp_path / "a.jsonl", tokenizer, row, roles=roles)
    assert data.train.ids.tolist() == tokenizer.apply_chat_template([ASKED, LAST])["input_ids"]
    assert trained_text(data, tokenizer) == "Bern is good.<|im_end|>"


def test_a_role_that_the_template_knows_reaches_it_when_the_settings_name_it(tmp_path):
    llama = reference.tokenizer("llama3")
    turns = [ASKED, {"role": "critic", "content": "Be kind."}, LAST]
    data = prepared(tmp_path / "a.jsonl", llama, {"messages": turns}, roles=("critic=critic",))
    assert data.train.ids.tolist() == llama.apply_chat_template(turns)["input_ids"]
    assert "Be kind." not in trained_text(data, llama)
