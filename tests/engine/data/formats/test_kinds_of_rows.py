"""What a row says is used, named as unused, or refused by name: flags of turns, calls, preferences,
marks, images, trees, segments and tokens.
"""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from engine.config.data_settings import FORMAT_PARTS, DataColumns, DataFormat
from engine.data.formats.all_formats import FORMATS
from engine.data.formats.choose_columns import guessed
from engine.data.formats.example import Conversation, Pair, Segments, Text, Tokens
from engine.data.formats.formats import ColumnMap, map_columns
from engine.data.sources.open_source import Source
from engine.errors import DataError

SOURCE = Source("a.jsonl", "line", None, lambda: iter(()))
ASKED = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "an hello"}


def columns_of(*rows: dict[str, Any], **named: str) -> ColumnMap:
    return map_columns("auto", list(rows), SOURCE, DataColumns(**named))


def read(row: dict[str, Any], **named: str) -> Any:
    return columns_of(row, **named).example(row, "line 1 of a.jsonl")


def turns(*messages: dict[str, Any]) -> Any:
    return read({"messages": list(messages)})


def test_every_format_of_the_settings_is_there_with_its_parts():
    assert {"auto", *FORMATS} == set(get_args(DataFormat))
    for name, made in FORMATS.items():
        assert set(FORMAT_PARTS[name]) == (set() if made.is_fixed else made.parts), name


# ---------------------------------------------------------------------- flags of turns


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ({"weight": -1}, r"^The weight of turn 2 of messages in line 1 of a\.jsonl is -1; write 0"),
        ({"loss_weight": "0"}, r"^The loss_weight of turn 2 .* is '0'; write 0 for an answer"),
        ({"weight": float("nan")}, r"^The weight of turn 2 .* is NaN; write 0"),
        ({"weight": 1e300}, r"^The weight of turn 2 .* is 1e\+300; .* from 0\.000001 to 1,000,000"),
        ({"weight": [1]}, r"^The weight of turn 2 .* is a list; write 0"),
        ({"train": 0.5}, r"^The train of turn 2 .* is 0\.5; an answer is trained or not"),
        ({"weight": 2, "loss_weight": 3}, r"^The keys weight and loss_weight .* different"),
        ({"weight": 1, "train": False}, r"^The keys weight and train of turn 2 .* different"),
        ({"train_detail": [{"begin_offset": 0}]}, r"^The train_detail of turn 2 .* a part of the"),
        ({"images": ["a.png"]}, r"^There are images|^There is images in turn 2"),
        ({"audio": {"id": "x"}}, r"^There is a sound in turn 2"),
        ({"refusal": "no"}, r"^There are both a content and a refusal in turn 2"),
    ],
)
def test_what_cannot_be_done_with_a_turn_is_refused_by_its_key(flag, text):
    with pytest.raises(DataError, match=text):
        turns(ASKED, ANSWER | flag)


@pytest.mark.parametrize("key", ["weight", "loss_weight"])
def test_an_answer_has_the_weight_that_its_row_says_and_the_key_is_gone(key):
    found = turns(ASKED, ANSWER | {key: 0.25}, ASKED, ANSWER | {key: 3}, ASKED, ANSWER | {key: 1})
    assert found.weights == {1: 0.25, 3: 3.0} and not found.untrained
    assert found.messages == [ASKED, ANSWER] * 3
    with pytest.raises(DataError, match=rf"^The {key} of turn 1 .* is not an answer"):
        turns(ASKED | {key: 0.5}, ANSWER)


@pytest.mark.parametrize(
    ("row", "reads"),
    [
        ({"prompt": "a", "chosen": [ANSWER | {"weight": 2}], "rejected": [ANSWER]}, "pairs"),
        ({"prompt": "a", "chosen": [ANSWER], "rejected": [ANSWER | {"weight": 2}]}, "pairs"),
        ({"messages": [ASKED, ANSWER | {"weight": 2}], "label": True}, "labels"),
    ],
)
def test_answers_to_learn_preferences_from_have_no_weight(row, reads):
    columns = map_columns("auto", [row], SOURCE, DataColumns(), reads)
    with pytest.raises(DataError, match=r"^Turn 2 in line 7 has the weight 2\.0, .* count alike"):
        columns.example(row, "line 7")


