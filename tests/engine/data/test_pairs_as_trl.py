"""Pairs and answers with marks have the tokens that TRL's trainers give them, and what is summed is
what they sum: everything behind the prompt.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.config.data_settings import DataConfig
from engine.config.preference_settings import PreferenceConfig, read_as
from engine.data.loader import prepare_data
from tests.support.made_pairs import write_rows
from tests.support.references import tokenizer

pytest.importorskip("trl")
as_trl = pytest.importorskip("tests.support.as_trl")
pytestmark = pytest.mark.computing

TIMER = {
    "type": "function",
    "function": {
        "name": "start_timer",
        "description": "Starts a timer",
        "parameters": {"type": "object", "properties": {"minutes": {"type": "integer"}}},
    },
}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def called(minutes: int) -> list[dict]:
    """A call, what the tool said, and an answer."""
    function = {"name": "start_timer", "arguments": {"minutes": minutes}}
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": f"{minutes} minutes"},
        said(f"It rings in {minutes} minutes."),
    ]


ROWS = {
    "one turn": {"prompt": [user("Hi")], "chosen": [said("Hello")], "rejected": [said("Go away.")]},
    "system": {
        "prompt": [{"role": "system", "content": "Be kind."}, user("Hi")],
        "chosen": [said("Hello")],
        "rejected": [said("No")],
    },
    "earlier turns": {
        "prompt": [user("Hi"), said("Hello"), user("Who are you?")],
        "chosen": [said("A friend")],
        "rejected": [said("Nobody")],
    },
    "several answers": {
        "prompt": [user("Hi")],
        "chosen": [said("Hello"), user("More"), said("Sure")],
        "rejected": [said("Go"), user("More"), said("No")],
    },
    "whole conversations": {
        "chosen": [user("Hi"), said("Hello")],
        "rejected": [user("Hi"), said("What?")],
    },
}
WITH_TOOLS = {
    "tools": {
        "prompt": [user("Ten minutes, please.")],
        "chosen": called(10),
        "rejected": called(600),
        "tools": [TIMER],
    },
    "a call and none": {
        "prompt": [user("Ten minutes, please.")],
        "chosen": called(10),
        "rejected": [said("I have no clock.")],
        "tools": [TIMER],
    },
}
KINDS = [
    *((family, kind) for family in ("qwen", "llama3") for kind in ROWS),
    *(("gemma", kind) for kind in ROWS if kind != "system"),  # which its template refuses
    *(("qwen", kind) for kind in WITH_TOOLS),
]


def read(path, reads: str, family: str):
    data = read_as(DataConfig(source=str(path), eval_fraction=0.0, max_seq_len=512), reads)
    found = prepare_data(data, tokenizer(family), 1)
    found.learn(PreferenceConfig(objective="kto" if reads == "labels" else "dpo"))
    return found


def divided(line) -> tuple[list[int], list[int]]:
    """The tokens of the prompt and those that are summed, which are all behind it."""
    begin = int(np.argmax(line.answer)) + 1  # the mark stands on the token before the answer
    assert line.answer[begin - 1 : -1].all() and not line.answer[: begin - 1].any()
    ids = line.input_ids.tolist()
    return ids[:begin], ids[begin:]


@pytest.mark.parametrize("family, kind", KINDS)
def test_a_pair(tmp_path, family, kind):
    row = (ROWS | WITH_TOOLS)[kind]
    chosen, rejected = read(
        write_rows(tmp_path / "rows.jsonl", [row]), "pairs", family
    ).train.lines(0)
    expected = as_trl.tokens_of_dpo([row], tokenizer(family), tmp_path / "trl")[0]
    assert divided(chosen) == (expected["prompt_ids"], expected["chosen_ids"])
    assert divided(rejected) == (expected["prompt_ids"], expected["rejected_ids"])


@pytest.mark.parametrize("family, kind", [one for one in KINDS if one[1] != "whole conversations"])
def test_an_answer_with_a_mark(tmp_path, family, kind):
    row = (ROWS | WITH_TOOLS)[kind]
    rest = {key: value for key, value in row.items() if key in ("prompt", "tools")}
    rows = [
        rest | {"completion": row[side], "label": side == "chosen"}
        for side in ("chosen", "rejected")
    ]
    data = read(write_rows(tmp_path / "rows.jsonl", rows), "labels", family)
    lines = [data.train.lines(place)[0] for place in range(2)]
    expected = as_trl.tokens_of_kto(rows, tokenizer(family), tmp_path / "trl")
    for line, other in zip(lines, expected):
        assert divided(line) == (other["prompt_ids"], other["completion_ids"])
        assert line.is_good == other["label"]
    assert not data.summary["unused_columns"] and not data.summary["warnings"]


def test_a_conversation_with_a_mark_counts_from_its_last_question_on(tmp_path):
    """Rows of ms-swift have whole conversations; its `last_round` trains what follows the last
    question.
    """
    turns = [user("1 + 1?"), said("2"), user("Ten minutes, please."), *called(10)]
    rows = [{"messages": turns, "label": True, "tools": [TIMER]}] * 2
    (line,) = read(write_rows(tmp_path / "rows.jsonl", rows), "labels", "qwen").train.lines(0)
    as_pair = {"prompt": turns[:3], "completion": turns[3:], "label": True, "tools": [TIMER]}
    expected = as_trl.tokens_of_kto([as_pair], tokenizer("qwen"), tmp_path / "trl")[0]
    assert divided(line) == (expected["prompt_ids"], expected["completion_ids"])
