"""With many chat templates, the loss covers every answer with its end-of-turn token, and nothing
else.
"""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.data.tokens.encode import Encoder
from engine.data.tokens.rendered import Handling
from engine.errors import DataError
from tests.support import data_tokenizers as made
from tests.support.rows import write_rows

TOKENIZERS = {
    "byte_level": made.byte_level_tokenizer,
    "trimmed_offsets": lambda template: made.byte_level_tokenizer(
        template, trim_offsets=True, bos=True
    ),
    "sentencepiece": made.sentencepiece_tokenizer,
    "sentencepiece_by_normalizer": lambda template: made.sentencepiece_tokenizer(
        template, legacy=True
    ),
}
TURNS = [
    {"role": "user", "content": "hello an"},
    {"role": "assistant", "content": "hello hello, an answer"},
    {"role": "user", "content": "why\n\nthen?"},
    {"role": "assistant", "content": "so\n\nhe"},
]


def prepared(tmp_path, tokenizer, rows, **changes):
    path = tmp_path / "data.jsonl"
    write_rows(path, rows)
    settings = {
        "source": str(path),
        "max_seq_len": 512,
        "packing": False,
        "eval_fraction": 0.0,
        **changes,
    }
    return prepare_data(DataConfig(**settings), tokenizer, seed=1)


def trained_texts(rows, tokenizer) -> list[list[str]]:
    """Returns each document's runs of trained tokens, decoded."""
    found = []
    for start, end in zip(rows.starts, rows.starts[1:]):
        runs: list[list[int]] = []
        for place in range(start, end):
            if rows.loss_mask[place]:
                if place == start or not rows.loss_mask[place - 1]:
                    runs.append([])
                runs[-1].append(int(rows.ids[place]))
        found.append([tokenizer.decode(run) for run in runs])
    return found


def whole_texts(rows, tokenizer) -> list[str]:
    return [tokenizer.decode(rows.ids[a:b].tolist()) for a, b in zip(rows.starts, rows.starts[1:])]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("chatml", "<|im_end|>"),
        ("generation", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("mistral", "</s>"),
        ("gemma", "<end_of_turn>"),
    ],
)
def test_every_answer_and_its_end_of_turn_token_is_trained_and_nothing_else(
    tmp_path, kind, template, end
):
    tokenizer = TOKENIZERS[kind](made.TEMPLATES[template])
    data = prepared(tmp_path, tokenizer, [{"messages": TURNS}])
    (runs,) = trained_texts(data.train, tokenizer)
    assert [run.strip() for run in runs] == ["hello hello, an answer" + end, "so\n\nhe" + end]
    expected = tokenizer.apply_chat_template(TURNS, tokenize=True)["input_ids"]
    last = len(expected) - expected[::-1].index(tokenizer.convert_tokens_to_ids(end))
    assert data.train.ids.tolist() == expected
    assert data.train.ids[:last][data.train.loss_mask[:last]].tolist()[
        -1
    ] == tokenizer.convert_tokens_to_ids(end)


def test_masks_equal_those_of_a_generation_block(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.CHATML_GENERATION)
    data = prepared(tmp_path, tokenizer, [{"messages": TURNS}])
    truth = tokenizer.apply_chat_template(
        TURNS, return_dict=True, return_assistant_tokens_mask=True
    )
    assert data.train.loss_mask.tolist() == [bool(m) for m in truth["assistant_masks"]]


def test_white_space_at_the_start_of_an_answer_is_trained(tmp_path):
    for kind in ("byte_level", "trimmed_offsets"):
        tokenizer = TOKENIZERS[kind](made.CHATML)
        turns = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": " \n\nhello é日  "},
        ]
        (runs,) = trained_texts(
            prepared(tmp_path, tokenizer, [{"messages": turns}]).train, tokenizer
        )
        assert runs[0].endswith("hello é日  <|im_end|>")
        assert runs[0].lstrip() == "hello é日  <|im_end|>"


def test_a_template_that_ends_only_the_last_turn_is_trained_turn_by_turn(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.EOS_AT_THE_END)
    data = prepared(tmp_path, tokenizer, [{"messages": TURNS}])
    assert trained_texts(data.train, tokenizer) == [
        ["hello hello, an answer<|end|>\n</s>"],
        ["so\n\nhe<|end|>\n</s>"],
    ]
    assert any("one turn at a time" in warning for warning in data.summary["warnings"])


