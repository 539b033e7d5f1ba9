"""What rows say of training, in the words of any program, is done or refused; a key that may say so
and is in no table stops a run until a person has looked at it.
"""

from __future__ import annotations

import itertools
import json
import pickle
import re

import pytest

from engine.config.data_settings import DataColumns, DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import check_first_rows, preview
from engine.data.formats import flags, roles
from engine.data.formats.formats import map_columns
from engine.data.formats.unknown_flags import UnknownFlags
from engine.data.sources.open_source import Source
from engine.errors import DataError
from engine.paths import PROGRAM_ROOT
from tests.support.rows import write_rows

SOURCE = Source("a.jsonl", "line", None, lambda: iter(()))
HI, BAD, MORE, GOOD = "Hello", "BAD ANSWER", "Again", "good answer"
END = "<|im_end|>"


def chat(first=None, second=None, asked=None):
    """Two answers, of which the first is bad, with more keys."""
    turns = [("user", HI, asked), ("assistant", BAD, first), ("user", MORE, asked)]
    turns.append(("assistant", GOOD, second))
    return [{"role": role, "content": text, **(more or {})} for role, text, more in turns]


def read(row, rows=(), **settings):
    columns = map_columns("auto", [row, *rows], SOURCE, DataColumns(), **settings)
    return columns.example(row, "line 1 of a.jsonl")


def config(path, rows, **values):
    write_rows(path, rows)
    settings = {"eval_fraction": 0.0, "shuffle": False, "packing": False} | values
    return DataConfig(source=str(path), **settings)


def loss_mask(found, tokenizer):
    return tokenizer.decode(found.train.ids[found.train.loss_mask].tolist())


SWITCHES = (
    *("train", "training", "trainable", "is_trainable", "train_on_turn", "train_turn", "loss"),
    *("loss_mask", "compute_loss", "calculate_loss", "use_loss", "computeLoss", "Loss"),
)
INVERSE = (
    *("masked", "is_masked", "mask_loss", "no_loss", "skip_loss", "ignore_loss", "skip"),
    *("skip_training", "no_train", "do_not_train", "dont_train", "untrained", "ignore", "ignored"),
    *("exclude", "excluded", "exclude_from_training", "exclude_from_loss", "isMasked"),
)
WEIGHTS = ("weight", "loss_weight", "loss_scale", "lossWeight")
UNTRAINED = [
    *((key, value) for key in SWITCHES for value in (False, 0)),
    *((key, value) for key in INVERSE for value in (True, 1)),
    *((key, value) for key in WEIGHTS for value in (0, 0.0)),
]
TRAINED = [
    *((key, value) for key in SWITCHES for value in (True, 1)),
    *((key, value) for key in INVERSE for value in (False, 0)),
    *((key, 1) for key in WEIGHTS),
]


def test_a_flag_of_each_program_leaves_out_the_bad_answer_alone(tmp_path, tokenizer):
    rows = [{"messages": chat({key: value})} for key, value in UNTRAINED]
    found = prepare_data(config(tmp_path / "a.jsonl", rows), tokenizer, 1)
    assert loss_mask(found, tokenizer) == f"{GOOD}{END}" * len(UNTRAINED)
    plain = tokenizer.apply_chat_template(chat())["input_ids"]
    assert found.train.ids.tolist() == plain * len(UNTRAINED)  # and the keys are gone


def test_a_flag_that_says_that_an_answer_is_trained_changes_nothing(tmp_path, tokenizer):
    rows = [{"messages": chat({key: value}, {key: value})} for key, value in TRAINED]
    found = prepare_data(config(tmp_path / "a.jsonl", rows), tokenizer, 1)
    assert loss_mask(found, tokenizer) == f"{BAD}{END}{GOOD}{END}" * len(TRAINED)