def test_the_messages_of_llama_factorys_first_version_are_read():
    def part(text):
        return [{"type": "text", "value": text}]

    found = turns(
        {"role": "user", "content": part("hello"), "loss_weight": 0.0},
        {"role": "assistant", "content": part("what"), "loss_weight": 0.0},
        {"role": "user", "content": part("hello"), "loss_weight": 0.0},
        {
            "role": "assistant",
            "content": [{"type": "reasoning", "value": "hm"}, *part("an hello")],
            "loss_weight": 1.0,
        },
    )
    assert found.untrained == {1}
    assert found.messages[3] == ANSWER | {"reasoning_content": "hm"}


# ---------------------------------------------------------------------- content and calls


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
@pytest.mark.parametrize("key", ["text", "value"])
def test_parts_of_text_are_text(kind, key):
    assert turns(ASKED, ANSWER | {"content": [{"type": kind, key: "an hello"}]}).messages == [
        ASKED,
        ANSWER,
    ]


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "image"}, "an image"),
        ({"type": "image_url", "image_url": {"url": "a"}}, "an image"),
        ({"type": "input_audio", "input_audio": {}}, "a sound"),
        ({"type": "video", "video": "a.mp4"}, "a video"),
        ({"type": "text", "text": "a", "image": "a.png"}, "an image"),
    ],
)
def test_parts_that_are_no_text_are_refused_by_what_they_are(part, what):
    with pytest.raises(DataError, match=rf"^There is {what} in the content of turn 1 .*only text"):
        turns(ASKED | {"content": [part]}, ANSWER)


def test_older_calls_of_functions_are_tool_calls():
    arguments = {"city": "Oslo"}
    row = {
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "weather", "arguments": json.dumps(arguments)},
            },
            {"role": "function", "name": "weather", "content": "rain"},
            ANSWER,
        ],
        "functions": [{"name": "weather", "parameters": {"type": "object"}}],
    }
    found = read(row)
    called = {"name": "weather", "arguments": arguments}
    assert found.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": called}],
    }
    assert found.messages[2] == {"role": "tool", "content": "rain", "name": "weather"}
    assert found.tools == [{"type": "function", "function": row["functions"][0]}]


@pytest.mark.parametrize("quotes", [0, 1, 2, 3])
def test_arguments_that_are_json_in_json_become_the_object(quotes):
    arguments: Any = {"a": "1"}
    for _ in range(quotes):
        arguments = json.dumps(arguments)
    call = {"function": {"name": "add", "arguments": arguments}}
    (made,) = turns(ASKED, ANSWER | {"tool_calls": [call]}).messages[1]["tool_calls"]
    assert made["function"]["arguments"] == {"a": "1"}


# ---------------------------------------------------------------------- preferences and marks

DIALOGUE = "\n\nHuman: one\n\nAssistant: two\n\nHuman: hello\n\nAssistant: "
TURNS = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, ASKED]
PREFERENCES = {
    "texts": {"prompt": "hello", "chosen": "an hello", "rejected": "no"},
    "alpaca": {"instruction": "hello", "input": "", "chosen": "an hello", "rejected": "no"},
    "turns": {"chosen": [ASKED, ANSWER], "rejected": [ASKED, ANSWER | {"content": "no"}]},
    "turns and the prompt again": {
        "prompt": "hello",
        "chosen": [ASKED, ANSWER],
        "rejected": [ASKED, ANSWER | {"content": "no"}],
    },
    "one turn behind a conversation": {
        "conversations": [{"from": "human", "value": "hello"}],
        "chosen": {"from": "gpt", "value": "an hello"},
        "rejected": {"from": "gpt", "value": "no"},
    },
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_of_a_preference_the_chosen_answer_alone_is_trained(name):
    columns = columns_of(PREFERENCES[name])
    assert columns.format == "preference"
    assert columns.notes == (
        "Only the chosen answers (column chosen) are trained; the rejected ones are not used.",
    )
    found = columns.example(PREFERENCES[name], "line 1")
    turns = found.conversation() if isinstance(found, Pair) else found
    assert turns == Conversation([ASKED, ANSWER], 1)


def test_the_texts_of_hh_rlhf_are_conversations_with_older_turns_as_context():
    row = {"chosen": f"{DIALOGUE}an hello", "rejected": f"{DIALOGUE}no"}
    assert read(row) == Conversation([*TURNS, ANSWER], 3)


def test_an_answer_without_its_question_is_refused():
    with pytest.raises(DataError, match="has no prompt before its answer"):
        read({"chosen": "a", "rejected": "b"})
    with pytest.raises(DataError, match="is a conversation without the turns of the column prompt"):
        read({"prompt": "other", "chosen": [ASKED, ANSWER], "rejected": [ASKED, ANSWER]})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hello", "completion": "no", "label": False},
        {"prompt": "hello", "completion": "no", "label": "False"},
        {"messages": [ASKED, ANSWER], "kto_tag": "true"},
        {"instruction": "a", "output": "b", "label": 1},
        {"prompt": "a", "completion": "b", "label": "False"},  # as a table has it
        {"prompt": "a", "completion": "b", "label": "0"},
    ],
)
def test_rows_of_marked_answers_are_refused_by_what_they_are(row):
    with pytest.raises(DataError, match=r"^The column (label|kto_tag) .*marks answers as good or"):
        read(row)


