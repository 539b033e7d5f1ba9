"""Pairs and answers with marks have the tokens that TRL's trainers give them, and what is summed is
what they sum: everything behind the prompt.
"""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from engine.config.data_settings import DataConfig
from engine.config.preference_settings import Objective, read_as
from engine.data.batches.loader import prepare_data
from engine.errors import DataError
from tests.support.references import tokenizer
from tests.support.references.trl_pairs import PAIRS, as_published
from tests.support.rows import write_rows

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
        {"role": "tool", "name": "start_timer", "content": f"{minutes} minutes"},
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
    "the chosen one goes on": {
        "chosen": [user("Hi"), said("Hello"), user("More"), said("Sure")],
        "rejected": [user("Hi"), said("Hello")],
    },
    "the rejected one goes on": {
        "chosen": [user("Hi"), said("Hello")],
        "rejected": [user("Hi"), said("Hello"), user("More"), said("Sure")],
    },
    "questions differ later": {
        "chosen": [user("Hi"), said("Hello"), user("More"), said("Sure")],
        "rejected": [user("Hi"), said("Hello"), user("Less"), said("No")],
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
    "behind a call": {
        "prompt": [user("Ten minutes, please."), called(10)[0]],
        "chosen": called(10)[1:],
        "rejected": [{"role": "tool", "name": "start_timer", "content": "?"}, said("Who knows.")],
        "tools": [TIMER],
    },
    "behind what a tool said": {
        "prompt": [user("Ten minutes, please."), *called(10)[:2]],
        "chosen": called(10)[2:],
        "rejected": [said("Who knows.")],
        "tools": [TIMER],
    },
    "tools as text": {
        "prompt": [user("Ten minutes, please.")],
        "chosen": called(10),
        "rejected": [said("No")],
        "tools": json.dumps([TIMER]),
    },
}
WITH_REASONING = {
    "reasoning": {
        "prompt": [user("Hi")],
        "chosen": [said("Hello") | {"reasoning_content": "I greet."}],
        "rejected": [said("Go") | {"reasoning_content": "I am tired."}],
    },
    "reasoning of one": {
        "prompt": [user("Hi")],
        "chosen": [said("Hello")],
        "rejected": [said("Go") | {"reasoning_content": "I am tired."}],
    },
    "earlier reasoning": {
        "prompt": [user("Hi"), said("Hello") | {"reasoning_content": "I greet."}, user("Well?")],
        "chosen": [said("Good")],
        "rejected": [said("Bad")],
    },
    "reasoning that is rewritten": {
        "prompt": [user("Hi")],
        "chosen": [said("Hello"), user("Well?"), said("Good") | {"reasoning_content": "I am."}],
        "rejected": [said("Go"), user("Well?"), said("Bad")],
    },
}
WHOLE = tuple(kind for kind, row in ROWS.items() if "prompt" not in row)
KINDS = [
    *((family, kind) for family in ("qwen", "llama3") for kind in ROWS),
    *(("gemma", kind) for kind in ROWS if kind != "system"),  # which its template refuses
    *(("qwen", kind) for kind in WITH_TOOLS),
]


def read(path, reads: str, family: str, max_seq_len: int = 512):
    return read_with(tokenizer(family), path, reads, max_seq_len)


def read_with(made, path, reads: str, max_seq_len: int = 2048):
    data = read_as(DataConfig(source=str(path), eval_fraction=0.0, max_seq_len=max_seq_len), reads)
    found = prepare_data(data, made, 1)
    found.learn(Objective(name="kto" if reads == "labels" else "dpo"))
    return found


def divided(sequence) -> tuple[list[int], list[int]]:
    """The tokens of the prompt and those that are summed, which are all behind it."""
    begin = int(np.argmax(sequence.answer)) + 1  # the mark stands on the token before the answer
    assert sequence.answer[begin - 1 : -1].all() and not sequence.answer[: begin - 1].any()
    ids = sequence.input_ids.tolist()
    return ids[:begin], ids[begin:]


@pytest.mark.parametrize("family, kind", KINDS)
def test_a_pair(tmp_path, family, kind):
    row = (ROWS | WITH_TOOLS)[kind]
    chosen, rejected = read(
        write_rows(tmp_path / "rows.jsonl", [row]), "pairs", family
    ).train.sequences(0)
    expected = as_trl.tokens_of_dpo([row], tokenizer(family), tmp_path / "trl")[0]
    assert divided(chosen) == (expected["prompt_ids"], expected["chosen_ids"])
    assert divided(rejected) == (expected["prompt_ids"], expected["rejected_ids"])