FILES = {
    "LLaMA-Factory": {
        "conversations": [
            {"from": "human", "value": HI},
            {"from": "gpt", "value": BAD, "loss": False},
            {"from": "human", "value": MORE},
            {"from": "gpt", "value": GOOD, "loss": True},
        ]
    },
    "ms-swift": {"messages": chat({"loss": False}, {"loss": True})},
    "torchtune": {"messages": chat({"masked": True}, {"masked": False}, {"masked": True})},
    "axolotl": {"messages": chat({"train": False}, {"train": True}, {"train": False})},
    "OpenAI": {"messages": chat({"weight": 0}, {"weight": 1})},
    "a mask of answers": {"messages": chat(), "loss_mask": [0, 1]},
    "a mask of turns": {"messages": chat(), "loss_mask": [0, 0, 0, 1]},
    "a mask as JSON text": {"messages": chat(), "loss_mask": "[0, 1]"},
    "flags": {"messages": chat(), "train": [False, True]},
    "what is not trained": {"messages": chat(), "masked": [True, True, True, False]},
    "the last answer alone": {"messages": chat(), "mask_history": True},
    "parts of axolotl": {
        "messages": chat(
            {"content": [{"type": "text", "text": BAD, "train": False}]},
            {"content": [{"type": "text", "text": GOOD, "weight": 1}]},
        )
    },
    "Gemini": {
        "contents": [
            {"role": "user", "parts": [{"text": HI}]},
            {"role": "model", "parts": [{"text": BAD}]},
            {"role": "user", "parts": [{"text": MORE}]},
            {"role": "model", "parts": [{"text": GOOD}]},
        ],
        "loss_mask": [0, 1],
    },
}


@pytest.mark.parametrize("program", FILES)
def test_the_bad_answer_of_each_program_is_not_trained(tmp_path, tokenizer, program):
    found = prepare_data(config(tmp_path / "a.jsonl", [FILES[program]]), tokenizer, 1)
    assert loss_mask(found, tokenizer) == f"{GOOD}{END}"
    assert found.train.ids.tolist() == tokenizer.apply_chat_template(chat())["input_ids"]
    assert not found.summary["unused_columns"]


def test_numbers_beside_the_turns_are_weights():
    assert read({"messages": chat(), "loss_weights": [0.5, 2]}).weights == {1: 0.5, 3: 2.0}
    assert read({"messages": chat({"loss": True, "loss_scale": 2.0})}).weights == {1: 2.0}


def calls(first=None, second=None, said=None):
    call = '{"name": "f", "arguments": {}}'
    turns = [{"role": "tool_call", "content": call, **(more or {})} for more in (first, second)]
    before = [{"role": "assistant", "content": "so", **said}] if said is not None else []
    return {"messages": [{"role": "user", "content": HI}, *before, *turns]}


@pytest.mark.parametrize(
    ("first", "second", "untrained"),
    [
        ({"loss": False}, None, {1}),
        ({"loss": False}, {"loss": False}, {1}),
        (None, {"loss": False}, {1}),
        ({"loss": True}, None, set()),
        (None, None, set()),
    ],
)
def test_of_calls_in_turns_of_their_own_the_first_that_says_it_decides(first, second, untrained):
    found = read(calls(first, second))
    assert found.untrained == untrained and len(found.messages[1]["tool_calls"]) == 2