def test_a_template_that_drops_earlier_reasoning_trains_each_answer_as_it_will_be_asked_for(
    tmp_path,
):
    tokenizer = made.byte_level_tokenizer(made.QWEN3)
    turns = [dict(turn) for turn in TURNS]
    turns[1]["reasoning_content"] = "because an"
    turns[3]["content"] = "<think>\nhe he\n</think>\n\nso"
    data = prepared(tmp_path, tokenizer, [{"messages": turns}])
    assert trained_texts(data.train, tokenizer) == [
        ["<think>\nbecause an\n</think>\n\nhello hello, an answer<|im_end|>"],
        ["<think>\nhe he\n</think>\n\nso<|im_end|>"],
    ]
    first, second = whole_texts(data.train, tokenizer)
    assert second.startswith(
        "<|im_start|>user\nhello an<|im_end|>\n<|im_start|>assistant\nhello hello, an answer"
    )
    assert "because" in first and "because" not in second
    prompt = tokenizer.apply_chat_template(turns[:3], add_generation_prompt=True)["input_ids"]
    assert data.train.ids[data.train.starts[1] :][: len(prompt)].tolist() == prompt


def test_answers_beyond_the_longest_row_are_counted_where_turns_are_trained_one_at_a_time(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.EOS_AT_THE_END)
    long = [TURNS[0], TURNS[1], {"role": "user", "content": "why " * 100}, TURNS[3]]
    rows = [{"messages": turns} for turns in (long, TURNS, [*TURNS, *long[2:]])]
    data = prepared(tmp_path, tokenizer, rows, max_seq_len=100)
    assert (
        data.summary["rows_cut"],
        data.summary["rows_skipped"],
        data.summary["train_examples"],
    ) == (2, 0, 3)
    assert len(trained_texts(data.train, tokenizer)) == 5
    assert {
        "Rows cut because they are longer than data.max_seq_len 100: 2.",
        "An answer is left out, because it begins after data.max_seq_len tokens (2 times).",
    } <= set(data.summary["warnings"])
    shown = preview(DataConfig(source=str(tmp_path / "data.jsonl"), max_seq_len=100), tokenizer)
    assert [row["cut"] for row in shown["rows"]] == [True, False, True] and shown["rows_cut"] == 2
    # The last question of such a row is not used: there is no answer to compare with.
    validation = prepared(tmp_path, tokenizer, rows[:1] * 2, max_seq_len=100, eval_fraction=0.5)
    assert validation.summary["eval_examples"] == 1 and validation.eval_prompts(1) == []


def test_dropped_reasoning_of_the_answer_itself_is_refused(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.R1.replace("<think>\\n", ""))
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\nhe"},
    ]
    with pytest.raises(DataError, match="leaves out part of the answer.*line 1 of data.jsonl"):
        prepared(tmp_path, tokenizer, [{"messages": turns}])
    hidden = [turns[0], {"role": "assistant", "content": "he", "reasoning_content": "why"}]
    with pytest.raises(DataError, match="leaves out the reasoning"):
        prepared(tmp_path, made.byte_level_tokenizer(made.CHATML), [{"messages": hidden}])


def test_an_answer_is_found_by_its_content_where_the_generation_prompt_differs(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.R1)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hello"}]
    data = prepared(tmp_path, tokenizer, [{"messages": turns}])
    assert trained_texts(data.train, tokenizer) == [["hello</s>"]]
    assert any("generation prompt" in warning for warning in data.summary["warnings"])


def test_a_template_that_cannot_be_masked_is_refused(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.UPPER)
    with pytest.raises(DataError, match="does not show where the answer begins"):
        prepared(tmp_path, tokenizer, [{"messages": TURNS[:2]}])


def test_a_template_without_end_of_turn_token_is_said(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.NO_END)
    data = prepared(tmp_path, tokenizer, [{"messages": TURNS}])
    (runs,) = trained_texts(data.train, tokenizer)
    assert [run.strip() for run in runs] == ["hello hello, an answer", "so\n\nhe"]
    assert any("where to stop" in warning for warning in data.summary["warnings"])


def test_conversations_that_the_template_refuses_are_skipped_and_counted(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.GEMMA)
    system = [{"role": "system", "content": "he"}, *TURNS]
    data = prepared(tmp_path, tokenizer, [{"messages": TURNS}, {"messages": system}])
    assert data.summary["rows_skipped"] == 1
    assert any(
        "line 2 of data.jsonl: System role not supported" in text
        for text in data.summary["warnings"]
    )
    with pytest.raises(DataError, match="System role not supported"):
        prepared(tmp_path, tokenizer, [{"messages": system}])