def test_a_table_marks_answers_with_words_and_digits():
    rows = [{"prompt": "a", "completion": "b", "label": value} for value in ("1", "0", "")]
    with pytest.raises(DataError, match=r"^The column label .*marks answers as good or"):
        columns_of(*rows)


def test_a_label_in_words_that_is_a_class_is_no_mark():
    columns = columns_of({"prompt": "a", "completion": "b", "label": "joy"})
    assert columns.unused == ["label"]


def test_a_label_that_is_a_class_is_no_mark():
    columns = columns_of(
        {"question": "a", "answer": "b", "label": 1}, {"question": "a", "answer": "b", "label": 7}
    )
    assert columns.unused == ["label"]
    assert columns.known_columns() == {"question", "answer", "label"}


def test_a_column_of_any_name_is_named_on_one_short_line():
    rows = [{"a\nb\ud800": "x", "n" * 500: "y"}]
    with pytest.raises(DataError, match=r"\(a b\?, n{60}\) fit no known format"):
        columns_of(*rows)


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("images", ["a.png"], "images"),
        ("Image", {"bytes": b"x", "path": None}, "an image"),
        ("picture", {"bytes": b"x", "path": None}, "an image or a sound"),
        ("speech", {"array": [0.0], "sampling_rate": 16_000, "path": "a"}, "a sound"),
        ("video", "a.mp4", "a video"),
    ],
)
def test_a_row_with_an_image_is_refused_wherever_it_stands(column, value, what):
    columns = columns_of({"prompt": "a", "completion": "b", column: None})
    with pytest.raises(DataError, match=rf"^The column {column} in line 99 holds {what}, but only"):
        columns.example({"prompt": "a", "completion": "b", column: value}, "line 99")


@pytest.mark.parametrize(("column", "value"), [("weight", 0), ("weight", 0.5), ("train", False)])
def test_a_row_with_a_weight_of_its_own_is_refused(column, value):
    with pytest.raises(DataError, match=rf"^The column {column} in line 1 .* one weight"):
        read({"text": "a", column: value})
    assert read({"text": "a", "weight": 1}) == Text("a")


def test_of_two_models_the_winner_is_trained_and_a_tie_is_not():
    row = {
        "question_id": 1,
        "conversation_a": [ASKED, ANSWER | {"content": "no"}],
        "conversation_b": [ASKED, ANSWER],
        "winner": "model_b",
    }
    assert columns_of(row).format == "arena"
    assert read(row) == Conversation([ASKED, ANSWER])
    assert read(row | {"winner": "tie (bothbad)"}).untrained == {1}


def test_names_that_only_resemble_an_answer_are_not_guessed():
    assert guessed([{"question_id": "q", "answer_id": "a", "model_id": "m"}]) == {}