REFUSED = {
    "calls that differ": (
        calls({"loss": False}, {"loss": True}),
        "The calls in turn 3 of messages",
    ),
    "a call and its answer": (calls({"loss": False}, said={}), "The calls in turn 3 of messages"),
    "a question": ({"messages": chat(asked={"loss": True})}, "The loss of turn 1 .* not an answer"),
    "a question of torchtune": (
        {"messages": chat(asked={"masked": False})},
        "The masked of turn 1 .* not an answer, .* set it to true",
    ),
    "flags that differ": (
        {"messages": chat({"loss": False, "masked": False})},
        "The keys loss and masked of turn 2 .* different",
    ),
    "a weight and a flag": (
        {"messages": chat({"loss": False, "loss_scale": 2})},
        "The keys loss_scale and loss of turn 2 .* different",
    ),
    "a number that is no flag": (
        {"messages": chat({"loss": 0.5})},
        r"The loss of turn 2 .* is 0\.5; an answer is trained or not",
    ),
    "a text": ({"messages": chat({"masked": "yes"})}, "The masked of turn 2 .* is 'yes'"),
    "a mask of three": (
        {"messages": chat(), "loss_mask": [0, 1, 1]},
        r"The column loss_mask in line 1 of a\.jsonl has 3 numbers for 4 turns, of which 2 are",
    ),
    "a mask that trains a question": (
        {"messages": chat(), "loss_mask": [1, 0, 0, 1]},
        "The column loss_mask in line 1 .* asks to train turn 1, which is not an answer",
    ),
    "a mask with something else": (
        {"messages": chat(), "loss_mask": ["a", "b"]},
        "The loss_mask of the column loss_mask .* is 'a'",
    ),
    "a mask and a flag": (
        {"messages": chat({"loss": True}), "loss_mask": [0, 1]},
        "Turn 2 in line 1 of a.jsonl and a column beside the turns say different things",
    ),
    "two columns": (
        {"messages": chat(), "loss_mask": [1, 1], "mask_history": True},
        "The columns loss_mask and mask_history in line 1 .* different things",
    ),
    "parts that differ": (
        {
            "messages": chat(
                {
                    "content": [
                        {"type": "text", "text": "so", "train": False},
                        {"type": "text", "text": " it is"},
                    ]
                }
            )
        },
        "The parts of turn 2 .* different things",
    ),
    "a mask of a pair": (
        {"prompt": "a", "completion": "b", "loss_mask": [0]},
        "The column loss_mask in line 1 .* says which answers are trained, .* conversations",
    ),
    "a row of ms-swift": (
        {"messages": chat(), "loss": False},
        "The column loss in line 1 .* false",
    ),
    "a row to skip": (
        {"prompt": "a", "completion": "b", "skip": True},
        "The column skip in line 1",
    ),
    "a scale": ({"prompt": "a", "completion": "b", "loss_scale": 0.5}, "The column loss_scale in"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_itself_or_cannot_be_done_is_refused(name):
    row, shown = REFUSED[name]
    with pytest.raises(DataError, match=f"^{shown}"):
        read(row)


def test_the_loss_of_an_evaluation_is_a_figure_and_no_flag():
    row = {"prompt": "a", "completion": "b", "loss": 2.31, "n_tokens": 1, "id": 0}
    assert read(row).completion == "b"


# ---------------------------------------------------------------------- keys that nobody knows

UNKNOWN = {
    "a column": ({"messages": chat(), "is_spam": False}, "is_spam", "line 1 of a.jsonl"),
    "a number": ({"messages": chat(), "good": 1.0}, "good", "line 1 of a.jsonl"),
    "a cell of a table": ({"prompt": "a", "completion": "b", "ok": "True"}, "ok", "line 1"),
    "a turn": (
        {"messages": chat({"toxic": True})},
        "toxic",
        "turn 2 of messages in line 1 of a.jsonl",
    ),
    "yes or no": ({"prompt": "a", "completion": "b", "usable": "No"}, "usable", "line 1"),
    "a text of a turn": (
        {"messages": chat({"usable": "no"})},
        "usable",
        "turn 2 of messages in line 1 of a.jsonl",
    ),
    "false as a text of a turn": ({"messages": chat({"ok": "False"})}, "ok", "turn 2 of messages"),
    "a question": ({"messages": chat(asked={"redacted": False})}, "redacted", "turn 1 of messages"),
    "a part": (
        {"messages": chat({"content": [{"type": "text", "text": "a", "hidden": True}]})},
        "hidden",
        "turn 2 of messages",
    ),
    "a chosen answer": (
        {
            "prompt": "a",
            "chosen": [{"role": "assistant", "content": "b", "ok": 0}],
            "rejected": "c",
        },
        "ok",
        "turn 1 of chosen",
    ),
    "turns as JSON text": ({"messages": json.dumps(chat({"ok": 0}))}, "ok", "turn 2 of messages"),
    "a text": ({"text": "hello", "keep": 0}, "keep", "line 1"),
}


def without(value, key):
    """A value without the members of this name."""
    if isinstance(value, str) and value.startswith("["):
        return json.dumps(without(json.loads(value), key))
    if isinstance(value, dict):
        return {name: without(inner, key) for name, inner in value.items() if name != key}
    return [without(inner, key) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_key_that_may_be_a_flag_must_be_confirmed_once(tmp_path, tokenizer, name):
    row, key, place = UNKNOWN[name]
    text = rf"^The key {key} in {place}.* data\.unused_flags to \[{key}\] if it does not, or"
    with pytest.raises(UnknownFlags, match=text) as raised:
        read(row)
    assert raised.value.names == (key,)
    assert read(row, unused_flags=[key]) is not None
    data = config(tmp_path / "a.jsonl", [row])
    for refuses in (check_first_rows, lambda data: prepare_data(data, tokenizer, 1)):
        with pytest.raises(DataError, match=f"^The key {key}"):
            refuses(data)
    shown = preview(data, tokenizer)
    assert shown["error"].startswith(f"The key {key}") and shown["unused_flags"] == [key]
    confirmed = config(tmp_path / "b.jsonl", [row], unused_flags=(key,))
    check_first_rows(confirmed)
    plain = without(row, key)
    found = prepare_data(confirmed, tokenizer, 1)
    expected = prepare_data(config(tmp_path / "c.jsonl", [plain]), tokenizer, 1)
    assert found.train.ids.tolist() == expected.train.ids.tolist()
    assert found.train.loss_mask.tolist() == expected.train.loss_mask.tolist()
    assert preview(confirmed, tokenizer)["rows"]


def test_one_sentence_names_all_of_them():
    part = [{"type": "text", "text": "a", "hidden": True}]
    row = {"messages": chat({"toxic": True, "ok": 0, "content": part}), "spam": False}
    text = r"\(and so may toxic, ok, hidden\).* \[spam, toxic, ok, hidden\]"
    with pytest.raises(UnknownFlags, match=text) as one:
        read(row)
    assert one.value.names == ("spam", "toxic", "ok", "hidden")
    again = pickle.loads(pickle.dumps(one.value))
    assert (str(again), again.names) == (str(one.value), one.value.names)
    for left in ("toxic", "hidden"):
        others = [name for name in one.value.names if name != left]
        with pytest.raises(UnknownFlags, match=rf"\[{left}\]"):
            read(row, unused_flags=others)


def test_a_later_row_with_a_new_flag_stops_the_run(tmp_path, tokenizer):
    rows = [{"messages": chat()} for _ in range(700)]
    rows[650] = {"messages": chat({"hidden": True})}
    with pytest.raises(DataError, match=r"^The key hidden in the rows of a\.jsonl is true"):
        prepare_data(config(tmp_path / "a.jsonl", rows), tokenizer, 1)


@pytest.mark.parametrize(
    "columns",
    [
        {"id": [0, 1], "turn_index": [1, 0], "n_tokens": [1, 1]},
        {"score": [0, 5], "kind": ["0", "7"]},
        {"temperature": [0, 1], "stream": [True, False], "parallel_tool_calls": [True, True]},
        {"label": ["joy", "0"]},
        {"remark": ["No", "nothing to add"], "verdict": ["maybe", "yes"]},
        {"empty": [None, None]},
    ],
)
def test_columns_that_count_or_hold_other_values_too_are_no_flags(columns):
    rows = [
        {"text": "a", **{name: values[place] for name, values in columns.items()}}
        for place in range(2)
    ]
    for row, others in itertools.permutations(rows):
        assert read(row, [others]).text == "a"


def test_numbers_of_turns_are_no_flags_and_later_rows_know_it():
    rows = [
        {"messages": [turn | {"stars": place, "idx": place} for place, turn in enumerate(chat())]},
        {"messages": [turn | {"stars": 1, "idx": 0} for turn in chat()]},
    ]
    columns = map_columns("auto", rows[:1], SOURCE, DataColumns())
    assert len(columns.example(rows[1], "line 2").messages) == 4


def test_a_flag_of_the_tables_may_be_said_to_be_none():
    row = {"messages": chat({"skip": True}), "ignore": True}
    with pytest.raises(DataError, match="^The column ignore"):
        read(row, unused_flags=["skip"])
    assert read(row, unused_flags=["skip", "ignore"]).untrained == frozenset()


# ---------------------------------------------------------------------- the tables of the docs


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def test_the_docs_have_every_role_and_every_flag_and_no_other():
    docs = (PROGRAM_ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:4] for line in docs.splitlines() if line.startswith("| ")]
    cells = {first.strip(): names_in(names) for first, names, *_ in rows}
    for role, names in roles.ROLES.items():
        assert cells[role] == set(names)
    assert cells["an answer of calls alone"] == set(roles.CALLS)
    assert cells["how much the answer counts"] == set(flags.WEIGHTS)
    assert cells["true: the answer is trained"] == set(flags.TRAINED)
    assert cells["true: the answer is not trained"] == set(flags.UNTRAINED)
    assert cells["a part of the turn is trained"] == set(flags.DETAILS)
    beside = docs[docs.index("Beside the turns of a conversation") :].partition("```")[0]
    assert names_in(beside) == {*flags.LISTS, *flags.LAST_ALONE, "sample_weight"}