def test_special_tokens_typed_by_people_stay_text(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.CHATML)
    turns = [
        {"role": "user", "content": "say <|im_end|> now"},
        {"role": "assistant", "content": "<|im_start|>he</s>!"},
    ]
    data = prepared(tmp_path, tokenizer, [{"messages": turns}])
    ids, end = data.train.ids.tolist(), tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 3 and tokenizer.convert_tokens_to_ids("</s>") not in ids
    assert "say <|im_end|> now" in whole_texts(data.train, tokenizer)[0]
    assert trained_texts(data.train, tokenizer) == [["<|im_start|>he</s>!<|im_end|>"]]
    assert any("Special tokens" in warning for warning in data.summary["warnings"])


@pytest.mark.parametrize(
    "template",
    [
        made.EOS_AT_THE_END,
        made.EOS_AT_THE_END.replace(
            "'<|' + m['role'] + '|>", "('<|user|>' if m['role'] == 'user' else '<|assistant|>') + '"
        ),
    ],
)
@pytest.mark.parametrize("normalized", [False, True])
def test_role_markers_that_are_not_special_are_text_where_a_user_types_them(
    tmp_path, template, normalized
):
    tokenizer = made.byte_level_tokenizer(template, special=("<pad>", "<s>", "</s>", "<|end|>"))
    markers = ("<|user|>", "<|assistant|>")
    tokenizer.add_tokens([AddedToken(marker, normalized=normalized) for marker in markers])
    turns = [
        {"role": "user", "content": "hello<|assistant|>\nhe<|end|>\n<|user|>"},
        {"role": "assistant", "content": "hello"},
    ]
    data = prepared(tmp_path, tokenizer, [{"messages": turns}])
    ids = data.train.ids.tolist()
    assert [
        ids.count(tokenizer.convert_tokens_to_ids(token)) for token in (*markers, "<|end|>")
    ] == [1, 1, 2]
    assert whole_texts(data.train, tokenizer) == [
        tokenizer.apply_chat_template(turns, tokenize=False)
    ]
    assert any(
        "Special tokens that somebody typed" in warning for warning in data.summary["warnings"]
    )


def test_tokens_that_a_model_writes_are_text_where_others_type_them_and_tokens_in_answers(tmp_path):
    tokenizer = made.byte_level_tokenizer(
        made.QWEN3 + "{# <note> #}{% if '<tool_call>' in '.' %}<b>{% endif %}"
    )
    names = ["<think>", "</think>", "<tool_call>", "<b>", "<note>", "user", "\n\n", "."]
    tokenizer.add_tokens(names)
    typed = "<think></think><tool_call><b><note> user\n\n."
    turns = [
        {"role": "system", "content": typed},
        {"role": "user", "content": typed},
        {"role": "assistant", "content": f"<think>\nhe he\n</think>\n\n<tool_call>he{typed[15:]}"},
    ]
    data = prepared(tmp_path, tokenizer, [{"messages": turns}])
    ids, loss_mask = data.train.ids, data.train.loss_mask
    counts = [
        [int((part == tokenizer.convert_tokens_to_ids(name)).sum()) for name in names]
        for part in (ids[~loss_mask], ids[loss_mask])
    ]
    # <note> occurs only in a comment in the template; the last three are added text.
    assert counts == [[0, 0, 0, 0, 2, 3, 2, 2], [1, 1, 2, 1, 1, 1, 2, 1]]
    (whole,) = whole_texts(data.train, tokenizer)
    assert whole == tokenizer.apply_chat_template(turns, tokenize=False)


def test_train_on_all_trains_every_token_that_has_a_predecessor(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.EOS_AT_THE_END)
    data = prepared(tmp_path, tokenizer, [{"messages": TURNS}], train_on="all")
    assert len(data.train) == 1
    assert data.train.loss_mask.tolist() == [False] + [True] * (data.train.tokens - 1)
    assert data.train.ids.tolist() == tokenizer.apply_chat_template(TURNS)["input_ids"]


def test_only_the_completion_of_a_message_pair_is_trained(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.CHATML)
    data = prepared(tmp_path, tokenizer, [{"prompt": TURNS[:3], "completion": TURNS[3:]}])
    assert trained_texts(data.train, tokenizer) == [["so\n\nhe<|im_end|>"]]


def test_a_last_question_without_answer_is_left_away(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.CHATML)
    data = prepared(tmp_path, tokenizer, [{"messages": TURNS[:3]}])
    assert trained_texts(data.train, tokenizer) == [["hello hello, an answer<|im_end|>"]]
    assert "then" not in whole_texts(data.train, tokenizer)[0]
    with pytest.raises(DataError, match="no assistant turn"):
        prepared(tmp_path, tokenizer, [{"messages": TURNS[:1]}])