@pytest.mark.parametrize("family, kind", [one for one in KINDS if one[1] not in WHOLE])
def test_an_answer_with_a_mark(tmp_path, family, kind):
    row = (ROWS | WITH_TOOLS)[kind]
    rest = {key: value for key, value in row.items() if key in ("prompt", "tools")}
    rows = [
        rest | {"completion": row[side], "label": side == "chosen"}
        for side in ("chosen", "rejected")
    ]
    data = read(write_rows(tmp_path / "rows.jsonl", rows), "labels", family)
    sequences = [data.train.sequences(place)[0] for place in range(2)]
    expected = as_trl.tokens_of_kto(rows, tokenizer(family), tmp_path / "trl")
    for sequence, other in zip(sequences, expected):
        assert divided(sequence) == (other["prompt_ids"], other["completion_ids"])
        assert sequence.is_desirable == other["label"]
    assert not data.summary["unused_columns"]
    # Behind a call, the prompt is asked for another answer and not for what the tool says.
    assert len(data.summary["warnings"]) == (kind == "behind a call")


def test_a_conversation_with_a_mark_counts_from_its_last_question_on(tmp_path):
    """Rows of ms-swift have whole conversations; its `last_round` trains what follows the last
    question.
    """
    turns = [user("1 + 1?"), said("2"), user("Ten minutes, please."), *called(10)]
    rows = [{"messages": turns, "label": True, "tools": [TIMER]}] * 2
    (sequence,) = read(write_rows(tmp_path / "rows.jsonl", rows), "labels", "qwen").train.sequences(
        0
    )
    as_pair = {"prompt": turns[:3], "completion": turns[3:], "label": True, "tools": [TIMER]}
    expected = as_trl.tokens_of_kto([as_pair], tokenizer("qwen"), tmp_path / "trl")[0]
    assert divided(sequence) == (expected["prompt_ids"], expected["completion_ids"])


# ---------------------------------------------------------------------- other families


def texts_of(row: dict) -> list[str]:
    """What the turns of a row say, with their reasoning, and the numbers of their calls."""
    found = []
    for part in ("prompt", "chosen", "rejected", "completion"):
        for turn in row.get(part, ()):
            found += [turn["content"], turn.get("reasoning_content", "")]
            for call in turn.get("tool_calls", ()):
                found += map(str, call["function"]["arguments"].values())
    return found


ANSWERS = ("chosen", "rejected", "completion")


def called_in(row: dict, parts: tuple[str, ...]) -> list[str]:
    """The functions that these parts of a row call."""
    turns = [turn for part in parts for turn in row.get(part, ())]
    return [call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())]


def as_marked(row: dict) -> list[dict]:
    """The answers of a pair, each with a mark."""
    rest = {key: row[key] for key in ("prompt", "tools") if key in row}
    sides = ("chosen", "rejected")
    return [rest | {"completion": row[side], "label": side == "chosen"} for side in sides]


MARKED = ("one turn", "tools", "reasoning of one")
"""The answers of these rows are compared with KTO's too: its trainer divides texts alike."""


def compared(tmp_path, family: str, rows: dict[str, dict]) -> tuple[int, list[str]]:
    """How many lines of these rows were compared with TRL's, and which of them are others. A row
    is left out where a template refuses it or leaves out what a turn says: there TRL goes on
    without that, and the program says what is missing, or finds the form that the template wants.
    """
    from trl import DPOTrainer, KTOTrainer

    made = as_published(family)
    count, others = 0, []
    for kind, row in rows.items():
        jobs = [(DPOTrainer, "pairs", row)]
        if kind in MARKED:
            jobs += [(KTOTrainer, "labels", marked) for marked in as_marked(row)]
        for trainer, reads, given in jobs:
            try:
                expected = as_trl.prepared_by(trainer, given, made, None)
            except Exception:  # the template's own, of whatever kind
                continue
            names = ("chosen_ids", "rejected_ids") if reads == "pairs" else ("completion_ids",)
            whole = "".join(made.decode(expected["prompt_ids"] + expected[name]) for name in names)
            if not all(text.strip() in whole for text in texts_of(given)):
                continue
            # The number of a call that TRL lost may stand in what is said of it, its name does not.
            behind = "".join(made.decode(expected[name]) for name in names)
            if not all(name in behind for name in called_in(given, ANSWERS)):
                continue
            if not all(name in whole for name in called_in(given, ("prompt",))):
                continue
            copies = [given] * (1 if reads == "pairs" else 2)
            path = write_rows(tmp_path / "rows.jsonl", copies)
            try:
                sequences = read_with(made, path, reads).train.sequences(0)
            except DataError as error:
                assert "leaves out" in str(error)
                continue
            assert len(sequences) == len(names)
            count += len(sequences)
            for sequence, name in zip(sequences, names):
                if divided(sequence) != (expected["prompt_ids"], expected[name]):
                    others.append(f"{family}, {kind}: {name}")
    return count, others


OFTEN = ("qwen2_5", "qwen3", "qwen3_5_nothink", "glm4moe")


@pytest.mark.parametrize("family", OFTEN)
def test_families_whose_prompts_end_otherwise_than_their_texts(tmp_path, family):
    """Qwen3.5's prompt without reasoning ends with two line ends where a text with reasoning has
    one: a single token, where the texts part within it.
    """
    count, others = compared(tmp_path, family, WITH_REASONING | {"one turn": ROWS["one turn"]})
    assert count >= 4 and not others


