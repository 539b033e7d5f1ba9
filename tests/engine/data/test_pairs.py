"""Pairs of answers as rows of tokens: whatever form they have, both answers are read, and what is
wrong with a pair is counted and told.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine.config.data_settings import DataColumns, DataConfig, DataSource
from engine.config.preference_settings import read_as
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.data.formats.formats import map_columns
from engine.data.sources.open_source import open_source
from engine.errors import DataError
from tests.support.folders import make_tokenizer
from tests.support.prepared_pairs import prepared
from tests.support.rows import write_rows

ASKED = {"role": "user", "content": "say after one"}
GOOD = {"role": "assistant", "content": "two"}
BAD = {"role": "assistant", "content": "three four"}
EXPECTED = ("<user> say after one <end> <assistant> two <end>", "two <end>", "three four <end>")

FORMS = {
    "texts": {"prompt": "say after one", "chosen": "two", "rejected": "three four"},
    "turns": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    "whole conversations": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "an answer beside messages": {"messages": [ASKED, GOOD], "rejected_response": "three four"},
    "turns beside messages": {"messages": [ASKED, GOOD], "rejected_response": [BAD]},
    "conversations beside messages": {
        "messages": [ASKED, GOOD],
        "rejected_messages": [ASKED, BAD],
        "tools": [],
    },
    "a dialogue as text": {
        "chosen": "\n\nHuman: say after one\n\nAssistant: two",
        "rejected": "\n\nHuman: say after one\n\nAssistant: three four",
    },
}


def said(line) -> str:
    """The text of the tokens that have a label."""
    return make_tokenizer().decode(line.labels[line.labels >= 0].tolist())


@pytest.mark.parametrize("preference_config", FORMS)
def test_both_answers_of_every_form_are_read(tmp_path, preference_config):
    rows = prepared(write_rows(tmp_path / "rows.jsonl", [FORMS[preference_config]])).train
    chosen, rejected = rows.sequences(0)
    assert make_tokenizer().decode(chosen.input_ids.tolist()) == EXPECTED[0]
    assert (said(chosen), said(rejected)) == EXPECTED[1:]
    assert len(rows) == 1 and rows.longest == len(rejected.input_ids)


def test_a_rejected_answer_beside_messages_takes_the_place_of_the_chosen_one(tmp_path):
    """ms-swift writes a text in place of the last turn, and turns in place of all that follows the
    last question.
    """
    more = {"role": "user", "content": "say after two"}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "five"}}]}
    turns = [ASKED, GOOD, more, called, {"role": "tool", "content": "six"}, GOOD]
    context = len(turns) - 1, 3
    for rejected, before in zip(("three four", [BAD]), context):
        row = {"messages": turns, "rejected_response": rejected}
        columns = map_columns(
            "auto",
            [row],
            open_source(DataConfig(source=str(write_rows(tmp_path / "rows.jsonl", [row])))),
            DataColumns(),
            "pairs",
        )
        found = columns.example(row, "line 1")
        assert found.chosen.context == found.rejected.context == before
        assert [turn["content"] for turn in found.chosen.messages[before:]] == [
            turn["content"] for turn in turns[before:]
        ]
        assert found.rejected.messages == [*found.chosen.messages[:before], BAD]


def test_pairs_are_no_answers_with_marks(tmp_path):
    """TRL makes two rows of one there; of a row with a mark, nobody says whose it is."""
    row = FORMS["texts"] | {"label": True}
    path = write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match="has pairs of answers .*; set train.objective to dpo"):
        prepared(path, "labels")


def test_a_ranking_of_a_registry_is_read_as_pairs(tmp_path):
    row = {"instruction": "say after one", "chosen": "two", "rejected": "three four"}
    write_rows(tmp_path / "ranked.jsonl", [row])
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    entry = {"file_name": "ranked.jsonl", "ranking": True, "columns": columns}
    registry = tmp_path / "dataset_info.json"
    registry.write_text(json.dumps({"ranked": entry}), encoding="utf-8")
    chosen, rejected = prepared(f"{registry}:ranked").train.sequences(0)
    assert (said(chosen), said(rejected)) == EXPECTED[1:]


def test_what_is_wrong_with_a_pair_is_counted_and_told(tmp_path):
    desirable = FORMS["texts"]
    rows = [
        desirable,
        desirable | {"rejected": "two"},
        desirable | {"rejected": ""},
        desirable | {"chosen": "two " * 30},
        desirable | {"prompt": "one " * 40},
        desirable | {"chosen": "two " * 40, "rejected": "two " * 50},
    ]
    summary = prepared(write_rows(tmp_path / "rows.jsonl", rows), max_seq_len=24).summary
    assert summary["train_rows"] == 2
    assert summary["rows_cut"] == 1
    assert summary["skipped_because"] == {
        "both answers of the pair are the same": 1,
        "the pair has no rejected answer": 1,
        "no trained token is left within max_seq_len": 1,
        "both answers of the pair are the same within max_seq_len": 1,
    }
    found = " ".join(summary["warnings"])
    assert "skipped because both answers of the pair are the same: 1 (first in line 2" in found


def test_the_preview_names_both_answers(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [FORMS["turns"]])
    found = preview(read_as(DataConfig(source=str(path)), "pairs"), make_tokenizer())
    (row,) = found["rows"]
    answers = [[piece.get("answer") for piece in pieces] for pieces in row["documents"]]
    assert answers == [[None, "chosen"], ["rejected"]]
    assert row["documents"][1][0]["text"].strip() == EXPECTED[2]
    assert found["packed_rows"] is None


def test_a_stranger_is_a_prompt_with_the_answer_before_it(tmp_path):
    rows = [
        {"prompt": f"say {word}", "completion": answer, "label": number % 2}
        for number, (word, answer) in enumerate(
            [("one", "two"), ("three", "four five"), ("six", "seven")]
        )
    ]
    found = prepared(write_rows(tmp_path / "rows.jsonl", rows), "labels").train
    assert found.desirable.tolist() == [False, True, False]
    kl_completions = [found.kl_completions.sequences(i)[0] for i in range(3)]
    assert [said(line) for line in kl_completions] == [
        "seven <end>",
        "two <end>",
        "four five <end>",
    ]
    for own, stranger in zip((found.sequences(i)[0] for i in range(3)), kl_completions):
        begin = int(np.argmax(own.answer)) + 1
        assert own.input_ids[:begin].tolist() == stranger.input_ids[:begin].tolist()


def test_another_mark_is_another_data_set(tmp_path):
    rows = [{"prompt": "say one", "completion": "two", "label": mark} for mark in (1, 0, 1)]
    before = prepared(write_rows(tmp_path / "rows.jsonl", rows), "labels").fingerprint
    assert prepared(write_rows(tmp_path / "same.jsonl", rows), "labels").fingerprint == before
    rows[1]["label"] = 1
    assert prepared(write_rows(tmp_path / "rows.jsonl", rows), "labels").fingerprint != before


def test_texts_in_a_mix_with_marked_answers_are_refused(tmp_path):
    rows = [{"prompt": "say one", "completion": "two", "label": mark} for mark in (1, 0)]
    answers = write_rows(tmp_path / "answers.jsonl", rows)
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": "one two three", "label": 1}] * 2)
    mix = tuple(DataSource(str(path), 1.0) for path in (texts, answers))
    with pytest.raises(DataError, match="texts.jsonl has no prompts with answers"):
        prepare_data(
            read_as(DataConfig(source=mix, eval_fraction=0.0), "labels"), make_tokenizer(), 1
        )


@pytest.mark.parametrize(
    ("batch_size", "others"),
    [
        (None, [6, 0, 1, 2, 3, 4, 5]),
        (3, [2, 0, 1, 5, 3, 4, 5]),
        (4, [3, 0, 1, 2, 6, 4, 5]),
        (1, [6, 0, 1, 2, 3, 4, 5]),
        (9, [6, 0, 1, 2, 3, 4, 5]),
    ],
)
def test_strangers_are_of_the_batch_in_the_order_of_the_data(tmp_path, batch_size, others):
    """Of seven rows, the last one may be alone in its batch."""
    made = [{"prompt": "one", "completion": "two", "label": True}] * 7
    rows = prepared(write_rows(tmp_path / "rows.jsonl", made), "labels").train
    if batch_size:
        rows = rows.grouped_by_length(batch_size)
    assert [rows.row_before(i) for i in range(7)] == others