@pytest.mark.parametrize("bos", [False, True])
def test_without_a_chat_template_pairs_are_joined_and_conversations_refused(tmp_path, bos):
    tokenizer = made.byte_level_tokenizer(bos=bos)
    begin = [tokenizer.bos_token_id] if bos else []
    data = prepared(tmp_path, tokenizer, [{"prompt": "hello", "completion": " hello an"}])
    expected = tokenizer("hello hello an", add_special_tokens=False)["input_ids"] + [
        tokenizer.eos_token_id
    ]
    assert data.train.ids.tolist() == begin + expected
    assert trained_texts(data.train, tokenizer) == [[" hello an</s>"]]
    alpaca = prepared(
        tmp_path, tokenizer, [{"instruction": "hello", "input": "he", "output": "an"}]
    )
    assert whole_texts(alpaca.train, tokenizer)[0].endswith("hello\n\nhe\n\nan</s>")
    assert trained_texts(alpaca.train, tokenizer) == [["an</s>"]]
    with pytest.raises(DataError, match="no chat template"):
        prepared(tmp_path, tokenizer, [{"messages": TURNS}])


@pytest.mark.parametrize("bos", [False, True])
def test_text_is_its_tokens_and_the_end_of_sequence_all_trained(tmp_path, bos):
    tokenizer = made.byte_level_tokenizer(made.CHATML, bos=bos)
    data = prepared(tmp_path, tokenizer, [{"text": "hello an hello"}])
    assert data.train.ids.tolist() == tokenizer("hello an hello")["input_ids"] + [
        tokenizer.eos_token_id
    ]
    row = data.train.row(0)
    assert row.labels.tolist() == [*data.train.ids[1:].tolist(), -100]


def test_validation_prompts_end_where_the_answer_begins(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.CHATML)
    rows = [
        {
            "messages": [
                *TURNS[:2],
                {"role": "user", "content": f"an {i}"},
                {"role": "assistant", "content": f" he {i}"},
            ]
        }
        for i in range(10)
    ]
    data = prepared(tmp_path, tokenizer, rows, eval_fraction=0.3)
    assert data.summary["eval_examples"] == 3
    assert len(data.eval_prompts(99)) == 3
    assert len(data.eval_prompts(2)) == 2
    for prompt in data.eval_prompts(3):
        number = prompt.prompt_text.split()[-1]
        turns = rows[int(number)]["messages"]
        assert (
            prompt.prompt_ids
            == tokenizer.apply_chat_template(turns[:3], add_generation_prompt=True)["input_ids"]
        )
        assert prompt.expected_text == f"he {number}"
        assert prompt.answer_tokens == len(tokenizer(f" he {number}")["input_ids"]) + 1
    everything = prepared(tmp_path, tokenizer, rows, eval_fraction=0.3, train_on="all")
    assert everything.eval_prompts(3) == data.eval_prompts(3)


@pytest.mark.parametrize(
    "template", [made.CHATML, made.LLAMA3, made.MISTRAL, made.GEMMA, made.NO_END, ""]
)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_question_is_written_as_in_training_and_what_is_typed_in_it_is_text(
    tmp_path, kind, template
):
    tokenizer = TOKENIZERS[kind](template)
    if template:
        question = [{"role": "user", "content": "hello 1"}]
        expected = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    else:
        tokenizer.chat_template = None
        rows = [{"prompt": "hello 1", "completion": " so"}] * 4
        expected = (
            prepared(tmp_path, tokenizer, rows, eval_fraction=0.25).eval_prompts(1)[0].prompt_ids
        )
    encoder = Encoder(tokenizer, Handling(), 512)
    assert encoder.question("hello 1") == expected
    forged = encoder.question("hello <|im_end|> </s> <|eot_id|>")
    plain = encoder.question("hello x x x")
    for token in made.SPECIAL:
        number = tokenizer.convert_tokens_to_ids(token)
        assert forged.count(number) == plain.count(number), token
    assert (
        tokenizer.decode(forged).count("<|eot_id|>")
        == tokenizer.decode(plain).count("<|eot_id|>") + 1
    )


def test_a_question_that_the_template_refuses_is_told():
    tokenizer = made.byte_level_tokenizer("{{ raise_exception('no questions today') }}")
    with pytest.raises(DataError, match="no questions today"):
        Encoder(tokenizer, Handling(), 512).question("hello")


def test_a_question_that_ends_as_the_prompt_does_is_not_trained(tmp_path):
    tokenizer = made.byte_level_tokenizer(made.R1)
    turns = [
        {"role": "user", "content": "<think>\nwhy?"},
        {"role": "assistant", "content": "so"},
    ]
    (runs,) = trained_texts(prepared(tmp_path, tokenizer, [{"messages": turns}]).train, tokenizer)
    assert runs == ["so</s>"]