# ---------------------------------------------------------------------- other formats


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"input": "hello", "output": "an hello"}, "prompt_completion"),
        ({"Prompt": "hello", "Completion": "an hello"}, "prompt_completion"),
        ({"QUESTION": "hello", "Answer": "an hello"}, "prompt_completion"),
        ({"chat": [ASKED, ANSWER]}, "messages"),
        ({"items": [{"from": "human", "value": "hello"}]}, "sharegpt"),
        ({"conversation": {"role": ["user"], "content": ["hello"]}}, "messages"),
        ({"Messages": json.dumps([ASKED, ANSWER])}, "messages"),
    ],
)
def test_columns_are_known_by_more_names(row, name):
    columns = columns_of(row)
    found = columns.example(row, "line 1")
    assert columns.format == name and columns.unused == []
    question = found.prompt if isinstance(found, Pair) else found.messages[0]["content"]
    assert question == "hello"


@pytest.mark.parametrize(
    "row", [{"items": [{"id": 1}]}, {"input": 1, "output": 2}, {"contents": ["a"]}]
)
def test_a_name_that_says_little_counts_only_with_values_that_fit(row):
    with pytest.raises(DataError, match="fit no known format"):
        columns_of(row)


def test_a_history_is_turns_before_the_question():
    row = {"instruction": "hello", "output": "an hello", "history": [["one", "two"]]}
    assert read(row) == Conversation([*TURNS, ANSWER])
    assert read(row | {"history": []}) == Pair("hello", "an hello", separator="\n\n")


def test_gemini_calls_functions():
    row = {
        "contents": [
            {"role": "user", "parts": [{"text": "hello"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": 1}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"b": 2}}}]},
            {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "an hello"}]},
        ],
        "systemInstruction": {"parts": [{"text": "be"}]},
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]}],
    }
    found = read(row)
    assert found.messages[0] == {"role": "system", "content": "be"}
    assert found.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert found.messages[3] == {"role": "tool", "content": '{"b": 2}', "name": "f"}
    assert found.messages[4] == ANSWER | {"reasoning_content": "hm"}
    assert found.tools[0]["function"]["parameters"] == {"type": "object"}
    with pytest.raises(DataError, match="an image, a sound or a file in turn 1"):
        read({"contents": [{"role": "user", "parts": [{"inlineData": {"data": "x"}}]}]})


def test_of_a_tree_the_best_path_is_trained_and_single_turns_are_refused():
    def reply(text, role, rank=None, *replies, **more):
        return {"text": text, "role": role, "rank": rank, "replies": list(replies)} | more

    worse = reply("no", "assistant", 1)
    gone = reply("gone", "assistant", 0, deleted=True)
    best = reply("an hello", "assistant", 0, reply("more?", "prompter", None))
    row = {"message_tree_id": "t", "prompt": reply("hello", "prompter", None, worse, gone, best)}
    assert columns_of(row).format == "oasst" and read(row) == Conversation([ASKED, ANSWER])
    with pytest.raises(DataError, match=r"^A row of a\.jsonl is a single turn of a tree"):
        columns_of({"message_id": "a", "parent_id": None, "text": "hello", "role": "prompter"})


def test_segments_and_tokens_say_what_is_trained():
    pieces = [{"label": False, "text": "a"}, {"label": True, "text": "b"}]
    assert read({"segments": pieces}) == Segments((("a", False), ("b", True)))
    row = {
        "input_ids": [0, 5, 6, 7],
        "labels": [-100, -100, 6, 7],
        "attention_mask": [0, 1, 1, 1],
        "assistant_masks": [0, 1, 0, 1],
    }
    assert read(row) == Tokens([5, 6, 7], [False, False, True])
    assert read({"input_ids": [5, 6]}) == Tokens([5, 6], [True, True])


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"labels": [6, 7]}, "Label 0 of labels in line 1"),
        ({"labels": [5]}, "has 1 numbers for 2 tokens"),
        ({"input_ids": [5, -1]}, "outside 0 to"),
        ({"attention_mask": [1, 2]}, "numbers several texts"),
        ({"position_ids": [0, 0]}, "holds several texts"),
    ],
)
def test_tokens_that_mean_something_else_are_refused(columns, text):
    with pytest.raises(DataError, match=text):
        read({"input_ids": [5, 6]} | columns)