OF_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates of these families take the content of a turn as parts, and TRL has none of these rows
for them.
"""


@pytest.mark.slow("thirty families take half a minute")
@pytest.mark.parametrize("family", [each for each in PAIRS if each not in OF_PARTS])
def test_lines_of_all_families(tmp_path, family):
    count, others = compared(tmp_path, family, ROWS | WITH_TOOLS | WITH_REASONING)
    assert count >= 4 and not others


# ---------------------------------------------------------------------- without a chat template

PLAIN = {
    "words": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "a token over the border": {"prompt": "Say hel", "chosen": "lo", "rejected": "p"},
    "spaces": {"prompt": "Say ", "chosen": " yes", "rejected": "  no"},
}


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("family", ["qwen2_5", "llama3"])
def test_texts_without_a_chat_template_end_with_the_end_of_sequence(tmp_path, family, kind):
    from trl import DPOTrainer, KTOTrainer

    made, row = copy.deepcopy(as_published(family)), PLAIN[kind]
    made.chat_template = None
    path = write_rows(tmp_path / "rows.jsonl", [row])
    sequences = read_with(made, path, "pairs").train.sequences(0)
    expected = as_trl.prepared_by(DPOTrainer, row, made, None)
    for sequence, name in zip(sequences, ("chosen_ids", "rejected_ids")):
        assert divided(sequence) == (expected["prompt_ids"], expected[name])
    for marked in as_marked(row):
        path = write_rows(tmp_path / "marked.jsonl", [marked] * 2)
        (sequence,) = read_with(made, path, "labels").train.sequences(0)
        expected = as_trl.prepared_by(KTOTrainer, marked, made, None)
        assert divided(sequence) == (expected["prompt_ids"], expected["completion_ids"])


# ---------------------------------------------------------------------- what is cut


@pytest.mark.parametrize("more", [-1, 0, 1, 2, 3, 8])
def test_long_answers_are_cut_at_their_end_and_long_prompts_dropped(tmp_path, more):
    from trl import DPOTrainer

    made, row = tokenizer("qwen"), ROWS["several answers"]
    prompt = len(as_trl.prepared_by(DPOTrainer, row, made, None)["prompt_ids"])
    expected = as_trl.prepared_by(DPOTrainer, row, made, prompt + more)
    assert (expected is None) == (more <= 0)
    path = write_rows(tmp_path / "rows.jsonl", [row])
    if expected is None:
        with pytest.raises(DataError, match="no trained token is left within max_seq_len"):
            read(path, "pairs", "qwen", prompt + more)
        return
    data = read(path, "pairs", "qwen", prompt + more)
    cut = as_trl.cut_by_dpo(expected, prompt + more)
    for sequence, (ids, summed) in zip(data.train.sequences(0), cut):
        assert (sequence.input_ids.tolist(), divided(sequence)[1]) == (ids, summed)


# ---------------------------------------------------------------------- ORPO


@pytest.mark.parametrize("kind", ["one turn", "system", "several answers", "earlier turns"])
def test_orpo_of_trl_adds_an_end_of_sequence_to_these_tokens(tmp_path, kind):
    """Docs say so: the text of the template has its end already."""
    made, row = tokenizer("qwen"), ROWS[kind]
    data = read(write_rows(tmp_path / "rows.jsonl", [row]), "pairs", "qwen")
    expected = as_trl.tokens_of_orpo(row, made, tmp_path / "trl")
    for sequence, side in zip(data.train.sequences(0), ("chosen", "rejected")):
        prompt, summed = divided(sequence)
        assert expected[f"{side}_input_ids"] == [*prompt, *summed, made.eos_token_id]
        labels = [-100] * len(prompt) + summed + [made.eos_token_id]
        assert expected[f"{side}_labels"] == labels


# ---------------------------------------------------------------------- other objectives


@pytest.mark.parametrize("kind", ["several answers", "a call and none", "the chosen one goes on"])
def test_sft_trains_the_answers_of_the_chosen_conversation_alone(tmp_path, kind):
    row, made = (ROWS | WITH_TOOLS)[kind], tokenizer("qwen")
    sequence = read_with(
        made, write_rows(tmp_path / "rows.jsonl", [row]), "examples"
    ).train.sequences(0)[0]
    trained = made.decode(sequence.labels[sequence.labels >= 0].tolist())
    pieces = trained.removesuffix("<|im_end|>").split("<|im_end|>")
    answers = [turn for turn in row["chosen"] if turn["role"] == "assistant"]
    assert len(pieces) == len(answers) and trained.endswith("<|im_end|>")
    for piece, answer in zip(pieces, answers):
        assert answer["content"] in piece and ("<tool_call>" in piece) == ("tool_calls" in answer)
